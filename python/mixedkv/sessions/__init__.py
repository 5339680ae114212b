"""Contexts kept under a session id for a time: `ContextCacheManager`. docs/chats.md tells how."""

from mixedkv.sessions.manager import ContextCacheManager
from mixedkv.sessions.metadata import Held, Listed, MetadataStore, Quota
from mixedkv.sessions.metadata_url import open_metadata
from mixedkv.sessions.records import (
    CacheSessionMetadata,
    ContextMessage,
    CreateCacheResponse,
    CreateContextCacheRequest,
    DeleteCacheResponse,
    ErrorResponse,
    explain,
)

__all__ = [
    "CacheSessionMetadata",
    "ContextCacheManager",
    "ContextMessage",
    "CreateCacheResponse",
    "CreateContextCacheRequest",
    "DeleteCacheResponse",
    "ErrorResponse",
    "Held",
    "Listed",
    "MetadataStore",
    "Quota",
    "explain",
    "open_metadata",
]
