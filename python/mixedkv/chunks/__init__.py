"""Reuses passages of a prompt that were computed in other prompts: `ChunkCache`. See docs/passages.md."""

from mixedkv.chunks.calibration import Calibration, Measured
from mixedkv.chunks.chunk_cache import ChunkCache, ChunkStats
from mixedkv.chunks.chunk_choice import ChunkChoice
from mixedkv.chunks.chunk_reuse import ChunkReuse, DonorUse, Repair, Reuse
from mixedkv.chunks.deviation import Deviation
from mixedkv.chunks.passages import ChunkOptions, UncalibratedWarning
from mixedkv.chunks.repair import Method
from mixedkv.chunks.verify import CorrectnessReport, PromptCheck, verify_correctness

__all__ = [
    "Calibration",
    "ChunkCache",
    "ChunkChoice",
    "ChunkOptions",
    "ChunkReuse",
    "ChunkStats",
    "CorrectnessReport",
    "Deviation",
    "DonorUse",
    "Measured",
    "Method",
    "PromptCheck",
    "Repair",
    "Reuse",
    "UncalibratedWarning",
    "verify_correctness",
]
