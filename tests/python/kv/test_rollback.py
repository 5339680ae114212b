"""The last tokens of a hybrid model can be taken back as far as snapshots of its state are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.errors import UnsupportedModelError
from support.cache.harness import Ctx, Mixed, Uniform, prompt, rel_rms

pytestmark = [pytest.mark.core, pytest.mark.by_model]

N = 4  # snapshots
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 4, "unified": True, "n_rs_seq": N}
HISTORY, WRONG, NEXT = prompt(40, seed=1), prompt(N, seed=2), prompt(3, seed=3)
KINDS = ["lfm2", "qwen35", "nemotron-h"]
CACHES = {"f16": Uniform(), "mixed": Mixed(threshold=24, group=8, sinks=3, draft=N)}


def each_kind(test: Any) -> Any:
    return pytest.mark.parametrize("name", KINDS)(pytest.mark.parametrize("kv", CACHES)(test))


def expected(load: Callable[..., Any], name: str, kv: str) -> np.ndarray:
    """Logits of what follows, nothing of which was ever taken back."""
    with Ctx(load(name), CACHES[kv], **OPTIONS) as ctx:
        ctx.decode(HISTORY, logits_at="last")
        return ctx.decode(NEXT)


def drafted(ctx: Ctx, seq: int, n_wrong: int) -> None:
    """The history, its last token together with drafts of which `n_wrong` are taken back."""
    ctx.decode(HISTORY[:-1], 0, seq, logits_at="last")
    ctx.decode([HISTORY[-1], *WRONG[:n_wrong]], len(HISTORY) - 1, seq)
    assert ctx.rm(seq, len(HISTORY))
    assert ctx.pos_max(seq) == len(HISTORY) - 1


@each_kind
@pytest.mark.parametrize("n_wrong", [1, N])
def test_it_goes_on_as_if_they_had_never_come(load: Any, name: str, kv: str, n_wrong: int) -> None:
    want = expected(load, name, kv)
    with Ctx(load(name), CACHES[kv], **OPTIONS) as ctx:
        for seq in (0, 2):
            drafted(ctx, seq, n_wrong)
        for seq in (2, 0):
            assert rel_rms(ctx.decode(NEXT, None, seq), want) < 0.02


@each_kind
@pytest.mark.parametrize("first", [0, 1])
def test_a_copy_goes_on_so_too(load: Any, name: str, kv: str, first: int) -> None:
    """Whichever of the two is evaluated first, or both together."""
    want = expected(load, name, kv)
    with Ctx(load(name), CACHES[kv], **OPTIONS) as ctx:
        drafted(ctx, 0, 3)
        ctx.cp(0, 1)
        for seq in (first, 1 - first):
            assert rel_rms(ctx.decode(NEXT, None, seq), want) < 0.02


@each_kind
def test_a_state_is_that_without_them(load: Any, name: str, kv: str) -> None:
    want = expected(load, name, kv)
    with Ctx(load(name), CACHES[kv], **OPTIONS) as ctx:
        drafted(ctx, 0, 2)
        ctx.cp(0, 1)
        state = ctx.save_seq(1)
        assert ctx.load_seq(state, 3) == len(state)
        for seq in (3, 0):
            assert rel_rms(ctx.decode(NEXT, None, seq), want) < 0.02


@each_kind
def test_what_has_no_snapshot_stays(load: Any, name: str, kv: str) -> None:
    """More than are kept; of tokens before the latest micro-batch; after another sequence was evaluated; of a
    sequence whose state a copy has too. Nothing changes then.
    """
    want = expected(load, name, kv)
    with Ctx(load(name), CACHES[kv], **OPTIONS) as ctx:
        ctx.decode(HISTORY, logits_at="last")
        assert not ctx.rm(0, len(HISTORY) - N - 1)
        ctx.cp(0, 1)
        assert not ctx.rm(0, len(HISTORY) - 1)
        assert not ctx.rm(1, len(HISTORY) - 1)
        ctx.decode(HISTORY, 0, 2, logits_at="last")
        assert not ctx.rm(0, len(HISTORY) - 1)
        assert rel_rms(ctx.decode(NEXT, None, 0), want) < 0.02
        ctx.decode(HISTORY[:1], None, 2)
        assert not ctx.rm(2, len(HISTORY))
        assert ctx.pos_max(2) == len(HISTORY)


def test_a_model_that_llama_cpp_cannot_take_back(zoo_path: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="n_rs_seq=4: llama"):
        Llama(zoo_path("granite-hybrid"), kv="f16", n_rs_seq=4, n_ctx=256, verbose=False)
