"""Continuous batching on one context, without HTTP: many prompts are answered at once, and a beginning that
they share is evaluated once. See docs/python.md.
"""

from mixedkv.engine.answer import Answer
from mixedkv.engine.chat.chat_template import Chat, ToolChoice
from mixedkv.engine.connect.chunk_connector import ChunkConnector
from mixedkv.engine.connect.store_connector import StoreConnector
from mixedkv.engine.engine import Engine
from mixedkv.engine.prompt_cache import Generation, PromptCache
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.work.turns import TenantLimits

__all__ = [
    "Answer",
    "Chat",
    "ChunkConnector",
    "Engine",
    "Generation",
    "PromptCache",
    "Sampling",
    "StoreConnector",
    "TenantLimits",
    "ToolChoice",
]
