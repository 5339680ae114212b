"""Invariants 1, 2 and 5 under random sequences of operations.

The oracle does the same step by step: after every decode each logit vector equals its own, and after every
step the books are in order. Whole models run against a uniform F16 cache that did the same.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.cache.checks import TOL_STEP, check_books, check_rows, distances, tolerance
from support.cache.harness import Ctx, DecodeError, Mixed, Uniform, prompt, rel_rms
from support.cache.oracle import Oracle, oracle_of

pytestmark = [pytest.mark.full, pytest.mark.merged_nightly]

N_SEQ, N_CTX = 3, 768

seqs = st.integers(0, N_SEQ - 1)
fractions = st.floats(0, 1)
steps = st.one_of(
    st.tuples(st.just("decode"), seqs, st.integers(1, 40), st.integers(0, 999)),
    st.tuples(st.just("decode"), seqs, st.integers(1, 3), st.integers(0, 999)),
    st.tuples(st.just("abort"), seqs, st.integers(1, 40), st.integers(0, 60)),
    st.tuples(st.just("rollback"), seqs, fractions),
    st.tuples(st.just("cut"), seqs, fractions, fractions),
    st.tuples(st.just("copy"), seqs, seqs),
    st.tuples(st.just("keep"), seqs),
    st.tuples(st.just("shift"), seqs, fractions),
    st.tuples(st.just("end"), seqs),
    st.tuples(st.just("save and restore")),
    st.tuples(st.just("sequence away and back"), seqs),
    st.tuples(st.just("range away and back"), seqs, fractions, fractions),
)
window_steps = st.tuples(st.just("window"), st.integers(0, 24), st.integers(1, 8), st.integers(0, 3))


class Player:
    """Plays steps on a context and on what it is compared with; positions come from the context."""

    def __init__(self, ctx: Ctx, other: Oracle | Ctx, unified: bool) -> None:
        self.ctx, self.other, self.unified = ctx, other, unified

    def both(self, operation: str, *args: int) -> None:
        for side in (self.ctx, self.other):
            getattr(side, operation)(*args)

    def at(self, seq: int, fraction: float) -> int:
        return round(fraction * (self.ctx.pos_max(seq) + 1))

    def play(self, step: tuple) -> tuple[np.ndarray, np.ndarray] | None:
        name, *args = step
        return getattr(self, "on_" + name.replace(" ", "_"))(*args)

    def on_decode(self, seq: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray] | None:
        if self.ctx.pos_max(seq) + n > 200:  # a stream has 256 cells, the unified cache room for three such
            self.both("rm", seq, -1, -1)
        first = self.ctx.pos_max(seq) + 1
        tokens = prompt(n, seed)
        return tuple(side.decode(tokens, positions=first, seq_ids=seq) for side in (self.ctx, self.other))  # type: ignore[return-value]

    def on_abort(self, seq: int, n: int, n_calls: int) -> None:
        """What was processed before it stays."""
        first = self.ctx.pos_max(seq) + 1
        if first + n > 200:
            return
        tokens = prompt(n, n_calls)
        self.ctx.abort_after(n_calls)
        with suppress(DecodeError):
            self.ctx.decode(tokens, positions=first, seq_ids=seq)
        self.ctx.abort_after(None)
        if (done := self.ctx.pos_max(seq) + 1 - first) > 0:
            self.other.decode(tokens[:done], positions=first, seq_ids=seq)

    def on_rollback(self, seq: int, fraction: float) -> None:
        self.both("rm", seq, self.at(seq, fraction), -1)

    def on_cut(self, seq: int, a: float, b: float) -> None:
        first, last = sorted((self.at(seq, a), self.at(seq, b)))
        self.both("rm", seq, first, max(first, last - 1))  # the last token stays: positions go on from it

    def on_copy(self, src: int, dst: int) -> None:
        if src != dst:
            self.both("rm", dst, -1, -1)
            self.both("cp", src, dst)

    def on_keep(self, seq: int) -> None:
        self.both("keep", seq)

    def on_shift(self, seq: int, fraction: float) -> None:
        n = self.ctx.pos_max(seq) + 1
        if n < 12 or any(self.shares(seq)):
            return  # a move would drag the cells of another sequence along
        self.both("context_shift", min(3, n), max(1, round(fraction * (n - 8))), seq)

    def shares(self, seq: int) -> list[bool]:
        if not self.unified:
            return [False]
        used = self.ctx.stats()["n_cells_used"]
        rows = [len(self.ctx.rows(0, "k", s)[1]) for s in range(N_SEQ)]
        return [sum(rows) != used]

    def on_end(self, seq: int) -> None:
        self.both("rm", seq, -1, -1)

    def on_window(self, threshold: int, group: int, sinks: int) -> None:
        self.both("set_window", threshold, min(group, threshold) or 1, sinks)

    def on_save_and_restore(self) -> None:
        self.ctx.stats()  # a state saved while a move is pending would lose it: llama.cpp saves no shifts
        data = self.ctx.save()
        self.ctx.clear()
        assert self.ctx.load(data) == len(data)
        if isinstance(self.other, Oracle):
            self.other.restored()

    def on_sequence_away_and_back(self, seq: int) -> None:
        if any(self.shares(seq)) or self.ctx.pos_max(seq) < 0:
            return  # what comes back has cells of its own
        self.ctx.stats()
        data = self.ctx.save_seq(seq)
        self.ctx.rm(seq)
        assert self.ctx.load_seq(data, seq) == len(data)
        if isinstance(self.other, Oracle):
            self.other.restored(seq)

    def on_range_away_and_back(self, seq: int, a: float, b: float) -> None:
        first, last = sorted((self.at(seq, a), self.at(seq, b)))
        positions = self.ctx.rows(0, "k", seq, first, last)[1]
        if any(self.shares(seq)) or not len(positions) or len(positions) != last - first:
            return  # a block has no holes
        block = self.ctx.export(seq, first, last)
        if isinstance(self.other, Oracle):
            self.other.cut_out(seq, first, last)
        self.ctx.rm(seq, first, last)
        self.ctx.put(block, seq)
        if isinstance(self.other, Oracle):
            self.other.restored(seq)


def fuzz(examples: int):
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],  # to shrink a plan takes minutes
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )


KV = Mixed(threshold=24, group=8, sinks=3)


def run_on_oracle(load, name: str, kv: Mixed, unified: bool, plan: list[tuple]) -> None:
    from support.models import zoo

    il = zoo.SHAPES[name].kv_layers[0]
    options = {"n_seq_max": N_SEQ, "unified": unified}
    with Ctx(load(name, only=il), kv, n_ctx=N_CTX, n_ubatch=16, **options) as ctx:
        oracle = oracle_of(zoo.muted(name, il), il, kv.of_layer(il), **options)
        oracle.take_scales(ctx)
        player = Player(ctx, oracle, unified)
        for step in [("decode", 0, 40, 1), *plan, ("decode", 0, 12, 2)]:
            out = player.play(step)
            if out is not None:
                far = distances(*out)
                assert max(far) < TOL_STEP, f"{step}: {max(far):.2g} away from the oracle"
                assert len(far) < 5 or np.median(far) < tolerance(kv), f"{step}: {np.median(far):.2g}"
            check_books(ctx, oracle)
        for seq in range(N_SEQ):
            if oracle.rows(seq):
                check_rows(ctx, oracle, seq)


PLANS = st.lists(st.one_of(steps, window_steps), min_size=3, max_size=14)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@given(plan=PLANS)
@fuzz(15)
def test_against_the_oracle(load, attention: str, unified: bool, plan: list[tuple]) -> None:
    run_on_oracle(load, "llama-64", KV.with_(attention=attention), unified, plan)


@given(plan=PLANS)
@fuzz(8)
def test_a_layer_of_its_own_types(load, attention: str, plan: list[tuple]) -> None:
    """Window, shifts, rollbacks, copies and states of a layer whose types are not those of the others."""
    layers = ((0, 0, "q5_0", "lm4"),)
    run_on_oracle(
        load, "llama-64", KV.with_(k="q4_0", v="q8_0", layers=layers, attention=attention), True, plan
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-96", "refact", "qwen3", "deepseek2"])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@given(plan=PLANS)
@fuzz(60)
def test_against_the_oracle_at_length(
    load, attention: str, name: str, unified: bool, plan: list[tuple]
) -> None:
    run_on_oracle(load, name, KV.with_(attention=attention), unified, plan)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@given(plan=st.lists(steps, min_size=3, max_size=10))
@fuzz(10)
@pytest.mark.nightly
def test_whole_model_against_f16(load, attention: str, unified: bool, plan: list[tuple]) -> None:
    """An open window does what llama.cpp's F16 cache does, all layers and operations; a small one stays
    within the error of quantisation.
    """
    options = {"n_seq_max": N_SEQ, "unified": unified, "n_ctx": N_CTX, "n_ubatch": 16}
    for threshold, group, tol in ((256, 8, 0.02), (24, 8, 0.6)):
        kv = Mixed(threshold=threshold, group=group, sinks=3, attention=attention)
        with Ctx(load("qwen3"), kv, **options) as ctx, Ctx(load("qwen3"), Uniform(), **options) as f16:
            player = Player(ctx, f16, unified)
            for step in [("decode", 0, 40, 1), *plan, ("decode", 0, 12, 2)]:
                out = player.play(step)
                if out is not None:
                    assert rel_rms(*out) < tol, f"{step}"
