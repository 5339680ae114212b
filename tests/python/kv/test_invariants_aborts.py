"""A step that is stopped half-way leaves every kind of memory as it was, recurrent states among them.

Aborts come from ggml's callback, which is asked before each node of a graph, so they hit any node.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from support.cache.checks import worst
from support.cache.harness import Ctx, DecodeError, Mixed, Uniform, prompt
from support.models import zoo

pytestmark = [pytest.mark.full, pytest.mark.by_model]

RECURRENT = ["mamba", "rwkv7"]
HYBRID = ["lfm2", "qwen3next", "qwen35", "falcon-h1", "granite-hybrid", "nemotron-h"]
KVS: dict[str, Uniform | Mixed] = {"f16": Uniform(), "mixed": Mixed(threshold=24, group=8, sinks=3)}
TEXT = prompt(600, seed=31)


def kinds(names: list[str]) -> Any:
    pairs = [(name, kv) for name in names for kv in KVS if kv == "f16" or name not in RECURRENT]
    return pytest.mark.parametrize(("name", "kv"), pairs)


def decode_counted(ctx: Ctx, tokens: list[int], **options: Any) -> tuple[np.ndarray, int]:
    """Logits, and how many times the abort callback was asked."""
    ctx.abort_after(10**9)
    logits = ctx.decode(tokens, **options)
    n_calls = ctx.abort_calls
    ctx.abort_after(None)
    return logits, n_calls


def abort(ctx: Ctx, n_calls: int, tokens: list[int], **options: Any) -> None:
    """Try to evaluate tokens, and abort after `n_calls` calls."""
    ctx.abort_after(n_calls)
    with pytest.raises(DecodeError) as aborted:
        ctx.decode(tokens, **options)
    assert aborted.value.code == 2
    ctx.abort_after(None)


def random_of(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def assert_same_end(ctx: Ctx, twin: Ctx, n_seq: int = 1) -> None:
    """A slice of a prompt, then token by token, which reads what the slice left."""
    for seq in range(n_seq):
        assert ctx.pos_max(seq) == twin.pos_max(seq)
        for i, n in enumerate((5, 1, 1)):
            tokens = TEXT[500 + 10 * i : 500 + 10 * i + n]
            mine, theirs = (side.decode(tokens, seq_ids=seq) for side in (ctx, twin))
            assert np.array_equal(mine, theirs), f"sequence {seq}: {worst(mine, theirs):.2g}"


@kinds([*zoo.SUPPORTED, *zoo.MORE, *RECURRENT])
def test_an_aborted_step_leaves_nothing(open_ctx: Any, name: str, kv: str) -> None:
    """Slices and single tokens, stopped at any node: what comes next is the same to the bit."""
    ctx, twin = (open_ctx(name, KVS[kv], swa_full=False) for _ in range(2))
    random = random_of(name, kv)
    n = 0
    for step in (60, 1, 40, 1, 1, 64, 1):
        theirs, n_calls = decode_counted(twin, TEXT[n : n + step])
        for _ in range(2):
            abort(ctx, int(random.integers(0, n_calls)), TEXT[n : n + step])
            assert ctx.pos_max() == n - 1
        mine = ctx.decode(TEXT[n : n + step])
        n += step
        assert np.array_equal(mine, theirs), f"after {n} tokens: {worst(mine, theirs):.2g}"
    assert_same_end(ctx, twin)


@kinds([*HYBRID, *RECURRENT, "llama-64", "gemma3"])
@pytest.mark.parametrize("unified", [True, False])
def test_of_several_sequences(open_ctx: Any, name: str, kv: str, unified: bool) -> None:
    """One of them shares its tokens with another, and a step has tokens of some of them, or of one."""
    options = {"n_ctx": 1536, "n_seq_max": 3, "unified": unified, "swa_full": False}
    ctx, twin = (open_ctx(name, KVS[kv], **options) for _ in range(2))
    random = random_of(name, kv, unified)
    for side in (ctx, twin):
        side.decode(TEXT[:40], seq_ids=0)
        side.decode(TEXT[50:70], seq_ids=2)
        side.cp(0, 1)
    for i, seqs in enumerate(([1], [0, 1, 2], [2, 0], [1], [2], [0, 1])):
        n = 7 if i % 2 else 1
        tokens = TEXT[100 + 40 * i :][: n * len(seqs)]
        batch = {
            "positions": [twin.pos_max(seq) + 1 + j for seq in seqs for j in range(n)],
            "seq_ids": [[seq] for seq in seqs for _ in range(n)],
        }
        theirs, n_calls = decode_counted(twin, tokens, **batch)
        n_ubatch = 1 if unified and name not in RECURRENT else len(seqs)  # at most
        abort(ctx, int(random.integers(0, n_calls // n_ubatch)), tokens, **batch)
        assert np.array_equal(ctx.decode(tokens, **batch), theirs)
    assert_same_end(ctx, twin, 3)


@kinds(["lfm2", "qwen3next", "nemotron-h", "llama-64", "gemma3"])
def test_of_tokens_that_are_in_two_sequences(open_ctx: Any, name: str, kv: str) -> None:
    """llama.cpp takes them out of the first one only."""
    ctx, twin = (open_ctx(name, KVS[kv], n_seq_max=2, unified=True, swa_full=False) for _ in range(2))
    for side in (ctx, twin):
        side.decode(TEXT[:40], seq_ids=[[0, 1]] * 40)
    abort(ctx, 15, TEXT[40:60], seq_ids=[[0, 1]] * 20)
    assert ctx.pos_max(0) == ctx.pos_max(1) == 39
    assert_same_end(ctx, twin, 2)


@kinds([*HYBRID, *RECURRENT, "llama-64"])
def test_in_a_later_micro_batch(open_ctx: Any, name: str, kv: str) -> None:
    """Those before it stay, as if the batch had ended there."""
    ctx, twin = (open_ctx(name, KVS[kv], n_ubatch=16) for _ in range(2))
    for side in (ctx, twin):
        side.decode(TEXT[:40])
    _, n_calls = decode_counted(twin, TEXT[40:56])
    abort(ctx, int(random_of(name, kv).integers(n_calls, 2 * n_calls)), TEXT[40:140])
    assert ctx.pos_max() == 55
    assert_same_end(ctx, twin)


@kinds(["lfm2", "qwen35", "nemotron-h"])
def test_snapshots_of_recurrent_states_stay(open_ctx: Any, name: str, kv: str) -> None:
    """After an aborted step as many tokens can be taken back as before it."""
    options = {"n_ctx": 256, "n_seq_max": 2, "unified": True, "n_rs_seq": 4}
    for n_calls in (0, 10, 25):
        ctx, twin = (open_ctx(name, KVS[kv], **options) for _ in range(2))
        for side in (ctx, twin):
            side.decode(TEXT[:40])
            side.decode(TEXT[40:45])
        abort(ctx, n_calls, TEXT[45:48])
        for side in (ctx, twin):
            assert side.rm(0, 42)
        abort(ctx, n_calls, TEXT[45:48])
        for side in (ctx, twin):
            assert not side.rm(0, 38)
        assert_same_end(ctx, twin)


@kinds(["lfm2", "qwen35"])
def test_snapshots_stay_when_a_batch_does_not_fit(open_ctx: Any, name: str, kv: str) -> None:
    """It has more tokens than the micro-batch before it, whose snapshots are fewer."""
    ctx = open_ctx(name, KVS[kv], n_ctx=256, n_rs_seq=4)
    ctx.decode(TEXT[:250])
    ctx.decode(TEXT[250:252])
    with pytest.raises(DecodeError) as refused:
        ctx.decode(TEXT[252:260])
    assert refused.value.code == 1
    assert not ctx.rm(0, 249)
    assert ctx.rm(0, 251)


@kinds(["llama-64", "gemma3", "deepseek2", "falcon-h1", "qwen2vl", "refact"])
@pytest.mark.parametrize("n_calls", [0, 3, 20])
def test_while_a_context_shift_is_pending(open_ctx: Any, name: str, kv: str, n_calls: int) -> None:
    """Keys are turned all the same: nothing stops that graph."""
    ctx, twin = (open_ctx(name, KVS[kv]) for _ in range(2))
    if name == "falcon-h1":  # recurrent states forget nothing: positions alone move
        moves = [lambda side: side.add(0, 0, -1, 10)]
    else:
        moves = [lambda side: side.context_shift(4, 60), lambda side: side.context_shift(2, 30)]
    for side in (ctx, twin):
        side.decode(TEXT[:150])
    for move in moves:
        for side in (ctx, twin):
            move(side)
        abort(ctx, n_calls, TEXT[200:210])
        mine, theirs = (side.decode(TEXT[200:210]) for side in (ctx, twin))
        assert np.array_equal(mine, theirs), f"{worst(mine, theirs):.2g}"
    assert_same_end(ctx, twin)
