"""Puts a prompt's rows together in a sequence, from donors and by evaluation."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.chunks.donors import Segment, covered
from mixedkv.chunks.drift import Drift, RepairedLayers, slices
from mixedkv.chunks.gate import last_logits
from mixedkv.chunks.repair import Mask, Method, at_seams, benefit, most, spread
from mixedkv.kv.block import KVBlock
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.tokens import Tokens

Rows = Sequence[tuple[Segment, list[KVBlock]]]  # cold rows of each segment, at their donor's positions

Floats: TypeAlias = npt.NDArray[np.float32]

_T = TypeVar("_T")
_Work: TypeAlias = Generator[None, None, _T]  # yields after each slice
_QUESTION = 64  # most tokens at the end of the prompt that choose the others
_DRAFT = 8  # tokens generated after it that choose, too, at most
# Tokens of the prompt for each of these, which costs as much as some ten. More are drafted while they repeat
# a passage.
_PER_DRAFTED = 200
_TOGETHER = 512  # tokens of two passages whose choice is evaluated at once
# Attention to a token counts for the next one, itself, and those before it, which tell what it refers to:
# if these stay unrepaired, the repaired token states the wrong thing more clearly.
_NEAR = (0.2, 1.0, 0.75, 0.5, 0.35, 0.15)


class Assembly:
    """Puts one prompt together. At first the sequence holds its first `n_exact` tokens only, in the end all
    but the last, which the caller evaluates for its logits.

    Args:
        llm: the cache is its.
        tokens: the prompt.
        rows: its segments and the rows of their donors.
        n_exact: tokens before the first segment.
        method: which of the segments' tokens are evaluated.
        seq: the sequence.

    Attributes:
        method, segments, n_exact: as given; the segments are those of the rows.
        kept: which rows come from a donor, bool [n]; known at the end.
        n_left: about how many tokens are still to be evaluated, but never fewer than are now: a step
            evaluates so many at most.
    """

    def __init__(
        self, llm: Llama, tokens: Tokens, rows: Rows, n_exact: int, method: Method, seq: int = 0
    ) -> None:
        self._llm, self._tokens, self._rows, self.method, self._seq = llm, tokens, rows, method, seq
        self.n_exact = n_exact
        self.segments = [segment for segment, _ in rows]
        self._reused = covered(self.segments, len(tokens))
        self.kept = np.zeros(len(tokens), np.bool_)
        self._work = 0.0
        self._share = method.share_of(len(tokens))
        self.n_left = len(tokens) - n_exact - round((1 - self._share) * int(self._reused.sum()))
        self._size = 0
        self._steps = self._run()

    @property
    def n_evaluated(self) -> int:
        """Number of evaluated tokens. One that was evaluated twice counts twice, and one that stopped at a
        layer by its share of the layers.
        """
        return round(self._work)

    def advance(self, n: int) -> bool:
        """Load a block, or evaluate up to `n` tokens; False when all is done.

        Raises:
            LookupError: there is no room; rows from `n_exact` on are then unusable.
        """
        self._size = min(n, self._llm.n_batch)
        return next(self._steps, self) is not self

    def _run(self) -> _Work[None]:
        kv, deviation = self._llm.kv, None
        if self.method.repair == "cacheblend":
            deviation = yield from self._deviation()
        for segment, blocks in self._rows:
            for block in blocks:
                kv.load(block, self._seq, block.p0 - segment.at + segment.begin)
                yield
        chosen = yield from self._choose(deviation)
        self.kept = self._reused & ~chosen
        self.n_left = int((~self.kept[self.n_exact :]).sum())
        if self.method.repair == "query":
            begin = yield from self._correct(self.n_exact, chosen)
            yield from self._replace(begin, len(self._tokens) - 1)
            return
        looks = list[Drift]()
        if chosen.any():
            layers = RepairedLayers.of(self._llm.kv)
            looks = [self._drift(layers.to_look_at(i), each, chosen) for i, each in enumerate(self.segments)]
        yield from self._replace(self.n_exact, len(self._tokens) - 1)
        for look in looks:
            look.look()

    def _drift(self, layers: RepairedLayers, segment: Segment, chosen: Mask) -> Drift:
        begin, end = segment.begin, segment.end
        return Drift(self._llm.kv, layers, self._seq, begin, end, chosen[begin:end])

    def _correct(self, begin: int, chosen: Mask) -> _Work[int]:
        """From `begin` on, evaluate the tokens that are not kept and correct the others, slice by slice, so
        that the next tokens attend to corrected rows. The last slice of a passage is evaluated with the first
        one of the next. Return the end of the last passage.
        """
        kv, tokens = self._llm.kv, self._tokens
        layers, due = RepairedLayers.of(kv), list[tuple[Drift, Segment, int, int]]()
        for i, segment in enumerate(self.segments):
            drift = self._drift(layers, segment, chosen)
            for low, high in slices(len(segment)):
                due.append((drift, segment, low, high))
                n = sum(p1 - p0 for *_, p0, p1 in due)
                if high == len(segment) and i + 1 < len(self.segments) and n < _TOGETHER:
                    continue
                yield from self._replace(begin, segment.begin + high)
                begin = segment.begin + high
                for one, where, p0, p1 in due:
                    one.correct(tokens[where.begin : where.end], p0, p1)
                    yield
                due.clear()
        return begin

    def _replace(self, begin: int, end: int) -> _Work[None]:
        """Evaluate the tokens of [begin, end) that are not kept."""
        for p0, p1 in _runs(self._reused[begin:end] & ~self.kept[begin:end]):
            self._llm.kv.remove(self._seq, begin + p0, begin + p1)
        yield from self._evaluate(np.flatnonzero(~self.kept[begin:end]) + begin)

    def _choose(self, deviation: Floats | None) -> _Work[Mask]:
        n, method = len(self._tokens), self.method
        if method.repair == "none":
            return np.zeros(n, np.bool_)
        if method.repair == "query":
            looks = yield from self._attention()
            looks /= max(float(looks[self._reused].mean()), 1e-9)
            scores = benefit(looks, self.segments, method.overlap)
            return spread(scores, looks, self._reused, self._share)
        last = method.overlap if method.repair == "seam" else 0
        chosen = at_seams(self.segments, n, first=method.overlap, last=last)
        if deviation is not None:
            deviation[self._reused] -= self._values()
            chosen |= most(np.square(deviation).sum(axis=1), self._reused & ~chosen, self._share)
        return chosen

    def _attention(self) -> _Work[Floats]:
        """Return how much the question and the answer look at each token, float32 [n]: from the question's
        prefill over the rows as they came, and a few tokens after it. The question alone does not find what
        the answer repeats.
        """
        n, llm = len(self._tokens), self._llm
        begin = max(self.segments[-1].end, n - _QUESTION)
        mass = yield from self._evaluate(np.arange(begin, n), watch=n, logits=True)
        drafted, last, looks = 0, int(self._tokens[-1]), np.zeros(n, np.float32)
        pairs = {
            pair for each in self.segments for pair in pairwise(self._tokens[each.begin : each.end].tolist())
        }
        paid = max(2, n // _PER_DRAFTED)
        while drafted < min(_DRAFT, llm.n_ctx() - n):
            token = int(last_logits(llm).argmax())
            repeats = (last, token) in pairs
            if llama_cpp.llama_vocab_is_eog(_llama_cpp.vocab(llm), token) or not (drafted < paid or repeats):
                break
            yield
            looks += llm.kv.fill([token], [n + drafted], self._seq, logits=True, watch=n)
            drafted, last = drafted + 1, token
            self._work += 1
        llm.kv.remove(self._seq, begin)
        mass = mass / np.float32(n - begin) + looks / np.float32(max(1, drafted))  # each counts as much
        return np.convolve(mass, _NEAR[::-1])[len(_NEAR) - 2 :][:n].astype(np.float32)

    def _deviation(self) -> _Work[Floats]:
        """Return V of the second layer as the whole prompt gives it, float32 [n, width]; 0 outside the
        segments.
        """
        n = len(self._tokens)
        yield from self._evaluate(np.arange(self.n_exact, n), last_layer=self._layer())
        values = np.zeros((n, self._values_at(self.n_exact).shape[1]), np.float32)
        values[self.n_exact :] = self._values_at(self.n_exact)
        values[~self._reused] = 0
        self._llm.kv.remove(self._seq, self.n_exact)
        return values

    def _values(self) -> npt.NDArray[np.float32]:
        """Return V of the rows that were loaded, float32 [n of the segments, width]."""
        return np.concatenate([self._values_at(each.begin, each.end) for each in self.segments])

    def _values_at(self, p0: int, p1: int = -1) -> npt.NDArray[np.float32]:
        rows = self._llm.kv.layer(self._layer()).v(self._seq, p0, p1, basis="model")
        return rows.reshape(len(rows), -1)

    def _layer(self) -> int:
        layers = self._llm.kv.stats(by_layer=True).layers or ()
        return layers[min(1, len(layers) - 1)].il

    def _evaluate(
        self,
        positions: npt.NDArray[np.int64],
        *,
        last_layer: int | None = None,
        watch: int = 0,
        logits: bool = False,
    ) -> _Work[Floats]:
        """Evaluate the prompt's tokens at these positions, a batch at a time; return their attention, float32
        [watch].
        """
        layers = self._llm.kv.stats().n_layer
        part = 1.0 if last_layer is None else min(1.0, (last_layer + 1) / max(1, layers))
        mass, done = np.zeros(watch, np.float32), 0
        while done < len(positions):
            some = positions[done : done + self._size]
            if len(some):
                mass += self._llm.kv.fill(
                    self._tokens[some], some, self._seq, last_layer=last_layer, watch=watch, logits=logits
                )
            done += len(some)
            self._work += part * len(some)
            self.n_left = max(1, self.n_left - len(some), len(positions) - done)
            if done < len(positions) or not logits:  # the last logits are read before others evaluate
                yield
        return mass


def behind(rows: Rows, n: int) -> Rows:
    """Return the parts of segments after the first `n` tokens."""
    return [_behind(segment, blocks, n) for segment, blocks in rows if segment.end > n]


def _behind(segment: Segment, blocks: list[KVBlock], n: int) -> tuple[Segment, list[KVBlock]]:
    lost = n - segment.begin
    if lost <= 0:
        return segment, blocks
    at = segment.at + lost
    cut = replace(segment, at=at, begin=n, common_left=segment.common_left + lost)
    return cut, [block.slice(max(at, block.p0), block.p1) for block in blocks if block.p1 > at]


def _runs(mask: Mask) -> list[tuple[int, int]]:
    """Return [begin, end) of each part that is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
