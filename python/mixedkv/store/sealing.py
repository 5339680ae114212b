"""Turns a block into an entry (its row in the index and the bytes of its file) and back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import BinaryIO

from mixedkv.kv.block import KVBlock
from mixedkv.store import coverage
from mixedkv.store.encryption import Cipher, decrypt, encrypt, encrypted_size
from mixedkv.store.entry_row import EntryError, EntryRow
from mixedkv.store.formats.native import decode, encode
from mixedkv.store.identity import Identity
from mixedkv.store.lookup import file_context, key_context, token_context
from mixedkv.store.tiers.disk import read_all


def seal(
    cipher: Cipher, identity: Identity, block: KVBlock, content: bytes, parent: str | None, *, on_disk: bool
) -> tuple[EntryRow, Iterable[bytes | memoryview]]:
    """Return the row of a new entry and the buffers of its file, which can be iterated more than once.

    Args:
        content: the entry's content hash.
        parent: id of the entry it builds on.
        on_disk: the size in the row is that of the file, not of the arrays.
    """
    entry = secrets.token_hex(16)
    key, wrapped = cipher.new_key(key_context(identity.digest, entry))
    rows = coverage.to_text(coverage.of_block(block))
    tokens = block.tokens.astype("<i4").tobytes()
    now = time.time()
    row = EntryRow(
        id=entry,
        content=content,
        identity=identity.digest,
        label=identity.label,
        parent=parent,
        p0=block.p0,
        p1=block.p1,
        tokens=cipher.seal(key, tokens, token_context(identity.digest, entry, content, rows)),
        rows=rows,
        nbytes=block.nbytes,
        key_id=cipher.key_id,
        key=wrapped,
        created=now,
        used=now,
    )
    if not on_disk:
        return row, ()
    file = EntryFile(cipher, row, block)
    return replace(row, nbytes=file.nbytes), file


class EntryFile:
    """The bytes of an entry's file, generated at each iteration.

    Args:
        row: row of the entry; its size is ignored.
    """

    def __init__(self, cipher: Cipher, row: EntryRow, block: KVBlock) -> None:
        self._cipher, self._row = cipher, row
        self._buffers = encode(block, identity=row.identity, entry=row.id)
        plain = sum(map(len, self._buffers))
        self.nbytes = encrypted_size(plain) if row.key_id else plain

    def __iter__(self) -> Iterator[bytes | memoryview]:
        row = self._row
        if not row.key_id:
            return iter(self._buffers)
        key = self._cipher.open_key(row.key, key_context(row.identity, row.id))
        return encrypt(key, self._buffers, file_context(row.identity, row.id))


def unseal(cipher: Cipher, row: EntryRow, file: BinaryIO, size: int) -> KVBlock:
    """Return the block in an entry's file of `size` bytes.

    Raises:
        EntryError: it cannot be used.
    """
    if row.key_id != cipher.key_id:
        raise EntryError("key", "it is encrypted with another master key, or with none")
    if size != row.nbytes:
        raise EntryError("damaged", f"its file has {size} bytes, not {row.nbytes}")
    if row.key_id:
        key = cipher.open_key(row.key, key_context(row.identity, row.id))
        data = decrypt(key, file, size, file_context(row.identity, row.id))
    else:
        data = read_all(file, size)
    block = decode(data, identity=row.identity, entry=row.id, trusted=bool(row.key_id))
    if coverage.to_text(coverage.of_block(block)) != row.rows:
        raise EntryError("damaged", "its file has other rows than the index says")
    return block
