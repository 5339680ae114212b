"""Continuous batching on one context, without HTTP: many prompts are answered at once, and a beginning that
they share is evaluated once. See docs/python.md.

This is all that the server and the command line take of it: tests/lint/check_modules.py refuses imports of
what is inside, and an export too many.

A name is loaded when it is first used: the engine alone needs no store, no chunks and no embeddings.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixedkv.constrain.constraint_text import Constraint
    from mixedkv.engine.answer import Answer
    from mixedkv.engine.chat.chat_template import Chat, RenderedChat, TemplateOptions, ToolChoice
    from mixedkv.engine.chat.tokenizer import Tokenizer
    from mixedkv.engine.connect.chunk_connector import ChunkConnector
    from mixedkv.engine.connect.store_connector import StoreConnector
    from mixedkv.engine.embed.embedder import Embedder
    from mixedkv.engine.engine import Engine
    from mixedkv.engine.generation import Generation
    from mixedkv.engine.inbox import deliver_directly
    from mixedkv.engine.jobs.job import Delta, Done, Failed, Job
    from mixedkv.engine.prompt_cache import PromptCache
    from mixedkv.engine.sample.sampler import TokenLogprob
    from mixedkv.engine.sample.sampling import Sampling
    from mixedkv.engine.schedule.contract import Observer
    from mixedkv.engine.schedule.progress import Progress
    from mixedkv.engine.schedule.request import Request
    from mixedkv.engine.text.answer_reader import Part
    from mixedkv.work.turns import TenantLimits

__all__ = [
    "Answer",
    "Chat",
    "ChunkConnector",
    "Constraint",
    "Delta",
    "Done",
    "Embedder",
    "Engine",
    "Failed",
    "Generation",
    "Job",
    "Observer",
    "Part",
    "Progress",
    "PromptCache",
    "RenderedChat",
    "Request",
    "Sampling",
    "StoreConnector",
    "TemplateOptions",
    "TenantLimits",
    "TokenLogprob",
    "Tokenizer",
    "ToolChoice",
    "deliver_directly",
]

_MODULES = {
    "mixedkv.constrain.constraint_text": ("Constraint",),
    "mixedkv.engine.answer": ("Answer",),
    "mixedkv.engine.chat.chat_template": (
        "Chat",
        "RenderedChat",
        "TemplateOptions",
        "ToolChoice",
    ),
    "mixedkv.engine.chat.tokenizer": ("Tokenizer",),
    "mixedkv.engine.connect.chunk_connector": ("ChunkConnector",),
    "mixedkv.engine.connect.store_connector": ("StoreConnector",),
    "mixedkv.engine.embed.embedder": ("Embedder",),
    "mixedkv.engine.engine": ("Engine",),
    "mixedkv.engine.generation": ("Generation",),
    "mixedkv.engine.inbox": ("deliver_directly",),
    "mixedkv.engine.jobs.job": (
        "Delta",
        "Done",
        "Failed",
        "Job",
    ),
    "mixedkv.engine.prompt_cache": ("PromptCache",),
    "mixedkv.engine.sample.sampler": ("TokenLogprob",),
    "mixedkv.engine.sample.sampling": ("Sampling",),
    "mixedkv.engine.schedule.contract": ("Observer",),
    "mixedkv.engine.schedule.progress": ("Progress",),
    "mixedkv.engine.schedule.request": ("Request",),
    "mixedkv.engine.text.answer_reader": ("Part",),
    "mixedkv.work.turns": ("TenantLimits",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
