"""Finds, moves and repairs chunks of a prompt that were computed in other prompts, for a `PromptCache` with
reuse="chunks". See docs/passages.md.
"""

from mixedkv.chunks.chunk_reuse import ChunkReuse
from mixedkv.chunks.verify import CorrectnessReport, verify_correctness

__all__ = [
    "ChunkReuse",
    "CorrectnessReport",
    "verify_correctness",
]
