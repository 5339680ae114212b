"""Manages sessions: contexts that are registered under an id for a time, then removed with their KV."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from mixedkv.ids import check_id, check_tenant, new_id
from mixedkv.limits import check_int
from mixedkv.sessions.metadata import PLAIN, Held, Key, Listed, MetadataStore, Outcome, Quota, RecordCodec
from mixedkv.sessions.records import (
    MAX_TTL,
    CacheSessionMetadata,
    CreateCacheResponse,
    CreateContextCacheRequest,
    DeleteCacheResponse,
    ErrorResponse,
    Usage,
)

logger = logging.getLogger(__name__)

_SWEEP_BATCH = 256
_ORPHAN_SECONDS = 3600.0  # between two looks for KV without a session
_ATTEMPTS = 16  # against other writers of the same session


class SessionEntries(Protocol):
    """The part of a `KVStore` that the manager needs."""

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> Any:
        """Remove all entries of a session, with the keys that read them."""

    def remove_orphans(self, living: Iterable[tuple[str, str]], before: float) -> int:
        """Remove sessions that are not among the living tenants and sessions; how many."""


class ContextCacheManager:
    """Registers sessions, finds them, and removes them when they are deleted or expire.

    The time to live is checked at every lookup: an expired session is an unknown one, and so is a session of
    another tenant. A background sweep (`start`, or `async with`) removes the KV of expired sessions. The
    metadata store holds the prompts as they are: protect it as you protect them.

    Args:
        metadata: a store, or the URL of one, see `open_metadata`. In memory unless given.
        store: the `KVStore` that holds the sessions' KV; None if there is none to remove.
        sweep_seconds: seconds between two background sweeps; the first is at once.
        pending_seconds: maximum time from storing a session's KV to registering it.
        max_ttl: the longest time to live that is granted, in seconds.
        codec: encodes the records of sessions; `RecordCodec` of a store's cipher encrypts them.
        quota: returns the quota of a tenant, given its name; None, or None for a tenant, is no limit.
        clock: the time, Unix seconds.

    Methods raise ValueError for a bad id or value, naming it, and OSError when the metadata store cannot be
    reached.
    """

    def __init__(
        self,
        metadata: str | MetadataStore = "sqlite:",
        store: SessionEntries | None = None,
        *,
        sweep_seconds: float = 60.0,
        pending_seconds: float = 3600.0,
        max_ttl: int = MAX_TTL,
        codec: RecordCodec = PLAIN,
        quota: Callable[[str], Quota | None] = lambda tenant: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not sweep_seconds > 0:
            raise ValueError(f"sweep_seconds={sweep_seconds}: use more than 0")
        if not 1 <= max_ttl <= MAX_TTL:
            raise ValueError(f"max_ttl={max_ttl}: use 1 to {MAX_TTL} seconds")
        self._metadata = open_metadata(metadata) if isinstance(metadata, str) else metadata
        self._store = store
        self._sweep_seconds, self._pending_seconds = sweep_seconds, pending_seconds
        self._max_ttl = max_ttl
        self._codec, self._quota = codec, quota
        self._clock = clock
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ContextCacheManager:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @staticmethod
    def new_kv_cache_ref() -> str:
        """Make a name for a session's entries in the store, to store KV before the session is registered."""
        return new_id("kv")

    async def register_session_cache(
        self,
        request: CreateContextCacheRequest,
        initial_inference_response: CreateCacheResponse | None = None,
        kv_cache_sidecar_ref: str | None = None,
        *,
        tenant: str = "",
        n_tokens: int = 0,
    ) -> CreateCacheResponse | ErrorResponse:
        """Register a context. The first three arguments are those of AIBrix's design.

        Args:
            request: the context.
            initial_inference_response: the answer that evaluated it; the session takes its ids and usage.
            kv_cache_sidecar_ref: name of its KV in the store, if that is there already.
            tenant: whose session it is.
            n_tokens: tokens of the context; by default those of the response's prompt.

        Returns ErrorResponse "session_exists" if the request names a session that lives, "session_quota" if
        the tenant has no room for it.
        """
        now = self._clock()
        first = initial_inference_response
        session_id = request.session_id or (new_id("session") if first is None else first.session_id)
        metadata = CacheSessionMetadata(
            session_id=session_id,
            tenant=check_tenant(tenant),
            model_id=request.model,
            kv_cache_ref=self.new_kv_cache_ref() if kv_cache_sidecar_ref is None else kv_cache_sidecar_ref,
            created=now,
            ttl=self._check_ttl(request.ttl),
            expires_at=now + request.ttl,
            n_tokens=n_tokens or (0 if first is None else first.usage.prompt_tokens),
            prompt=request.prompt,
            messages=request.messages,
            mode=request.mode,
        )
        outcome = await self._add(Key(tenant, session_id), metadata)
        if outcome == "full":
            return await self._over_quota(tenant)
        if outcome == "conflict":
            return ErrorResponse(
                detail=f"session_id={session_id!r} is in use: leave it out, or delete that session first",
                code="session_exists",
            )
        created = _created(metadata)
        return created if first is None else created.model_copy(update={"id": first.id, "usage": first.usage})

    async def get_session_metadata(self, session_id: str, *, tenant: str = "") -> CacheSessionMetadata | None:
        """Return a living session; None if it is unknown, expired, or another tenant's."""
        found = await self._find(_key(session_id, tenant))
        return found[1] if found else None

    async def renew_session_cache(
        self, session_id: str, ttl: int | None = None, *, tenant: str = ""
    ) -> CacheSessionMetadata | ErrorResponse:
        """Keep a session for `ttl` seconds from now on; None for its previous time."""
        new_ttl = None if ttl is None else self._check_ttl(ttl)

        async def renew(key: Key, record: bytes, session: CacheSessionMetadata) -> Any:
            seconds = session.ttl if new_ttl is None else new_ttl
            renewed = _changed(session, ttl=seconds, expires_at=self._clock() + seconds)
            outcome = await self._metadata.put(key, self._codec.dump(renewed), renewed.expires_at, old=record)
            return renewed if outcome == "done" else None

        return await self._retried(session_id, tenant, renew)  # type: ignore[no-any-return]

    async def update_session_cache(
        self, metadata: CacheSessionMetadata, **changes: Any
    ) -> CacheSessionMetadata | ErrorResponse:
        """Change `n_tokens`, `prompt` or `messages` of a session, e.g. after a turn, given what it was.

        Its version goes up by one. Returns ErrorResponse "session_changed" if it is not at the version that
        it was: read it again and decide.
        """
        if unknown := changes.keys() - {"n_tokens", "prompt", "messages"}:
            raise ValueError(
                f"{', '.join(sorted(unknown))} cannot be changed: only n_tokens, prompt and messages"
            )
        quota = self._quota(metadata.tenant)
        _changed(metadata, **changes)  # bad ones are refused first

        async def update(key: Key, record: bytes, session: CacheSessionMetadata) -> Any:
            if (session.kv_cache_ref, session.version) != (metadata.kv_cache_ref, metadata.version):
                return _changed_meanwhile(session.session_id)
            updated = _changed(session, **changes, version=session.version + 1)
            data = self._codec.dump(updated)
            outcome = await self._metadata.put(
                key, data, updated.expires_at, old=record, now=self._clock(), quota=quota
            )
            if outcome == "full":
                return await self._over_quota(key.tenant)
            return updated if outcome == "done" else None

        return await self._retried(metadata.session_id, metadata.tenant, update)  # type: ignore[no-any-return]

    async def list_sessions(self, tenant: str = "", *, after: str = "", limit: int = 20) -> list[Listed]:
        """Return the living sessions of a tenant in the order of their ids, from the one after `after` on."""
        return await self._metadata.page(check_tenant(tenant), self._clock(), after, limit)

    async def held(self, tenant: str | None = None) -> Held:
        """Return how many sessions live and the bytes of their records: a tenant's, or all."""
        return await self._metadata.held(self._clock(), tenant)

    async def check_quota(self, tenant: str = "") -> ErrorResponse | None:
        """Return an error if one more session has no room, before work is done for it."""
        quota = self._quota(check_tenant(tenant))
        if quota is None:
            return None
        held = await self.held(tenant)
        full = held.sessions >= quota.sessions or held.nbytes >= quota.nbytes
        return await self._over_quota(tenant, held) if full else None

    async def unregister_session_cache(
        self, session_id: str, *, tenant: str = ""
    ) -> DeleteCacheResponse | ErrorResponse:
        """Forget a session: its KV with the key that reads it, then what is known of it."""

        async def purge(key: Key, record: bytes, session: CacheSessionMetadata) -> Any:
            purged = await self._purge(key, record, session)
            return DeleteCacheResponse(session_id=session_id) if purged else None

        return await self._retried(session_id, tenant, purge)  # type: ignore[no-any-return]

    async def sweep(self) -> int:
        """Remove expired sessions with their KV and return how many. `start` does this periodically.

        One that cannot be removed is left to the next sweep, with a warning in the log.
        """
        n, failed = 0, set[Key]()
        while True:
            expired = await self._metadata.expired(self._clock(), _SWEEP_BATCH + len(failed))
            batch = [(key, record) for key, record in expired if key not in failed]
            results = [await self._purge_expired(key, record) for key, record in batch]
            failed |= {key for (key, _), removed in zip(batch, results, strict=True) if removed is None}
            n += results.count(True)
            if results.count(False) == len(results):  # other processes are at the same work
                return n

    async def sweep_orphans(self, seconds: float) -> int:
        """Remove KV of unknown sessions from the store, after a crash for example, and return how many
        sessions. Those stored in the last `seconds` stay, since they may be about to be registered.
        """
        if self._store is None:
            return 0
        before = self._clock() - seconds
        living = []
        for key in await self._metadata.keys():
            record = await self._metadata.get(key)
            metadata = None if record is None else self._codec.load(key, record)
            if metadata is not None:
                living.append((metadata.tenant, metadata.kv_cache_ref))
            elif record is not None:
                logger.warning("KV without a session stays, since a session cannot be read")
                return 0
        return await asyncio.to_thread(self._store.remove_orphans, living, before)

    def start(self) -> None:
        """Begin the background sweep on the running event loop. A second call changes nothing."""
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.get_running_loop().create_task(
                self._sweep_forever(), name="mixedkv-sweep"
            )

    async def stop(self) -> None:
        """End the background sweep."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sweeper

    async def close(self) -> None:
        """End the sweep and close the metadata store. Sessions stay."""
        await self.stop()
        await self._metadata.close()

    async def _sweep_forever(self) -> None:
        # until `stop`, even if its cancellation is lost: redis-py swallows one that comes at a bad moment
        orphans = self._clock()  # when they are looked for next
        while self._sweeper is asyncio.current_task():
            try:
                if orphans <= self._clock():
                    orphans = self._clock() + _ORPHAN_SECONDS
                    if n := await self.sweep_orphans(self._pending_seconds):
                        logger.info("KV of %d sessions that are gone was removed", n)
                if n := await self.sweep():
                    logger.info("%d expired sessions removed", n)
            except (OSError, ValueError) as error:
                logger.warning(
                    "expired sessions were not removed, next try in %g s: %s", self._sweep_seconds, error
                )
            await asyncio.sleep(self._sweep_seconds)

    async def _add(self, key: Key, metadata: CacheSessionMetadata) -> Outcome:
        """Add a session; an expired one of that name is removed first."""
        quota = self._quota(key.tenant)
        for _ in range(_ATTEMPTS):
            outcome = await self._metadata.put(
                key, self._codec.dump(metadata), metadata.expires_at, now=self._clock(), quota=quota
            )
            if outcome != "conflict":
                return outcome
            record = await self._metadata.get(key)
            if record is None:
                continue
            old = self._codec.load(key, record)
            if old is not None and old.expires_at > self._clock():
                return "conflict"
            await self._purge(key, record, old)
        return "conflict"

    async def _retried(self, session_id: str, tenant: str, change: Callable[..., Awaitable[Any]]) -> Any:
        """Change a session, given its key, its record and what that says, again where `change` returns None
        since another writer was faster.
        """
        key = _key(session_id, tenant)
        for _ in range(_ATTEMPTS):
            found = await self._find(key)
            if found is None:
                return _not_found(session_id)
            if (answer := await change(key, *found)) is not None:
                return answer
        return _changed_meanwhile(session_id)

    async def _over_quota(self, tenant: str, held: Held | None = None) -> ErrorResponse:
        held, quota = held or await self.held(tenant), self._quota(tenant)
        limits = (
            f"sessions={quota.sessions} and session_mb={quota.nbytes / 1e6:g}" if quota is not None else ""
        )
        most = f", and the limit is {limits}" if limits else ""
        return ErrorResponse(
            detail=f"{held.sessions} sessions of {held.nbytes} bytes are here{most}: delete some, or wait "
            f"until some expire",
            code="session_quota",
        )

    async def _find(self, key: Key) -> tuple[bytes, CacheSessionMetadata] | None:
        record = await self._metadata.get(key)
        metadata = None if record is None else self._codec.load(key, record)
        if record is None or metadata is None or metadata.expires_at <= self._clock():
            return None
        return record, metadata

    async def _purge(self, key: Key, record: bytes, metadata: CacheSessionMetadata | None) -> bool:
        """Remove a session, KV before metadata: a crash in between leaves no KV that nobody knows of."""
        if self._store is not None and metadata is not None:
            await asyncio.to_thread(self._store.remove, session=metadata.kv_cache_ref, tenant=metadata.tenant)
        return await self._metadata.remove(key, record)

    async def _purge_expired(self, key: Key, record: bytes) -> bool | None:
        """Remove an expired session; None if it cannot be removed. Whatever is wrong with one session, the
        others go.
        """
        try:
            return await self._purge(key, record, self._codec.load(key, record))
        except Exception as error:
            logger.warning("an expired session was not removed, the next sweep tries again: %s", error)
            return None

    def _check_ttl(self, ttl: object) -> int:
        try:
            return check_int("ttl", ttl, 1, self._max_ttl)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} (seconds)") from None


def _key(session_id: object, tenant: str) -> Key:
    return Key(check_tenant(tenant), check_id("session_id", session_id))


def _changed(metadata: CacheSessionMetadata, **changes: Any) -> CacheSessionMetadata:
    """Return a copy with other values, validated; `model_copy` would not."""
    return CacheSessionMetadata.model_validate({**dict(metadata), **changes})


def _created(metadata: CacheSessionMetadata) -> CreateCacheResponse:
    n = metadata.n_tokens
    return CreateCacheResponse(
        id=new_id("ctx"),
        session_id=metadata.session_id,
        model=metadata.model_id,
        created=int(metadata.created),
        ttl=metadata.ttl,
        expires_at=int(metadata.expires_at),
        n_tokens=n,
        usage=Usage(prompt_tokens=n, total_tokens=n),
    )


def _not_found(session_id: str) -> ErrorResponse:
    return ErrorResponse(
        detail=f"session_id={session_id!r} is unknown or has expired: register it again",
        code="session_not_found",
    )


def _changed_meanwhile(session_id: str) -> ErrorResponse:
    return ErrorResponse(
        detail=f"session_id={session_id!r} was changed by another request: read it again and retry",
        code="session_changed",
    )


def open_metadata(url: str) -> MetadataStore:
    """Open a metadata store by its URL.

    "sqlite:PATH" is a file, "sqlite:" alone lives in memory as long as this process; "redis://...",
    "rediss://..." and "unix://..." are what the `redis` package understands.

    Raises:
        ValueError: the URL names no store known here.
        ImportError: the `redis` package is not installed.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "sqlite" and ":" in url:
        from mixedkv.sessions.metadata_sqlite import SQLiteMetadata

        path = url[len("sqlite:") :]
        return SQLiteMetadata(path[2:] if path.startswith("///") else path)
    if scheme in ("redis", "rediss", "unix"):
        from mixedkv.sessions.metadata_redis import RedisMetadata

        return RedisMetadata(url)
    raise ValueError(
        f"the metadata URL starts with {scheme[:20]!r}: "
        f"use sqlite:PATH, redis://..., rediss://... or unix://..."
    )
