"""Does anything to the rows of several sequences, and compares those that are vouched for with a fresh
evaluation's.

What is exact: the same tokens, the same types, the same window rule, and every row computed from computed
rows. So a row that `KVCache.exact` counts is a fresh context's, but for rounding; and so is what is answered
after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import Llama
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.native.batch import NO_CELLS, NativeBatch
from mixedkv.store import KVStore
from support.cache.crossing.subject import state_of

REFUSALS = (ValueError, LookupError, UnsupportedModelError)
Rows = dict[tuple[int, str], dict[tuple[int, bool], npt.NDArray[np.float32]]]


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens.

    Attributes:
        n_ctx: cells of all sequences together.
        most: tokens of a sequence.
        longest: tokens of a prompt, which go on from what is there.
        n_batch: evaluated at once.
        layers: so many of the first ones are compared; None: all.
    """

    n_ctx: int = 192
    most: int = 96
    longest: int = 40
    n_batch: int = 32
    layers: int | None = None


def opened(path: Path, kv: str, **options: Any) -> Llama:
    return Llama(path, kv=kv, n_threads=1, n_threads_batch=1, verbose=False, **options)


def rows(llm: Llama, seq: int, n: int) -> Rows:
    """Return the first rows of a sequence, by layer and kind, then by position and whether it is hot."""
    found: Rows = {}
    for layer in llm.kv.layers:
        view = llm.kv.layer(layer.il)
        at = list(zip(view.positions(seq, 0, n).tolist(), view.hot(seq, 0, n).tolist(), strict=True))
        for kind, read in (("K", view.k), ("V", view.v)):
            values = read(seq, 0, n, basis="model")
            found[layer.il, kind] = dict(zip(at, values.reshape(len(at), -1) if at else (), strict=True))
    return found


def off(got: Rows, expected: Rows, layers: int | None = None) -> float:
    """Return the largest relative error of a row of the first layers that both have, in the same type."""
    worst = 0.0
    for key, table in expected.items():
        if layers is not None and key[0] >= layers:
            continue
        both = [at for at in got[key] if at in table]
        if both:
            a, b = np.stack([got[key][at] for at in both]), np.stack([table[at] for at in both])
            worst = max(worst, float((np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)).max()))
    return worst


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64) - logits.max()
    return x - np.log(np.exp(x).sum())


@dataclass
class Tally:
    """What was done, and what was wrong.

    Attributes:
        done: operations by name.
        n_rows, n_answers: rows and answers that were vouched for and compared.
        row, answer: the largest relative error of a row, and the largest difference of a log-probability of a
            token that a fresh context gives 1% or more.
        wrong: what was off by more than the bounds.
    """

    done: Counter[str] = field(default_factory=Counter)
    n_rows: int = 0
    n_answers: int = 0
    row: float = 0.0
    answer: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Fresh:
    """A context that evaluates from the first token."""

    def __init__(self, path: Path, kv: str, n_ctx: int) -> None:
        self.llm = opened(path, kv, swa_full=True, n_ctx=n_ctx, n_batch=n_ctx)
        self._known: list[tuple[list[int], Rows]] = []

    def rows(self, tokens: list[int]) -> Rows:
        for known, found in self._known:
            if known[: len(tokens)] == tokens:
                return found
        self._begin(tokens)
        found = rows(self.llm, 0, len(tokens))
        self._known = [*self._known[-8:], (list(tokens), found)]
        return found

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        self._begin(tokens)
        return _logits(self.llm)

    def _begin(self, tokens: list[int]) -> None:
        self.llm.reset()
        self.llm.kv.clear()
        self.llm.eval(tokens)


