"""The client for a URL."""

from __future__ import annotations

from mixedkv.store.remote.backend import Backend, RemoteURL


def open_backend(url: RemoteURL) -> Backend:
    """Open the remote of a URL.

    Raises:
        ValueError: the URL cannot be used, or the package for it is not installed.
    """
    try:
        if url.scheme == "s3":
            from mixedkv.store.remote.s3_bucket import S3Backend

            return S3Backend(url)
        from mixedkv.store.remote.redis_server import RedisBackend

        return RedisBackend(url)
    except ModuleNotFoundError as error:
        extra = "s3" if url.scheme == "s3" else "redis"
        raise ValueError(
            f"remote: {url.scheme}:// needs {error.name}, which is not installed: "
            f"pip install 'mixedkv[{extra}]'"
        ) from None
