"""Says which layers of a model file have a sliding window, as llama.cpp's src/models/*.cpp has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mixedkv.model.gguf_file import ModelFile, n_layers


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One of every `period` layers reads all tokens: the last, or the first. `window` is what a file without
    one has; `fixed`: whatever the file says.
    """

    period: int
    dense_first: bool = False
    window: int = 0
    fixed: bool = False


_PATTERNS = {
    "afmoe": _Pattern(4),
    "cohere2": _Pattern(4),
    "cohere2moe": _Pattern(4, dense_first=True),
    "exaone-moe": _Pattern(4, window=128),
    "exaone4": _Pattern(4, window=4096),
    "gemma-embedding": _Pattern(6),
    "gemma2": _Pattern(2, window=4096),
    "gemma3": _Pattern(6),
    "gemma3n": _Pattern(5),
    "gpt-oss": _Pattern(2),
    "laguna": _Pattern(4, dense_first=True),
    "llama4": _Pattern(4, window=8192, fixed=True),
    "mellum": _Pattern(4),
    "muse-glimmer": _Pattern(4),
    "olmo2": _Pattern(4),
    "plamo3": _Pattern(8),
    "smallthinker": _Pattern(4, dense_first=True, window=4096, fixed=True),
}
_LISTED = ("dots3note", "gemma4", "granite-swa", "maple", "mimo2", "spark2-5", "step35")  # one flag a layer
_FIRST_WITH_ROWS = {"gemma3n": 20}  # layers behind these read the rows of earlier ones


def sliding_window(model: ModelFile) -> int:
    """Return the tokens that layers with a sliding window see; 0 if there are none, or all layers have all
    rows.
    """
    pattern, found = _PATTERNS.get(model.architecture), int(model.get("attention.sliding_window", 0))
    if model.architecture in _LISTED:
        return found
    if pattern is None or (model.architecture == "exaone4" and n_layers(model) != 64):
        return 0
    if pattern.fixed:  # llama.cpp takes no other
        absent = model.get("attention.sliding_window") is None
        turned_off = found == 0 and (model.architecture != "llama4" or not absent)
        return 0 if turned_off else pattern.window
    return found or pattern.window


def sliding_layers(model: ModelFile) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    n = n_layers(model)
    if not sliding_window(model):
        return [False] * n
    listed: Any = model.get("attention.sliding_window_pattern")
    if isinstance(listed, list):
        return [bool(x) for x in listed[:n]]
    pattern = _PATTERNS.get(model.architecture, _Pattern(0))
    period = int(listed) if listed is not None else pattern.period
    if not period:
        return [True] * n
    first = 0 if pattern.dense_first else period - 1
    return [il % period != first for il in range(n)]


def n_layers_with_rows(model: ModelFile) -> int:
    """Return how many of the first layers have rows of their own: those behind read theirs."""
    n = n_layers(model)
    shared = int(model.get("attention.shared_kv_layers", 0)) if model.architecture == "gemma4" else 0
    return min(n, _FIRST_WITH_ROWS.get(model.architecture, n - shared))
