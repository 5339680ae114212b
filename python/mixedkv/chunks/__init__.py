"""Reuses passages of a prompt that were computed in other prompts: `ChunkCache`. See docs/passages.md."""

from mixedkv.chunks.chunk_cache import ChunkCache
from mixedkv.chunks.chunk_reuse import ChunkReuse
from mixedkv.chunks.verify import CorrectnessReport, verify_correctness

__all__ = [
    "ChunkCache",
    "ChunkReuse",
    "CorrectnessReport",
    "verify_correctness",
]
