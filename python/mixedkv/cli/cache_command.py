"""`mixedkv cache`: lists, checks, removes and imports stored KV."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixedkv.cli.model import quiet
from mixedkv.cli.words import add, add_switch, duration, gigabytes
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.model.named_model import find_model
from mixedkv.sizes import format_bytes
from mixedkv.tokens import Tokens, as_tokens

if TYPE_CHECKING:
    from mixedkv.store import KVStore
    from mixedkv.store.results import EntryInfo, MessageInfo

_ANY_SIZE_GB = 2.0**29
_ID_SHOWN = 12
_LABEL_SHOWN = 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List, remove, check, clean, rekey or import the KV that is stored in a folder."
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    ls = _add(actions, "ls", _ls, "list what is stored, last used first")
    add_switch(ls, "--messages", "list chat messages by id, with their entries")
    add(ls, "--tenant", "NAME", "with --messages: only this tenant's")
    rm = _add(actions, "rm", _rm, "remove entries, and what builds on them")
    add(rm, "entry", "ID", "entries to remove, by the first digits of their ids", nargs="*")
    add(rm, "--session", "NAME", "remove what belongs to this session alone")
    add(rm, "--message", "ID", "remove all entries that hold this chat message")
    add(rm, "--tenant", "NAME", "tenant of the session or message", default="")
    add_switch(rm, "--all", "remove all entries")
    add(rm, "--remote", "URL", "also remove it from this remote, as --store-remote of the server")
    _add(actions, "verify", _verify, "read everything, remove what is damaged")
    rekey = _add(actions, "rekey", _rekey, "give an encrypted store another master key, also its sessions")
    add(rekey, "--new-key", "SOURCE", "the new master key, given as for --key", required=True)
    packed = _add(actions, "import", run_import, "store a packed cache of another program, for an f16 cache")
    add(packed, "packed", "FILE", "file with the packed cache", Path)
    add(packed, "-m --model", "MODEL", MODEL_HELP)
    text_or_tokens = packed.add_mutually_exclusive_group(required=True)
    add(text_or_tokens, "--tokens", "FILE", "file with the token ids of the cache, a JSON list", Path)
    add(text_or_tokens, "--text", "FILE", "file with the text of the cache, to be tokenized", Path)
    packed.add_argument(
        "--rotary",
        choices=("auto", "half", "interleaved"),
        default="auto",
        help="how RoPE paired the elements of a head (default: auto, whichever has this model's rows)",
    )
    add(packed, "--tenant", "NAME", "tenant to store the entry for", default="")
    gc = _add(actions, "gc", _gc, "remove what was left behind by killed programs")
    add(gc, "--max-gb", "SIZE", "also shrink the store to this size, in 10^9 bytes or as 20GiB", gigabytes)
    text = "also remove entries that were not used for this long, e.g. 30d, 12h"
    add(gc, "--older-than", "TIME", text, duration)
    add(gc, "--eviction", "lru|oldest|gdsf", "which entries leave first for --max-gb", default="lru")


def _add(actions: Any, name: str, command: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    add(parser, "--store", "DIR", "folder of the store", Path, required=True)
    add(parser, "--key", "SOURCE", "master key of an encrypted store: env:NAME or file:PATH")
    parser.set_defaults(command=command)
    return parser


def _open(args: argparse.Namespace, **options: Any) -> KVStore:
    from mixedkv.store import KVStore
    from mixedkv.store.encryption import parse_key_source

    _check_store(args.store)
    key = parse_key_source(args.key) if args.key else None
    given = {"max_kv_size_gb": _ANY_SIZE_GB, **options}
    return KVStore(args.store, max_ram_bytes=0, key=key, check_key=False, **given)


def _check_store(folder: Path) -> None:
    from mixedkv.store.folder import store_root

    if not store_root(folder).is_dir():
        raise ValueError(f"{folder} holds no store of this version")


def _ls(args: argparse.Namespace) -> None:
    with _open(args) as store:
        if args.messages:
            rows = _message_table(store.messages.entries(args.tenant))
        elif args.tenant is not None:
            raise ValueError("--tenant goes with --messages only: names of tenants are stored as hashes")
        else:
            rows = _table(store.entries())
        print("\n".join(rows))


def _message_table(messages: list[MessageInfo]) -> Iterable[str]:
    if messages:
        yield f"{'entry':<{_ID_SHOWN}}  {'tokens':>7}  {'size':>10}  {'age':>8}  message"
    for info in messages:
        size, age = format_bytes(info.nbytes), _age(time.time() - info.created)
        entry = info.entry[:_ID_SHOWN]
        yield f"{entry:<{_ID_SHOWN}}  {info.n_tokens:>7}  {size:>10}  {age:>8}  {info.message_id}"
    yield f"{len({info.message_id for info in messages})} messages"


def _table(entries: list[EntryInfo]) -> Iterable[str]:
    if entries:
        yield f"{'id':<{_ID_SHOWN}}  {'tokens':>15}  {'size':>10}  {'used':>8}  model and cache"
    for entry in entries:
        span = f"{entry.p0} to {entry.p1}"
        size, age = format_bytes(entry.nbytes), _age(time.time() - entry.used)
        label = _shorten(entry.label) + (" *" if entry.encrypted else "")
        yield f"{entry.id[:_ID_SHOWN]:<{_ID_SHOWN}}  {span:>15}  {size:>10}  {age:>8}  {label}"
    n_bytes = sum(entry.nbytes for entry in entries)
    encrypted = sum(entry.encrypted for entry in entries)
    note = f", {encrypted} encrypted (*)" if encrypted else ""
    yield f"{len(entries)} entries, {format_bytes(n_bytes)}{note}"


def _rm(args: argparse.Namespace) -> None:
    if (bool(args.entry) + bool(args.session) + bool(args.message) + args.all) != 1:
        raise ValueError("rm: give ids, --session NAME, --message ID or --all")
    with _open(args, remote=args.remote) as store:
        if args.session:
            removed = store.remove(session=args.session, tenant=args.tenant)
        elif args.message:
            removed = store.messages.remove(args.message, args.tenant)
        else:
            ids = [entry.id for entry in store.entries()]
            chosen = ids if args.all else [_resolve(ids, prefix) for prefix in args.entry]
            removed = sum(store.remove(entry) for entry in chosen)
    if not removed and (args.session or args.message):
        name = f"session {args.session!r}" if args.session else f"message {args.message!r}"
        tenant = f" of tenant {args.tenant!r}" if args.tenant else ""
        raise LookupError(
            f"rm: there is no entry of {name}{tenant}, so nothing was removed; names of an encrypted store "
            f"are found with its --key, those of a tenant with its --tenant"
        )
    print(f"{removed} entries removed")


def _resolve(ids: list[str], prefix: str) -> str:
    found = [entry for entry in ids if entry.startswith(prefix.lower())]
    if len(found) != 1:
        raise LookupError(f"{prefix!r} begins the id of {len(found) or 'no'} entries; see mixedkv cache ls")
    return found[0]


def _verify(args: argparse.Namespace) -> None:
    with _open(args) as store:
        report = store.verify()
    for entry, reason in report.damaged.items():
        print(f"{entry[:_ID_SHOWN]}  {reason}")
    print(f"{report.n_whole} entries whole, {len(report.damaged)} damaged and removed")
    if report.unreadable:
        print(f"{len(report.unreadable)} not checked: encrypted with another key, or with none; see --key")


def _gc(args: argparse.Namespace) -> None:
    max_gb = _ANY_SIZE_GB if args.max_gb is None else args.max_gb
    with _open(args, max_kv_size_gb=max_gb, eviction=args.eviction, max_age_seconds=args.older_than) as store:
        report = store.gc()
        stats = store.stats()
    print(f"{report.n_unfinished} unfinished files, {report.n_orphans} files without an entry,")
    print(
        f"{report.n_missing} entries without a file, {stats.n_expired} not used for long, "
        f"{report.n_evicted} over the size: removed"
    )
    print(f"{stats.n_entries} entries, {format_bytes(stats.bytes_disk)} stay")


def _rekey(args: argparse.Namespace) -> None:
    from mixedkv.sessions.metadata_sqlite import reseal
    from mixedkv.store import rekey
    from mixedkv.store.encryption import parse_key_source

    if not args.key:
        raise ValueError("rekey: give the old key with --key")
    _check_store(args.store)
    old, new = parse_key_source(args.key), parse_key_source(args.new_key)
    n_entries = rekey(args.store, old, new)
    n_sessions = reseal(args.store, old, new)
    print(f"{n_entries} entries and {n_sessions} sessions have the new key; the old one reads none of them")


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _shorten(label: str) -> str:
    label = "".join(letter if letter.isprintable() else "?" for letter in label)
    return label if len(label) <= _LABEL_SHOWN else label[: _LABEL_SHOWN - 3] + "..."


_SPARE = 16  # tokens of the context besides the packed cache's


def run_import(args: argparse.Namespace) -> None:
    from mixedkv.llama import Llama
    from mixedkv.store import KVStore, load_packed, unpack_kv_cache
    from mixedkv.store.encryption import parse_key_source

    layers = unpack_kv_cache(args.packed.read_bytes())
    shape = layers[0][0].shape if layers else (0,)
    n_ctx = (shape[2] if len(shape) == 4 else shape[0]) + _SPARE
    path, key = find_model(args.model), parse_key_source(args.key) if args.key else None
    with quiet(True), Llama(path, kv="f16", n_ctx=n_ctx, verbose=False) as llm:
        if args.tokens is not None:
            tokens = _read_tokens(args.tokens)
        else:
            tokens = as_tokens(llm.tokenize(args.text.read_bytes(), add_bos=True, special=True))
        off = load_packed(llm, layers, tokens, rotary=args.rotary)
        with KVStore(args.store, max_ram_bytes=0, key=key) as store:
            saved = store.save(llm, tenant=args.tenant)
    if saved.reason:
        raise ValueError(
            f"{args.packed}: not stored, its rows are off by {off:.1g} of their size: {saved.reason}"
        )
    print(f"{saved.n_stored} of {len(tokens)} tokens stored; rows are within {off:.1g} of this model's")


def _read_tokens(path: Path) -> Tokens:
    try:
        return as_tokens(json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"--tokens {path}: give a JSON list of token ids") from None
