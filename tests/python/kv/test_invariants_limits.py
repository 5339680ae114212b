"""Invariant 3: an open window is an F16 cache, a closed one is llama.cpp's uniform cache of the cold type.

Against llama.cpp's own caches, all layers at work; test_invariants_rows.py has the exact rule.
"""

from __future__ import annotations

import numpy as np
import pytest

from support.cache.harness import Mixed, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

N = 150
F16, Q4 = Uniform(), Uniform(k="q4_0", v="q4_0")


@pytest.fixture
def logits(open_ctx):
    """logits(name, kv) of a prompt."""

    def logits_(name: str, kv: Uniform | Mixed) -> np.ndarray:
        return open_ctx(name, kv, n_ctx=256, n_ubatch=64).decode(prompt(N))

    return logits_


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_window_as_long_as_the_context_equals_f16(logits, name: str, attention: str) -> None:
    f32, f16, q4 = (logits(name, kv) for kv in (Uniform(k="f32", v="f32", flash=False), F16, Q4))
    mixed = logits(name, Mixed(threshold=256, group=32, attention=attention))
    # both stand as far from F32 as F16 rounding puts them; the cold type is far away
    assert rel_rms(mixed, f32) < 2 * rel_rms(f16, f32)
    assert rel_rms(mixed, f16) < rel_rms(q4, f16) / 20


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_no_window_and_no_sinks_equals_the_uniform_cold_cache(logits, name: str, attention: str) -> None:
    f16, q4 = logits(name, F16), logits(name, Q4)
    mixed = logits(name, Mixed(threshold=0, group=1, sinks=0, attention=attention, equalize=False))
    if name == "deepseek2":  # the mixed cache rotates quantised latent rows, and llama.cpp does not
        assert rel_rms(mixed, f16) < 1.1 * rel_rms(q4, f16)
        return
    # upstream rounds Q to int8 for a quantised K, which moves values that later layers quantise
    # ... and the more the more layers there are: six in gemma4
    assert rel_rms(mixed, q4) < rel_rms(q4, f16) / (2 if name == "gemma4" else 4)


@pytest.mark.parametrize("name", zoo.SUPPORTED)
def test_a_window_lies_between(logits, name: str, attention: str) -> None:
    """Some rows hot, some cold: nearer to F16 than the uniform cold cache is, and not equal to it."""
    f16, q4 = logits(name, F16), logits(name, Q4)
    mixed = logits(name, Mixed(threshold=64, group=16, sinks=4, attention=attention))
    assert rel_rms(q4, f16) / 20 < rel_rms(mixed, f16) < rel_rms(q4, f16)
