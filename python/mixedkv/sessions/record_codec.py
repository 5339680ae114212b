"""Writes and reads records of sessions: JSON after a line that says so, or that encrypted."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from mixedkv.sessions.metadata import Key
from mixedkv.sessions.records import CacheSessionMetadata
from mixedkv.store.encryption import Cipher, PlainCipher
from mixedkv.store.entry_row import EntryError

logger = logging.getLogger(__name__)

_PLAIN = b"mixedkv-session 1\n"
_SEALED = b"mixedkv-session 1 sealed\n"


class RecordCodec:
    """From a session to bytes and back.

    Args:
        cipher: of a store; with a key what is written is encrypted. What was written before it had one is
            still read.
    """

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def dump(self, metadata: CacheSessionMetadata) -> bytes:
        text = metadata.model_dump_json(exclude_none=True).encode()
        key = Key(metadata.tenant, metadata.session_id)
        return _PLAIN + text if self._is_plain else _SEALED + self._cipher.seal_alone(text, _context(key))

    def load(self, key: Key, record: bytes) -> CacheSessionMetadata | None:
        """Return the record, or None for what is not a record of this session, or is encrypted with another
        key: the place where sessions are written down may hold anything.
        """
        try:
            metadata = CacheSessionMetadata.model_validate_json(self._text(key, record))
            if (metadata.tenant, metadata.session_id) != key:
                raise ValueError("filed under another name")
        except (ValueError, EntryError) as error:
            reason = "bad fields" if isinstance(error, ValidationError) else error
            logger.warning("a session record cannot be read and counts as unknown: %s", reason)
            return None
        return metadata

    @property
    def _is_plain(self) -> bool:
        return not self._cipher.key_id

    def _text(self, key: Key, record: bytes) -> bytes:
        if record.startswith(_PLAIN):
            return record[len(_PLAIN) :]
        if not record.startswith(_SEALED):
            raise ValueError("unknown format")
        if self._is_plain:
            raise ValueError("encrypted with a key: give it")
        return self._cipher.unseal_alone(record[len(_SEALED) :], _context(key))


PLAIN = RecordCodec(PlainCipher())


def _context(key: Key) -> bytes:
    """Write a key as bytes. The tenant's length in front keeps keys of two tenants apart."""
    return f"session {len(key.tenant)} {key.tenant} {key.session_id}".encode()
