"""Chats whose history is not evaluated again: `MessageCache`. docs/conversations.md tells how to use it."""

from mixedkv.chat.message_cache import ChatResult, ChatStream, ChatUsage, MessageCache

__all__ = ["ChatResult", "ChatStream", "ChatUsage", "MessageCache"]
