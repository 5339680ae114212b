"""Contexts kept under a session id for a time: `ContextCacheManager`. docs/chats.md tells how."""

from mixedkv.sessions.manager import ContextCacheManager
from mixedkv.sessions.records import CacheSessionMetadata, ContextMessage, CreateContextCacheRequest

__all__ = [
    "CacheSessionMetadata",
    "ContextCacheManager",
    "ContextMessage",
    "CreateContextCacheRequest",
]
