"""Layers with a sliding window and few cells: shared tokens, batches of several micro-batches, states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.cache.checks import TOL_INT8, check_books, worst
from support.cache.harness import Ctx, DecodeError, Mixed, Uniform, prompt

pytestmark = [pytest.mark.full, pytest.mark.by_model]

KVS: dict[str, Uniform | Mixed] = {
    "f16": Uniform(),
    "q8_0": Uniform(k="q8_0", v="q8_0"),
    "mixed": Mixed(k="q8_0", v="q8_0", threshold=128, group=64, sinks=4),
}
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 32, "n_seq_max": 2, "unified": True, "swa_full": False}
TEXT = prompt(600, seed=8)
SLIDING = ["gemma2", "gemma3", "gemma4", "gpt-oss", "llama4"]

each_kind = [pytest.mark.parametrize("name", SLIDING), pytest.mark.parametrize("kv", KVS)]


def each(test: Any) -> Any:
    return each_kind[0](each_kind[1](test))


@each
def test_a_copy_and_then_several_micro_batches(open_ctx: Any, name: str, kv: str) -> None:
    """Tokens that both sequences have are in the window of the first micro-batches: `kv.copy(0, 1)`."""
    ctx, twin = (open_ctx(name, KVS[kv], **OPTIONS) for _ in range(2))
    for side in (ctx, twin):
        side.decode(TEXT[:54])
    ctx.cp(0, 1)
    assert worst(ctx.decode(TEXT[54:354]), twin.decode(TEXT[54:354])) < TOL_INT8
    assert (
        worst(ctx.decode(TEXT[400:440], seq_ids=1), fresh(open_ctx, name, kv, TEXT[:54], TEXT[400:440]))
        < TOL_INT8
    )


def fresh(open_ctx: Any, name: str, kv: str, before: list[int], tokens: list[int]) -> np.ndarray:
    ctx = open_ctx(name, KVS[kv], **OPTIONS)
    ctx.decode(before)
    return ctx.decode(tokens)


@each
def test_a_batch_that_does_not_fit_leaves_the_window(open_ctx: Any, name: str, kv: str) -> None:
    """Its first micro-batches fit, and would have taken over cells."""
    ctx, twin = (open_ctx(name, KVS[kv], **{**OPTIONS, "n_ctx": 256}) for _ in range(2))
    for side in (ctx, twin):
        side.decode(TEXT[:54])
        side.cp(0, 1)
        side.decode(TEXT[54:94])
    with pytest.raises(DecodeError) as refused:
        ctx.decode(TEXT[94:350])
    assert refused.value.code == 1
    for seq in (0, 1):
        mine, theirs = (side.decode(TEXT[400:404], seq_ids=seq) for side in (ctx, twin))
        assert np.array_equal(mine, theirs), f"{worst(mine, theirs):.2g}"


def feed(ctx: Ctx, tokens: list[int], seq: int) -> None:
    for i in range(0, len(tokens), 32):
        ctx.decode(tokens[i : i + 32], seq_ids=seq, logits_at="last")


@each
def test_a_state_takes_over_cells_of_another_sequence(open_ctx: Any, name: str, kv: str) -> None:
    """The tokens that they held are behind its window, and their F16 rows are still there."""
    for n, more in ((100, 150), (200, 50)):
        ctx, twin = (open_ctx(name, KVS[kv], **{**OPTIONS, "n_ctx": 2048, "n_seq_max": 3}) for _ in range(2))
        for side in (ctx, twin):
            feed(side, TEXT[:n], 0)
            feed(side, TEXT[400:440], 1)
        state = ctx.save_seq(1)
        ctx.rm(1)
        for side in (ctx, twin):
            feed(side, TEXT[n : n + more], 0)
        assert ctx.load_seq(state, 1) == len(state)
        if isinstance(KVS[kv], Mixed):
            check_books(ctx)
        for seq in (1, 0):
            mine, theirs = (side.decode(TEXT[450:490], seq_ids=seq) for side in (ctx, twin))
            assert worst(mine, theirs) < TOL_INT8
        ctx.close(), twin.close()
