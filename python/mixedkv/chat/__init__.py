"""Continues chats without evaluating their history again: `MessageCache`. See docs/chats.md."""

from mixedkv.chat.message_cache import ChatResult, ChatStream, ChatUsage, MessageCache

__all__ = ["ChatResult", "ChatStream", "ChatUsage", "MessageCache"]
