"""A Redis or Valkey server."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from mixedkv.store.remote.backend import RefusedError, RemoteError, RemoteURL

_PREFIX = "mixedkv:"
_READ = 1 << 20  # bytes asked of the system at once
_ASKED = 4  # large values on their way: the server copies what it is asked for
_MAX_LINE = 256


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

    def fetch(
        self, values: Sequence[tuple[str, int]], until: float
    ) -> Generator[memoryview | None, None, None]:
        """Read out of the socket into one buffer: the package makes an object of each value, which takes
        longer than the way here.
        """
        buffer = memoryview(bytearray(max((size for _, size in values), default=0) + 2))
        asked, sock = 0, None
        with self._errors(), self._connection() as connection:
            for i, (_, size) in enumerate(values):
                for name, _ in values[asked : i + _ASKED]:
                    connection.send_command("GET", _PREFIX + name)
                    asked += 1
                sock = sock or connection._sock  # of the first question: it may be cut and made anew
                yield _read_value(sock, buffer, size, until)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lend a connection; it is cut if answers were not read to their end."""
        connection = self._pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    def put(self, values: Mapping[str, bytes]) -> None:
        def ask() -> None:
            with self._redis.pipeline(transaction=False) as pipe:
                for name, value in values.items():
                    pipe.set(_PREFIX + name, value, ex=self._ttl)
                pipe.execute()

        self._ask(ask)

    def delete(self, names: Iterable[str]) -> None:
        wanted = [_PREFIX + name for name in names]
        if wanted:
            self._ask(lambda: self._redis.delete(*wanted))

    def abort(self) -> None:
        self._pool.disconnect(inuse_connections=True)

    def close(self) -> None:
        self._pool.disconnect()

    def _ask(self, ask: Callable[[], Any]) -> Any:
        with self._errors():
            return ask()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
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


def _read_value(sock: Any, buffer: memoryview, size: int, until: float) -> memoryview | None:
    """Read the answer to GET; None if it is not of this size."""
    head = b""
    while not head.endswith(b"\r\n"):
        _read(sock, buffer[:1], until)
        head += buffer[:1]
        if len(head) > _MAX_LINE:
            raise RemoteError("the server does not speak the Redis protocol")
    if head.startswith(b"-"):
        raise RemoteError(head[1:-2].decode(errors="replace"))
    if head != b"$%d\r\n" % size:
        return None  # gone, or another's: what follows is not read
    _read(sock, buffer[: size + 2], until)
    return buffer[:size]


def _read(sock: Any, target: memoryview, until: float) -> None:
    done = 0
    while done < len(target):
        n = sock.recv_into(target[done:])
        if not n:
            raise RemoteError("the server closed the connection")
        done += n
        if time.monotonic() > until:
            raise RemoteError("it sends too slowly")
