"""A Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from mixedkv.store.remote.backend import RefusedError, RemoteError, RemoteURL

_PREFIX = "mixedkv:"
_READ = 1 << 20  # bytes asked of the system at once


class RedisBackend:
    """Values live `ttl` seconds from when they were written.

    Raises:
        ValueError: the URL cannot be read, or has an option that redis-py does not take.
    """

    fan = 2048

    def __init__(self, url: RemoteURL) -> None:
        self._ttl = url.ttl
        try:
            self._pool: Any = redis.ConnectionPool.from_url(
                url.url,
                socket_timeout=url.timeout,
                socket_connect_timeout=url.timeout,
                socket_read_size=_READ,
                retry=Retry(NoBackoff(), 0),
            )
            self._pool.connection_class(**self._pool.connection_kwargs)  # reads the options, connects nowhere
        except (ValueError, TypeError, redis.RedisError) as error:
            raise ValueError(f"remote: {error}") from None
        if self._pool.connection_kwargs.get("decode_responses"):
            raise ValueError("remote: leave decode_responses out, since values are bytes")
        self._redis = redis.Redis(connection_pool=self._pool)

    def check(self) -> None:
        self._ask(self._redis.ping)

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        values: list[bytes | None] = self._ask(lambda: self._redis.mget([_PREFIX + name for name in names]))
        return values

    def put(self, values: Mapping[str, bytes]) -> None:
        def ask() -> None:
            with self._redis.pipeline(transaction=False) as pipe:
                for name, value in values.items():
                    pipe.set(_PREFIX + name, value, ex=self._ttl)
                pipe.execute()

        self._ask(ask)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self._ask(lambda: self._redis.delete(*(_PREFIX + name for name in names)))

    def abort(self) -> None:
        self._pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._pool.disconnect()

    def _ask(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise ValueError(f"remote: the server refuses the user or password: {error}") from None
        except redis.OutOfMemoryError:
            raise RefusedError("its memory is full (maxmemory)") from None
        except redis.ReadOnlyError:
            raise RefusedError("the server is a replica, which cannot be written to") from None
        except redis.ResponseError as error:
            text = str(error).rpartition("caused error: ")[2]  # of a pipeline: before it are the values
            if text.startswith("MISCONF"):
                raise RefusedError("it cannot write to its disk (stop-writes-on-bgsave-error)") from None
            if "AUTH" in text or "password" in text or "DB index" in text:
                raise ValueError(f"remote: the server refuses: {text}") from None
            raise RemoteError(text) from None
        except (redis.RedisError, OSError, TypeError, AttributeError) as error:
            # the last two are redis-py's where another thread has closed the connection, see `abort`
            raise RemoteError(f"{type(error).__name__}: {error}") from None