class Subject:
    """A context with several sequences, whose cells are nearly used up, and one that shares its store."""

    def __init__(
        self,
        path: Path,
        kv: str,
        *,
        swa_full: bool,
        n_seq: int,
        unified: bool,
        seed: int,
        sizes: Sizes = Sizes(),
    ) -> None:
        self.rng, self.n_seq, self.unified, self.sizes = random.Random(seed), n_seq, unified, sizes
        shape = {
            "swa_full": swa_full,
            "n_seq_max": n_seq,
            "kv_unified": unified,
            "n_ctx": sizes.n_ctx if unified else sizes.n_ctx * n_seq,
            "n_batch": sizes.n_batch,
        }
        self.llm, self.twin = (opened(path, kv, **shape) for _ in range(2))
        self.fresh, self.store = (
            Fresh(path, kv, sizes.n_ctx),
            KVStore(None, max_ram_bytes=2**22 * sizes.most // 96),
        )
        self.tokens: list[list[int]] = [[] for _ in range(n_seq)]
        self.points: list[tuple[Checkpoint, list[int]]] = []
        self.n_words = self.llm.n_vocab()
        self.tally = Tally()

    def close(self) -> None:
        for llm in (self.llm, self.twin, self.fresh.llm):
            llm.close()
        self.store.close()

    # --- operations ---

    def step(self) -> str:
        """Do one thing at random; return its name."""
        do: Callable[[int], None] = self.rng.choice(
            [self.grow, self.answer] * 4
            + [self.cut, self.copy, self.move, self.block, self.elsewhere, self.keep, self.go_back]
            + [self.state, self.drop]
        )
        seq = self.rng.randrange(self.n_seq)
        try:
            do(seq)
        except REFUSALS:
            self.tally.done["refused"] += 1
        self._follow()
        self.tally.done[do.__name__] += 1
        return f"{do.__name__} {seq}"

    def grow(self, seq: int) -> None:
        """Evaluate tokens, often those that another sequence has there."""
        n = len(self.tokens[seq])
        like = self.rng.choice(self.tokens)[n:] if self.rng.random() < 0.5 else []
        new = like or [
            self.rng.randrange(3, self.n_words) for _ in range(self.rng.randint(1, self.sizes.longest))
        ]
        if n + len(new) <= self.sizes.most:
            self.evaluate(self.llm, seq, self.tokens[seq], new)

    def answer(self, seq: int) -> None:
        tokens = self.tokens[seq]
        if len(tokens) < self.sizes.most:
            self.evaluate(self.llm, seq, tokens, [self.rng.randrange(3, self.n_words)])
            self._compare_answer(self.llm, seq, tokens)

    def cut(self, seq: int) -> None:
        n = self.llm.kv.longest_cut(seq, self.rng.randint(0, len(self.tokens[seq])))
        self.llm.kv.remove(seq, n)
        self.tokens[seq] = self.tokens[seq][:n]

    def copy(self, seq: int) -> None:
        source = self.rng.randrange(self.n_seq)
        n = self.rng.randint(0, len(self.tokens[source])) if self.unified else len(self.tokens[source])
        if source != seq and n:
            self.llm.kv.remove(seq)
            self.llm.kv.copy(source, seq, 0, n if self.unified else -1)
            self.tokens[seq] = self.tokens[source][:n]

    def move(self, seq: int) -> None:
        """Take tokens out of the middle, and move those behind them down, for all that share their cells."""
        tokens = self.tokens[seq]
        if len(tokens) > 8 and self.llm.kv.can_shift:
            begin = self.rng.randint(1, len(tokens) - 2)
            end = self.rng.randint(begin + 1, len(tokens) - 1)
            self.llm.kv.remove(seq, begin, end)
            self.llm.kv.shift(seq, end, len(tokens), begin - end)
            self.tokens[seq] = tokens[:begin] + tokens[end:]

    def block(self, seq: int) -> None:
        """Put a range of another sequence's rows behind this one's, where they were or elsewhere."""
        source, at = self.rng.randrange(self.n_seq), len(self.tokens[seq])
        begin = self.rng.choice([0, min(at, max(0, len(self.tokens[source]) - 1))])
        ids = self.tokens[source][begin:]
        if not ids or at + len(ids) > self.sizes.most:
            return
        block = self.llm.kv.export(source, begin, len(self.tokens[source]), ids)
        self.llm.kv.load(block, seq, at=at)
        self.tokens[seq] = self.tokens[seq] + ids

    def elsewhere(self, seq: int) -> None:
        """Store rows; another context restores them, goes on, and stores what it has. Get that back."""
        tokens = self.tokens[seq]
        if not tokens:
            return
        self.store.save(self.llm, tokens, seq)
        restored = self.store.restore(self.twin, tokens, seq % self.n_seq, exact_only=self.rng.random() < 0.5)
        known = tokens[: restored.n_tokens]
        if not known:
            return
        self.compare(self.twin, seq, known)
        if len(known) < self.sizes.most:
            self.evaluate(self.twin, seq, known, [self.rng.randrange(3, self.n_words)])
            self._compare_answer(self.twin, seq, known)
        self.store.save(self.twin, known, seq)
        target = self.rng.randrange(self.n_seq)
        back = self.store.restore(self.llm, known, target)
        if back.hit:
            self.tokens[target] = known[: back.n_tokens]
        for other in range(self.n_seq):
            self.twin.kv.remove(other)

    def keep(self, seq: int) -> None:
        point = self.llm.kv.checkpoint(seq)
        if point is not None:
            self.points = [*self.points[-4:], (point, list(self.tokens[seq]))]

    def go_back(self, seq: int) -> None:
        fitting = [
            (point, source)
            for point, tokens in self.points
            for source in range(self.n_seq)
            if self.tokens[source][: point.n] == tokens and (self.unified or source == seq)
        ]
        if fitting:
            point, source = self.rng.choice(fitting)
            begun = self.tokens[source][: point.n]
            self.tokens[seq] = []
            self.llm.kv.resume(point, point.n, source, seq)
            self.tokens[seq] = begun

    def state(self, seq: int) -> None:
        """Read a sequence's state back: of what it is nothing is known then."""
        if not self.tokens[seq]:
            return
        data = state_of(self.llm, seq)
        buffer = (llama_cpp.ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if not llama_cpp.llama_state_seq_set_data(self.llm.ctx, buffer, len(data), seq):
            self.llm.kv.remove(seq)
        elif (n := self.llm.kv.exact(seq, self.tokens[seq])) > 0:
            self.tally.wrong.append(f"{n} rows of a state are vouched for")

    def drop(self, seq: int) -> None:
        self.llm.kv.remove(seq)
        self.tokens[seq] = []

    # --- evaluating and comparing ---

    def evaluate(self, llm: Llama, seq: int, tokens: list[int], new: list[int]) -> None:
        """Evaluate tokens behind those of a sequence, which gets those that end well."""
        while new:
            some = new[: self.rng.randint(1, self.sizes.n_batch)]
            batch = NativeBatch(np.array(some, np.int32))
            batch.pos[:] = np.arange(len(tokens), len(tokens) + len(some))
            batch.seq[:] = seq
            batch.logits[-1] = 1
            batch.native.n_tokens = len(some)
            code = llm.kv.decode(batch.native)
            if code == 0:
                tokens.extend(some)
                new = new[len(some) :]
            elif code == NO_CELLS:
                self._make_room(llm, seq)
            elif llm.kv.refused():
                n = llm.kv.longest_cut(seq, len(tokens))
                llm.kv.remove(seq, n)
                new = tokens[n:] + new
                del tokens[n:]
            else:
                raise AssertionError(f"llama_decode: {code}")

    def _make_room(self, llm: Llama, spare: int) -> None:
        others = [seq for seq in range(self.n_seq) if seq != spare and llm.kv.positions(seq)[1] >= 0]
        if not others:
            raise LookupError("there is no other sequence")
        seq = self.rng.choice(others)
        llm.kv.remove(seq)
        if llm is self.llm:
            self.tokens[seq] = []

    def _follow(self) -> None:
        """Compare all sequences; forget those that do not have the positions of their tokens any more."""
        for seq in range(self.n_seq):
            self.compare(self.llm, seq, self.tokens[seq])
            if self.llm.kv.positions(seq)[1] + 1 != len(self.tokens[seq]):
                self.drop(seq)

    def compare(self, llm: Llama, seq: int, tokens: list[int]) -> None:
        """Compare the rows that are vouched for."""
        n = min(len(tokens), llm.kv.exact(seq, tokens))
        if n:
            error = off(rows(llm, seq, n), self.fresh.rows(tokens[:n]), self.sizes.layers)
            self.tally.n_rows += n
            self.tally.row = max(self.tally.row, error)

    def _compare_answer(self, llm: Llama, seq: int, tokens: list[int]) -> None:
        if llm.kv.exact(seq, tokens) < len(tokens):
            return
        got, expected = log_softmax(_logits(llm)), log_softmax(self.fresh.logits(tokens))
        likely = expected > np.log(0.01)
        self.tally.n_answers += 1
        self.tally.answer = max(self.tally.answer, float(np.abs(got - expected)[likely].max(initial=0.0)))


def _logits(llm: Llama) -> npt.NDArray[np.float32]:
    at = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(at, (llm.n_vocab(),)).copy()
