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


from mixedkv.sessions.metadata import Held, Key, Listed, Outcome, Quota

# In braces: a cluster keeps all keys with the same braces on one node, which the scripts need.
_PREFIX = "{mixedkv}"
_SECONDS = 5.0  # for a server to answer: a stopped one keeps its connections open
_CHUNK = 1000  # questions in one message
_T = TypeVar("_T")

# KEYS: record, expiry set, the tenant's own expiry set. Each runs as one transaction.
_FITS = """
local function fits(record, prefix, now, sessions, nbytes)
    if sessions == '' then return true end
    local n, total = 0, 0
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. now, '+inf')) do
        local size = redis.call('STRLEN', prefix .. member)
        if prefix .. member ~= KEYS[1] and size > 0 then n, total = n + 1, total + size end
    end
    return n + 1 <= tonumber(sessions) and total + #record <= tonumber(nbytes)
end
"""
_PUT = f"""{_FITS}
if redis.call('GET', KEYS[1]) ~= (ARGV[8] ~= '' and ARGV[8]) then return 0 end
if not fits(ARGV[2], ARGV[4], ARGV[5], ARGV[6], ARGV[7]) then return 2 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('ZADD', KEYS[3], ARGV[3], ARGV[1])
return 1
"""
_REMOVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return 1
"""
_OUTCOMES: tuple[Outcome, ...] = ("conflict", "done", "full")


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

    async def put(
        self,
        key: Key,
        record: bytes,
        expires_at: float,
        *,
        old: bytes | None = None,
        now: float = 0.0,
        quota: Quota | None = None,
    ) -> Outcome:
        bounds = ("", "") if quota is None else (str(quota.sessions), str(quota.nbytes))
        values = (record, repr(expires_at), self._name(""), repr(now), *bounds, old or b"")
        return _OUTCOMES[await self._run(_PUT, key, *values)]

    async def get(self, key: Key) -> bytes | None:
        record: bytes | None = await _answer(self._redis.get(self._name(_member(key))))
        return record

    async def remove(self, key: Key, old: bytes) -> bool:
        return bool(await self._run(_REMOVE, key, old))

    async def expired(self, now: float, limit: int) -> list[tuple[Key, bytes]]:
        range_ = self._redis.zrange(self._expiry, "-inf", repr(now), byscore=True, offset=0, num=limit)
        if not (members := await _answer(range_)):
            return []
        records = await _answer(self._redis.mget([self._name(member.decode()) for member in members]))
        found = dict(zip(members, records, strict=True))
        if gone := [member for member, record in found.items() if record is None]:  # evicted by the server
            await _answer(self._redis.zrem(self._expiry, *gone))
        return [(_key(member.decode()), record) for member, record in found.items() if record is not None]

    async def keys(self) -> list[Key]:
        return [_key(member.decode()) for member in await _answer(self._redis.zrange(self._expiry, 0, -1))]

    async def page(self, tenant: str, now: float, after: str, limit: int) -> list[Listed]:
        found = await self._living(self._expiry_of(tenant), now)
        ids = sorted((_key(member).session_id, member, when) for member, when in found.items())
        ids = [item for item in ids if item[0] > after]
        sizes = await self._sizes([member for _, member, _ in ids])
        listed = [Listed(*item[::2], sizes[item[1]]) for item in ids if sizes[item[1]]]
        return listed[:limit]

    async def held(self, now: float, tenant: str | None = None) -> Held:
        name = self._expiry if tenant is None else self._expiry_of(tenant)
        sizes = [size for size in (await self._sizes(list(await self._living(name, now)))).values() if size]
        return Held(len(sizes), sum(sizes))

    async def close(self) -> None:
        await _answer(self._redis.aclose())

    def _name(self, member: str) -> str:
        return f"{self._prefix}:session:{member}"

    def _expiry_of(self, tenant: str) -> str:
        return f"{self._prefix}:expiry:{tenant}"

    async def _living(self, name: str, now: float) -> dict[str, float]:
        """Return the members of an expiry set that have not expired, and when they will."""
        found = await _answer(self._redis.zrange(name, f"({now!r}", "+inf", byscore=True, withscores=True))
        return {member.decode(): when for member, when in found}

    async def _sizes(self, members: list[str]) -> dict[str, int]:
        """Return the bytes of each one's record, 0 for none: the server may have evicted it."""
        sizes: list[int] = []
        for begin in range(0, len(members), _CHUNK):
            pipeline = self._redis.pipeline(transaction=False)
            for member in members[begin : begin + _CHUNK]:
                pipeline.strlen(self._name(member))
            sizes += await _answer(pipeline.execute())
        return dict(zip(members, sizes, strict=True))

    async def _run(self, script: str, key: Key, *values: bytes | str) -> int:
        member = _member(key)
        keys = (self._name(member), self._expiry, self._expiry_of(key.tenant))
        return int(await _answer(self._redis.eval(script, len(keys), *keys, member, *values)))


def _member(key: Key) -> str:
    """Write a key as one text. The tenant's length in front keeps keys of two tenants apart."""
    return f"{len(key.tenant)}:{key.tenant}:{key.session_id}"


def _key(member: str) -> Key:
    length, _, rest = member.partition(":")
    return Key(rest[: int(length)], rest[int(length) + 1 :])


async def _answer(question: Awaitable[_T]) -> _T:
    """Wait for the server's answer.

    Raises:
        OSError: there is none, or none in time, however often the client tries.
    """
    try:
        return await asyncio.wait_for(question, 2 * _SECONDS)
    except asyncio.TimeoutError:
        raise OSError(f"Redis did not answer within {2 * _SECONDS:g} seconds") from None
    except redis.RedisError as error:
        raise OSError(f"Redis does not answer as it should: {error}") from error
