"""What several tests assert, and the tolerances with the measurements behind them.

Distances are harness.rel_rms: RMS over logits, relative to the logits' spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness import TYPES, Ctx, rel_rms
from oracle import Oracle

# A muted model against the double-precision oracle. llama.cpp's F16 flash attention itself is 1e-6 to 3e-5
# off for prompts and 3e-4 for single tokens (it then sums V in half precision); one wrong row of q4_0 costs
# 1e-2.
TOL_ORACLE = 2e-3

QUANTISED = {name: TYPES[name] for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")}


def assert_same(
    ctx: Ctx, oracle: Oracle, tokens: Sequence[int], tol: float = TOL_ORACLE, **where: object
) -> None:
    """Decodes in both and compares every logit vector on its own."""
    got = ctx.decode(tokens, **where)  # type: ignore[arg-type]
    want = oracle.decode(tokens, **where)  # type: ignore[arg-type]
    worst = max(rel_rms(a, b) for a, b in zip(got, want, strict=True))
    assert worst < tol, f"a token's logits are {worst:.2g} away from the oracle's"


def check_books(ctx: Ctx, oracle: Oracle | None = None) -> None:
    """The invariants that show from outside: counts, positions, hot flags; with an oracle also each
    row's tier.
    """
    stats, sequences = ctx.stats(), ctx.sequences()
    il = next(layer["il"] for layer in ctx.layers() if layer["mixed"])
    n_slots = (stats["threshold_capacity"] + ctx.kv.sinks) * (1 if stats["n_stream"] > 1 else ctx.n_seq_max)  # type: ignore[union-attr]
    assert stats["n_cells_hot"] <= n_slots * stats["n_stream"]
    assert stats["n_cells_hot"] <= stats["n_cells_used"]
    total = 0
    for seq in range(ctx.n_seq_max):
        rows, positions, hot = ctx.rows(il, "k", seq)
        assert len(rows) == len(positions) == len(hot)
        assert np.isfinite(rows).all()
        assert (np.diff(positions) >= 0).all()
        total += len(positions)
        if len(positions) == 0:
            assert ctx.pos_max(seq) == -1
            continue
        info = sequences[seq]
        assert (info["pos_min"], info["pos_max"]) == (positions[0], positions[-1])
        assert info["n_hot"] == hot.sum()
        assert info["n_hot"] + info["n_cold"] == len(positions)
        in_window = (positions >= info["hot_begin"]) | (positions < stats["sink_tokens"])
        assert not (hot & ~in_window).any(), "a row outside the hot set is said to be hot"
        if oracle is not None:
            want = oracle.rows(seq)
            q = oracle.pos_max(seq)
            assert [r.pos for r in want] == positions.tolist()
            assert [oracle._tier(q, r) == "hot" for r in want] == hot.tolist()
    assert stats["n_cells_used"] <= total  # shared cells count once


def check_rows(ctx: Ctx, oracle: Oracle, seq: int = 0) -> None:
    """Each row that attention reads, hot or cold, is the oracle's: to F32 rounding, which moves few
    elements a step.
    """
    q = oracle.pos_max(seq)
    for which in "kv":
        rows, _, hot = ctx.rows(oracle._kv_layer(), which, seq)
        want = np.stack([getattr(r, f"{which}_{oracle._tier(q, r)}") for r in oracle.rows(seq)])
        close = np.isclose(rows, want, rtol=2e-3, atol=1e-5)
        assert close[hot].all(), f"hot {which} rows differ from the F16 values"
        assert close.mean() > 0.995, f"{which}: {(~close).mean():.2%} of elements are not the quantised value"
