"""Gives a store another master key, by wrapping its data keys again, or its first one, by encrypting what was
stored without.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from mixedkv.kv.block import KVBlock
from mixedkv.store.encryption import Cipher, KeyCipher, KeySource, PlainCipher
from mixedkv.store.entries import Entries
from mixedkv.store.entry_row import EntryError, EntryRow
from mixedkv.store.folder import StoreFolder, store_root
from mixedkv.store.identity import Identity
from mixedkv.store.index import Index
from mixedkv.store.lookup import Search, key_context
from mixedkv.store.message_ids import MessageIds
from mixedkv.store.results import Match


def rekey(folder: str | Path, old: KeySource, new: KeySource) -> int:
    """Wrap the data keys of all entries with `new`, all or none, and return how many. The hashing key stays,
    since hashed names (of sessions, for example) are not known any more.

    No other program may have the store open: it would find nothing, and store entries with the old key.

    Raises:
        ValueError: the store is not encrypted with `old`, both keys are the same, or an entry's key is
            damaged.
        OSError: it cannot be read or written.
    """
    before, after = KeyCipher(old), KeyCipher(new)
    if before.key_id == after.key_id:
        raise ValueError("the new key is the old one: give another")
    index = StoreFolder(store_root(folder)).open()
    try:
        known = index.key_ids()
        if before.key_id not in known:
            if after.key_id in known:
                return 0  # called a second time
            raise ValueError(f"{folder} is not encrypted with the old key: give the one it was opened with")
        try:
            if hashing := index.hashing_key(before.key_id):
                before.unwrap_hashing_key(hashing)

            def wrap(row: EntryRow) -> bytes:
                return before.rewrap(after, row.key, key_context(row.identity, row.id))

            n = index.rekey(before.key_id, after.key_id, before.rewrap_hashing_key(after), wrap)
        except EntryError as error:
            raise ValueError(f"{folder}: {error}: remove it first, see `mixedkv cache verify`") from None
        index.forget()  # so that the old wrapped keys are erased
    finally:
        index.close()
    return n


_ANY_SIZE = 2**62
_ANY_CUT = {"sliding_window": 1}  # whole entries are copied, so it does not matter where they can be cut


def encrypt_plain(folder: str | Path, key: KeySource, tenants: Iterable[str] = ()) -> tuple[int, int]:
    """Encrypt every plain entry of a store, and remove the plain files.

    It can be called again after an interruption. The entries belong to no session afterwards, since names of
    sessions were stored as hashes and cannot be hashed again with the key. Message ids are kept for the
    default tenant and for `tenants`, since names of tenants were stored as hashes too.

    Returns:
        How many entries were encrypted, and how many could not be read and were removed.

    Raises:
        ValueError: the store is encrypted with another key, or the name of a tenant is refused.
        OSError: it cannot be read or written.
    """
    cipher = KeyCipher(key)
    with ExitStack() as stack:
        plain, sealed = (
            stack.enter_context(closing(_open(folder, each))) for each in (PlainCipher(), cipher)
        )
        if others := plain.key_ids() - {"", cipher.key_id}:
            raise ValueError(f"{folder} is encrypted with another key (named {min(others)}): give that one")
        sealed.adopt_key()
        index = stack.enter_context(closing(StoreFolder(store_root(folder)).open()))
        rows = [row for row in index.entries() if not row.key_id]
        new = _copy(index, rows, plain, sealed)
        before, after = MessageIds(plain, PlainCipher()), MessageIds(sealed, cipher)
        for tenant in dict.fromkeys(("", *tenants)):
            after.adopt(tenant, before.entries(tenant), new)
        for row in rows:
            plain.remove(row.id)
    return len(new), len(rows) - len(new)


def _open(folder: str | Path, cipher: Cipher) -> Entries:
    return Entries(store_root(folder), cipher, max_bytes=_ANY_SIZE, max_ram_bytes=0, eviction="lru")


def _copy(index: Index, rows: list[EntryRow], plain: Entries, sealed: Entries) -> dict[str, str]:
    """Write the entries of these rows again; return the new ids by the old ones, for those that could be
    read.
    """
    new: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: row.p0):  # what others build on begins, but may not end, first
        match = _match(index, row)
        block = None if match is None else _read(plain, match)
        if match is None or block is None or any(link.entry not in new for link in match.links[:-1]):
            continue
        links = tuple(replace(link, entry=new[link.entry]) for link in match.links[:-1])
        parent = replace(match, tokens=match.tokens[: row.p0], links=links) if links else None
        new[row.id] = sealed.write(match.identity, block, parent, None)[0]
    return new


def _match(index: Index, row: EntryRow) -> Match | None:
    """Return the whole sequence that ends in an entry; None if a part is gone or damaged."""
    identity, cipher = Identity(row.identity, _ANY_CUT, label=row.label), PlainCipher()
    tokens = Search(index, cipher, identity, np.empty(0, np.int32)).tokens_up_to(row.id)
    return None if tokens is None else Search(index, cipher, identity, tokens).match(row.id)


def _read(plain: Entries, match: Match) -> KVBlock | None:
    """Return the block of a sequence's last entry; None if it is damaged."""
    try:
        return plain.read(match, match.links[-1].p0)[0][-1]
    except EntryError:
        return None
