"""Continuous batching on one context, without HTTP: many prompts are answered at once, and a beginning that
they share is evaluated once. See docs/python.md.

This is all that the server and the command line take of it: tests/lint/check_modules.py refuses imports of
what is inside, and an export too many.
"""

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
