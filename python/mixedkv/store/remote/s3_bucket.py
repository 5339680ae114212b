"""A bucket of an S3-compatible object store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, TimeoutError
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import S3Store

from mixedkv.store.remote.backend import RemoteError, RemoteURL

_OPTIONS = ("endpoint", "region")
_THREADS = 16  # each waits for an answer
_T = TypeVar("_T")


class S3Backend:
    """Credentials come from the environment (AWS_ACCESS_KEY_ID, ...), `endpoint` and `region` from there or
    from the URL. What is stored stays until a rule of the bucket removes it.

    Raises:
        ValueError: the URL cannot be read.
    """

    fan = 16

    def __init__(self, url: RemoteURL) -> None:
        parts = urlsplit(url.url)
        options = dict(parse_qsl(parts.query))
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise ValueError(
                f"remote: unknown option {unknown[0]!r} of s3://; known: {', '.join(_OPTIONS)}, timeout"
            )
        if not parts.netloc:
            raise ValueError("remote: s3:// names no bucket: use s3://BUCKET/PREFIX")
        if not options.get("endpoint", "http:").startswith(("http:", "https:")):
            given = options["endpoint"][:80]
            raise ValueError(f"remote: endpoint={given}: use http://HOST:PORT or https://HOST")
        seconds = f"{int(1000 * url.timeout)}ms"
        prefix = "/".join(filter(None, [parts.path.strip("/"), "mixedkv"]))
        client: dict[str, Any] = {
            "timeout": f"{int(1000 * url.timeout) + 10_000}ms",
            "connect_timeout": seconds,
            "allow_http": options.get("endpoint", "").startswith("http:"),
        }
        try:
            self._store = S3Store(
                parts.netloc,
                prefix=prefix,
                client_options=client,  # type: ignore[arg-type]
                retry_config={"max_retries": 0},
                **options,  # type: ignore[arg-type]
            )
        except Exception as error:  # its errors share no base with a meaning of its own
            raise ValueError(f"remote: {_first_line(error)}") from None
        self._threads = ThreadPoolExecutor(_THREADS, "mixedkv-s3")

    def check(self) -> None:
        _ask(lambda: next(iter(obstore.list(self._store, chunk_size=1)), None))

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return [None if value is None else bytes(value) for value in self._threads.map(self._get, names)]

    def fetch(
        self, values: Sequence[tuple[str, int]], until: float
    ) -> Generator[memoryview | None, None, None]:
        coming: deque[Future[memoryview | None]] = deque()
        try:
            for i, (_, size) in enumerate(values):
                for name, _ in values[i + len(coming) : i + _THREADS]:
                    coming.append(self._threads.submit(self._get, name))
                value = coming.popleft().result(max(0.0, until - time.monotonic()))
                yield value if value is not None and len(value) == size else None
        except (TimeoutError, CancelledError):
            raise RemoteError("it sends too slowly") from None
        finally:
            for one in coming:
                one.cancel()

    def exist(self, names: Sequence[str]) -> list[bool]:
        return list(self._threads.map(self._exists, names))

    def put(self, values: Mapping[str, bytes]) -> None:
        for _ in self._threads.map(self._put, values.items()):
            pass

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        if wanted:
            _ask(lambda: _or_none(lambda: obstore.delete(self._store, wanted)))

    def abort(self) -> None:
        pass  # its own time-outs end what waits

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, name: str) -> memoryview | None:
        return _ask(lambda: _or_none(lambda: memoryview(obstore.get(self._store, name).bytes())))

    def _exists(self, name: str) -> bool:
        return _ask(lambda: _or_none(lambda: obstore.head(self._store, name))) is not None

    def _put(self, item: tuple[str, bytes]) -> None:
        _ask(lambda: obstore.put(self._store, item[0], item[1], use_multipart=False))


def _or_none(ask: Callable[[], _T]) -> _T | None:
    try:
        return ask()
    except (NotFoundError, FileNotFoundError):
        return None


def _ask(ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except Exception as error:  # its classes do not tell all of these apart
        text = str(error)
        if "<Code>NoSuchBucket</Code>" in text:
            raise ValueError("remote: there is no such bucket: make it, or name another") from None
        if isinstance(error, NotFoundError | FileNotFoundError):
            raise
        if "403 Forbidden" in text or "401 Unauthorized" in text:
            raise ValueError("remote: the server refuses the credentials (AWS_ACCESS_KEY_ID, ...)") from None
        raise RemoteError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
