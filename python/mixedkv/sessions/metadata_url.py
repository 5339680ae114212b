"""Stores of session metadata by URL."""

from __future__ import annotations

from pathlib import Path

from mixedkv.sessions.metadata import BESIDE_STORE, MetadataStore


def beside(store: str | Path) -> Path:
    """Return the URL where the sessions of a store are written down unless another place is named."""
    return Path(store).absolute() / BESIDE_STORE


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
