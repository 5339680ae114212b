"""Sessions in Redis: a string per session, and a sorted set of them by time of expiry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

try:
    import redis
    import redis.asyncio
except ImportError as error:
    raise ImportError("sessions in Redis need the redis package: pip install redis") from error


from mixedkv.sessions.metadata import Key

# In braces: a cluster keeps all keys with the same braces on one node, which the scripts need.
_PREFIX = "{mixedkv}"
_SECONDS = 5.0  # for a server to answer: a stopped one keeps its connections open
_T = TypeVar("_T")

# KEYS: record, expiry set. Each runs as one transaction.
_ADD = """
if not redis.call('SET', KEYS[1], ARGV[2], 'NX') then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return 1
"""
_REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[4] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
return 1
"""
_REMOVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""


class RedisMetadata:
    """Sessions in the server at `url`, under `prefix`. For one event loop, as the client it uses.

    Raises:
        ValueError: the URL cannot be read.
    """

    def __init__(self, url: str, prefix: str = _PREFIX) -> None:
        self._redis: Any = redis.asyncio.from_url(
            url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS
        )
        self._prefix = prefix
        self._expiry = f"{prefix}:expiry"

    async def add(self, key: Key, record: bytes, expires_at: float) -> bool:
        return await self._run(_ADD, key, record, repr(expires_at))

    async def get(self, key: Key) -> bytes | None:
        record: bytes | None = await _answer(self._redis.get(self._name(_member(key))))
        return record

    async def replace(self, key: Key, old: bytes, new: bytes, expires_at: float) -> bool:
        return await self._run(_REPLACE, key, new, repr(expires_at), old)

    async def remove(self, key: Key, old: bytes) -> bool:
        return await self._run(_REMOVE, key, old)

    async def expired(self, now: float, limit: int) -> list[tuple[Key, bytes]]:
        members = await _answer(
            self._redis.zrange(self._expiry, "-inf", repr(now), byscore=True, offset=0, num=limit)
        )
        if not members:
            return []
        records = await _answer(self._redis.mget([self._name(member.decode()) for member in members]))
        gone = [member for member, record in zip(members, records, strict=True) if record is None]
        if gone:  # evicted by the server
            await _answer(self._redis.zrem(self._expiry, *gone))
        return [
            (_key(member.decode()), record)
            for member, record in zip(members, records, strict=True)
            if record is not None
        ]

    async def close(self) -> None:
        await _answer(self._redis.aclose())

    def _name(self, member: str) -> str:
        return f"{self._prefix}:session:{member}"

    async def _run(self, script: str, key: Key, *values: bytes | str) -> bool:
        member = _member(key)
        keys = (self._name(member), self._expiry)
        return bool(await _answer(self._redis.eval(script, 2, *keys, member, *values)))


def _member(key: Key) -> str:
    """With the tenant's length in front no two keys look the same."""
    return f"{len(key.tenant)}:{key.tenant}:{key.session_id}"


def _key(member: str) -> Key:
    length, _, rest = member.partition(":")
    return Key(rest[: int(length)], rest[int(length) + 1 :])


async def _answer(question: Awaitable[_T]) -> _T:
    """
    Raises:
        OSError: there is none, or none in time, however often the client tries.
    """
    try:
        return await asyncio.wait_for(question, 2 * _SECONDS)
    except asyncio.TimeoutError:
        raise OSError(f"Redis did not answer within {2 * _SECONDS:g} seconds") from None
    except redis.RedisError as error:
        raise OSError(f"Redis does not answer as it should: {error}") from error
