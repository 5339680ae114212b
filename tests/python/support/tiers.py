"""When a test runs, by its marks alone: docs/decisions/070-three-tiers.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

TIERS = {"core": "core", "full": "full", "nightly": "nightly", "slow": "nightly", "bench": "bench"}
# marks that move some parameters of a test to another tier
MOVES = {"by_model": ("full", "nightly"), "merged_nightly": ("nightly",)}

CORE_MODELS = ("llama-64", "gemma2", "lfm2")  # plain, sliding, hybrid
# those that differ by the size of a head, norms or ALiBi, as the tests of the kernels do
NIGHTLY_MODELS = ("llama-96", "llama-128", "qwen3", "refact")


def tier_of(marks: Iterable[str], parameters: Mapping[str, Any], models: Iterable[str]) -> str | None:
    """Return the tier of a test, None where no mark says it.

    Args:
        marks: names of its marks, the closest first: a parameter's, the function's, the class's, the file's
        parameters: its parameters; `by_model` looks at `name`, `merged_nightly` at `attention`
        models: names that are of models
    """
    marks = list(marks)
    marked = next((TIERS[mark] for mark in marks if mark in TIERS), None)
    name, merged = parameters.get("name"), parameters.get("attention") == "merged"
    is_of_model = isinstance(name, str) and name in models and name not in CORE_MODELS
    if "by_model" in marks and marked in ("core", "full") and is_of_model:
        return "nightly" if merged or name in NIGHTLY_MODELS else "full"
    return "nightly" if merged and "merged_nightly" in marks and marked in ("core", "full") else marked


def may_have(text: str, expected: str) -> bool:
    """Whether a file with this text may have a test of the tier."""
    marks = re.findall(rf"\bmark\.({'|'.join((*TIERS, *MOVES))})\b", text)
    tiers = {tier for mark in marks for tier in MOVES.get(mark, (TIERS.get(mark),))}
    return expected in tiers or not tiers  # without marks: pytest says that they are missing
