"""Continuous batching on one context, without HTTP: many prompts are answered at once, and what they have in
common is evaluated once. docs/engine.md tells more.
"""

from mixedkv.engine.answer import Answer
from mixedkv.engine.chunk_connector import ChunkConnector
from mixedkv.engine.engine import Engine
from mixedkv.engine.job import Delta, Done, Failed, Job
from mixedkv.engine.kv_connector import KVConnector
from mixedkv.engine.observer import Observer
from mixedkv.engine.prompt_cache import Generation, PromptCache
from mixedkv.engine.sampler import Sampling
from mixedkv.engine.store_connector import StoreConnector
from mixedkv.engine.tenant_limits import TenantLimits

__all__ = [
    "Answer",
    "ChunkConnector",
    "Delta",
    "Done",
    "Engine",
    "Failed",
    "Generation",
    "Job",
    "KVConnector",
    "Observer",
    "PromptCache",
    "Sampling",
    "StoreConnector",
    "TenantLimits",
]
