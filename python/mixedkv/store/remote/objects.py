"""A bucket of an S3-compatible object store, or a folder that several machines have mounted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import NotFoundError, PermissionDeniedError
from obstore.store import LocalStore, S3Store

from mixedkv.store.remote.backend import RemoteError, RemoteURL

_S3_OPTIONS = ("endpoint", "region")
_GONE = (NotFoundError, FileNotFoundError)
_T = TypeVar("_T")


class ObjectBackend:
    """Credentials of S3 come from the environment (AWS_ACCESS_KEY_ID, ...), `endpoint` and `region` from
    there or from the URL. What is stored stays until somebody removes it: a rule of the bucket, for example.

    Raises:
        ValueError: the URL cannot be read.
    """

    fan = 16  # each waits for an answer on a thread

    def __init__(self, url: RemoteURL) -> None:
        parts = urlsplit(url.url)
        options = dict(parse_qsl(parts.query))
        known = _S3_OPTIONS if url.scheme == "s3" else ()
        if unknown := sorted(options.keys() - set(known)):
            raise ValueError(
                f"remote: unknown option {unknown[0]!r} of {url.scheme}://; known: "
                f"{', '.join((*known, 'timeout'))}"
            )
        if (url.scheme == "s3") != bool(parts.netloc):
            raise ValueError(f"remote: {url.shown}: use s3://BUCKET/PREFIX or file:///FOLDER")
        if not options.get("endpoint", "http:").startswith(("http:", "https:")):
            given = options["endpoint"][:80]
            raise ValueError(f"remote: endpoint={given}: use http://HOST:PORT or https://HOST")
        prefix = "/".join(filter(None, [parts.path.strip("/"), "mixedkv"]))
        try:
            if url.scheme == "s3":
                self._store: Any = _bucket(parts.netloc, prefix, url.timeout, options)
            else:
                self._store = LocalStore(f"/{prefix}", mkdir=True)
        except Exception as error:  # its errors share no base with a meaning of its own
            raise ValueError(f"remote: {_first_line(error)}") from None
        self._threads = ThreadPoolExecutor(self.fan, "mixedkv-objects")

    def check(self) -> None:
        _ask(lambda: next(iter(obstore.list(self._store, chunk_size=1)), None))

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        return list(self._threads.map(self._get, names))

    def put(self, values: Mapping[str, bytes]) -> None:
        def put(name: str) -> None:
            _ask(lambda: obstore.put(self._store, name, values[name], use_multipart=False))

        list(self._threads.map(put, values))

    def delete(self, names: Sequence[str]) -> None:
        # a bucket takes many at once; a folder stops at the first one that is gone
        for batch in [[name] for name in names] if isinstance(self._store, LocalStore) else [list(names)]:
            _ask(partial(obstore.delete, self._store, batch))

    def abort(self) -> None:
        pass  # its own time-outs end what waits

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _get(self, name: str) -> bytes | None:
        return _ask(lambda: bytes(obstore.get(self._store, name).bytes()))


def _bucket(name: str, prefix: str, timeout: float, options: Mapping[str, Any]) -> S3Store:
    client: dict[str, Any] = {
        "timeout": f"{int(1000 * timeout) + 10_000}ms",
        "connect_timeout": f"{int(1000 * timeout)}ms",
        "allow_http": options.get("endpoint", "").startswith("http:"),
    }
    return S3Store(
        name,
        prefix=prefix,
        client_options=client,  # type: ignore[arg-type]
        retry_config={"max_retries": 0},
        **options,
    )


def _ask(ask: Callable[[], _T]) -> _T | None:
    """Return the answer; None where there is nothing of that name."""
    try:
        return ask()
    except Exception as error:  # its classes do not tell all of these apart
        text = str(error)
        if "<Code>NoSuchBucket</Code>" in text:
            raise ValueError("remote: there is no such bucket: make it, or name another") from None
        if isinstance(error, _GONE):
            return None
        if "403 Forbidden" in text or "401 Unauthorized" in text:
            raise ValueError("remote: the server refuses the credentials (AWS_ACCESS_KEY_ID, ...)") from None
        if isinstance(error, PermissionDeniedError | PermissionError):
            raise ValueError(f"remote: {_first_line(error)}") from None
        raise RemoteError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
