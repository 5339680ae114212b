"""Conversations whose history is not evaluated again: by message (`MessageCache`) and by session
(`ContextCacheManager`). docs/conversations.md tells how to use both.
"""

from mixedkv.conversation.manager import ContextCacheManager
from mixedkv.conversation.message_cache import ChatResult, ChatStream, ChatUsage, MessageCache
from mixedkv.conversation.metadata import MetadataStore, open_metadata
from mixedkv.conversation.models import (
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
    "ChatResult",
    "ChatStream",
    "ChatUsage",
    "ContextCacheManager",
    "ContextMessage",
    "CreateCacheResponse",
    "CreateContextCacheRequest",
    "DeleteCacheResponse",
    "ErrorResponse",
    "MessageCache",
    "MetadataStore",
    "explain",
    "open_metadata",
]
