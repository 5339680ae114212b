"""Sessions beside a store that gets another master key."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mixedkv.sessions.metadata_sqlite import SQLiteMetadata
from mixedkv.sessions.metadata_url import beside
from mixedkv.sessions.record_codec import PLAIN, RecordCodec
from mixedkv.store.encryption import KeyCipher, KeySource

_ATTEMPTS = 16


def reseal(store: str | Path, old: KeySource | None, new: KeySource) -> int:
    """Encrypt the sessions beside a store with `new`; returns how many. Those that `old` does not read stay;
    None reads those that were written without a key.

    Raises:
        OSError: they cannot be read or written.
    """
    path = beside(store)
    if not path.exists():
        return 0
    before = PLAIN if old is None else RecordCodec(KeyCipher(old))
    return asyncio.run(_reseal(path, before, RecordCodec(KeyCipher(new))))


async def _reseal(path: Path, old: RecordCodec, new: RecordCodec) -> int:
    metadata, n = SQLiteMetadata(str(path)), 0
    try:
        for key in await metadata.keys():
            for _ in range(_ATTEMPTS):  # against other writers
                record = await metadata.get(key)
                session = None if record is None else old.load(key, record)
                if record is None or session is None:
                    break
                if await metadata.replace(key, record, new.dump(session), session.expires_at) == "done":
                    n += 1
                    break
        await metadata.forget()
    finally:
        await metadata.close()
    return n
