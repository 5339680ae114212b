"""Gives a store another master key, by wrapping its data keys again."""

from __future__ import annotations

from pathlib import Path

from mixedkv.store.encryption import KeyCipher, KeySource
from mixedkv.store.entry_row import EntryError, EntryRow
from mixedkv.store.folder import StoreFolder, store_root
from mixedkv.store.lookup import key_context


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
