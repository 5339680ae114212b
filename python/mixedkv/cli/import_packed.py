"""`mixedkv cache import`: stores a packed cache of another program."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mixedkv.cli.model import quiet
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.model.named_model import find_model
from mixedkv.tokens import Tokens, as_tokens

_SPARE = 16  # tokens of the context besides the packed cache's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("packed", metavar="FILE", type=Path, help="file with the packed cache")
    parser.add_argument("-m", "--model", metavar="MODEL", help=MODEL_HELP)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument(
        "--tokens", metavar="FILE", type=Path, help="file with the token ids of the cache, a JSON list"
    )
    text.add_argument(
        "--text", metavar="FILE", type=Path, help="file with the text of the cache, to be tokenized"
    )
    parser.add_argument(
        "--rotary",
        choices=("auto", "half", "interleaved"),
        default="auto",
        help="how RoPE paired the elements of a head (default: auto, whichever has this model's rows)",
    )
    parser.add_argument("--tenant", metavar="NAME", default="", help="tenant to store the entry for")


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
