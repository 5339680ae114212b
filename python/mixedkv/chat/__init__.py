"""Continues chats without evaluating their history again: `MessageCache`. See docs/chats.md."""

from mixedkv.chat.message_cache import ChatResult, ChatUsage, MessageCache

__all__ = [
    "ChatResult",
    "ChatUsage",
    "MessageCache",
]
