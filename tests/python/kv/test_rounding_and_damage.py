"""Rows of a real model that are evaluated again: rounding is told from damage. `-s` shows the figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.kv.evaluate_again import Again, Rows, evaluate_again, read_rows

pytestmark = pytest.mark.full

TEXT = (
    b"The river rose in the night, and by the morning the lower fields were under water. Nobody "
    b"in the village was surprised: the snow on the hills had been deep, and the first warm wind "
    b"of the year had come early. They moved the sheep to the churchyard, which stands high, and "
    b"carried what was in the cellars upstairs. The miller, who had seen worse, sat at his "
    b"window and counted the planks that went by. At noon the bridge shook, and the carter "
    b"turned his horses round and went home by the long way, past the quarry."
)
N = 4
Change = Callable[[Rows, Rows, int], Rows]


def _of(which: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def changed(rows: Rows, _: Rows, __: int) -> Rows:
        return {name: change(part) if name[1] in which else part for name, part in rows.items()}

    return changed


def _later(by: int) -> Change:
    return lambda _, every, at: {name: part[at - by : at - by + N] for name, part in every.items()}


def _other_layout(k: np.ndarray) -> np.ndarray:
    return k.reshape(N, -1, 32, 2).swapaxes(2, 3).reshape(N, -1)


def _turned(k: np.ndarray) -> np.ndarray:
    """By three positions."""
    pairs = k.reshape(N, -1, 32, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(3j * 100_000.0 ** (-np.arange(32) / 32))
    return np.stack([turned.real, turned.imag], -1).reshape(N, -1)


def _no_head(rows: Rows, _: Rows, at: int) -> Rows:
    """One head of V of one layer is gone."""
    name = (3 + at % 24, "V")
    part = rows[name].copy()
    part[:, 64:128] = 0
    return {**rows, name: part}


RNG = np.random.default_rng(0)
DAMAGE: dict[str, Change] = {
    "one position late": _later(1),
    "of other tokens": _later(40),
    "another rotary layout": _of("K", _other_layout),
    "turned by 3": _of("K", _turned),
    "noise": _of("KV", lambda x: x + 0.5 * x.std() * RNG.standard_normal(x.shape)),
    "a head of V": _no_head,
}


@pytest.mark.nightly
@pytest.mark.needs("real model")
@pytest.mark.parametrize("kv", ["f16", "mixed", "mixed:cold=q8_0"])
def test_rounding_and_damage(real_model_q4_1: Path, kv: str) -> None:
    with Llama(real_model_q4_1, kv=kv, n_ctx=256, n_seq_max=2, kv_unified=True, verbose=False) as llm:
        tokens = np.array(llm.tokenize(TEXT), np.int32)
        llm.eval(tokens.tolist())
        every = read_rows(llm.kv, 0, [(0, len(tokens))])
        missed: dict[str, Any] = dict.fromkeys(DAMAGE, 0)
        begins = [*range(41, len(tokens) - N, 6), len(tokens) - N]
        worst = 0.0
        for at in begins:
            llm.kv.copy(0, 1)
            again = evaluate_again(llm.kv, 1, tokens, [(at, at + N)])
            llm.kv.remove(1)
            assert again.problems([(at, at + N)]) == [""]
            worst = max(worst, *(float(np.median(part)) for part in again.errors.values()))
            for name, change in DAMAGE.items():
                damaged = Again(change(again.before, every, at), again.after, again.moved, again.coarse)
                missed[name] += damaged.problems([(at, at + N)]) == [""]
        print(
            f"\n{kv}: {len(begins)} spans of {N} tokens, a tensor's median error {worst:.3f} at most; missed",
            missed,
        )
        assert not any(missed.values())


def test_tokens_that_choose_other_experts_are_no_damage() -> None:
    """Rows of some tokens are others from a layer on; of a damaged block those of all tokens are."""
    sound = {
        (il, which): RNG.standard_normal((N, 64)).astype(np.float32) for il in range(4) for which in "KV"
    }
    others = {name: RNG.standard_normal((N, 64)).astype(np.float32) for name in sound}
    moved = np.zeros(N, np.bool_)

    def problem(rows: Rows, experts: bool) -> str:
        return Again(rows, sound, moved, experts, experts).problems([(0, N)])[0]

    def with_others(n: int) -> Rows:
        return {
            name: np.concatenate([others[name][:n], rows[n:]]) if name[0] >= 2 else rows
            for name, rows in sound.items()
        }

    assert problem(with_others(3), experts=True) == ""
    assert "of layer 2 is off" in problem(with_others(3), experts=False)
    assert "of layer 2 is off" in problem(with_others(4), experts=True)
    late = {name: np.roll(rows, 1, axis=0) for name, rows in sound.items()}
    assert "of layer 0 is off" in problem(late, experts=True)
