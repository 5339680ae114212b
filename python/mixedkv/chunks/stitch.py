"""A prompt's rows put together in sequence 0 of a `Llama`: from donors, and from evaluation where that is
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.plan import Segment, covered
from mixedkv.chunks.repair import Mask, Method, at_seams, most
from mixedkv.kv.block import KVBlock
from mixedkv.llama import Llama
from mixedkv.tokens import Tokens

Rows = Sequence[tuple[Segment, list[KVBlock]]]  # cold rows of each segment, where they stood in their donor

_QUESTION = 64  # tokens at the end of the prompt at most that choose the others


class Stitch:
    """One prompt. The cache holds its first `n_exact` tokens, and nothing else.

    Args:
        llm: the cache is its.
        tokens: the prompt.
        rows: its segments and what their donors have.
        n_exact: tokens before the first segment.
        method: which of the segments' tokens are evaluated.
    """

    def __init__(self, llm: Llama, tokens: Tokens, rows: Rows, n_exact: int, method: Method) -> None:
        self._llm, self._tokens, self._rows, self._method = llm, tokens, rows, method
        self._n_exact = n_exact
        self._segments = [segment for segment, _ in rows]
        self._reused = covered(self._segments, len(tokens))
        self.n_evaluated = 0

    def run(self) -> Mask:
        """Fill the cache, with the logits of the last token; which rows are a donor's, bool [n]."""
        wanted = self._deviation() if self._method.repair == "cacheblend" else None
        for segment, blocks in self._rows:
            for block in blocks:
                self._llm.kv.load(block, at=block.p0 - segment.at + segment.begin)
        chosen = self._choose(wanted)
        for begin, end in _runs(chosen):
            self._llm.kv.remove(0, begin, end)
        kept = self._reused & ~chosen
        self._evaluate(np.flatnonzero(~kept[self._n_exact :]) + self._n_exact, logits=True)
        return kept

    def _choose(self, deviation: npt.NDArray[np.float32] | None) -> Mask:
        n, method = len(self._tokens), self._method
        if method.repair == "none":
            return np.zeros(n, np.bool_)
        last = method.overlap if method.repair == "seam" else 0
        chosen = at_seams(self._segments, n, first=method.overlap, last=last)
        if method.repair == "query":
            chosen |= most(self._attention(), self._reused & ~chosen, method.share)
        elif deviation is not None:
            deviation[self._reused] -= self._values()
            chosen |= most(np.square(deviation).sum(axis=1), self._reused & ~chosen, method.share)
        return chosen

    def _attention(self) -> npt.NDArray[np.float32]:
        """What the question looks at, float32 [n]: from its own prefill over the rows as they came."""
        n = len(self._tokens)
        begin = max(self._segments[-1].end, n - _QUESTION)
        mass = self._fill(np.arange(begin, n), watch=n)
        self._llm.kv.remove(0, begin)
        return mass

    def _deviation(self) -> npt.NDArray[np.float32]:
        """V of the second layer as the whole prompt gives it, float32 [n, width]; 0 outside the segments."""
        n = len(self._tokens)
        self._evaluate(np.arange(self._n_exact, n), last_layer=self._layer())
        values = np.zeros((n, self._values_at(self._n_exact).shape[1]), np.float32)
        values[self._n_exact :] = self._values_at(self._n_exact)
        values[~self._reused] = 0
        self._llm.kv.remove(0, self._n_exact)
        return values

    def _values(self) -> npt.NDArray[np.float32]:
        """The same of the rows that were loaded, float32 [n of the segments, width]."""
        return np.concatenate([self._values_at(each.begin, each.end) for each in self._segments])

    def _values_at(self, p0: int, p1: int = -1) -> npt.NDArray[np.float32]:
        rows = self._llm.kv.layer(self._layer()).v(0, p0, p1, basis="model")
        return rows.reshape(len(rows), -1)

    def _layer(self) -> int:
        layers = self._llm.kv.stats(by_layer=True).layers or ()
        return layers[min(1, len(layers) - 1)].il

    def _evaluate(
        self, positions: npt.NDArray[np.int64], *, logits: bool = False, last_layer: int | None = None
    ) -> None:
        """Evaluate the prompt's tokens at these positions, in batches."""
        size = self._llm.n_batch
        for begin in range(0, len(positions), size):
            some = positions[begin : begin + size]
            self._fill(some, logits=logits and begin + size >= len(positions), last_layer=last_layer)

    def _fill(
        self,
        positions: npt.NDArray[np.int64],
        *,
        logits: bool = False,
        last_layer: int | None = None,
        watch: int = 0,
    ) -> npt.NDArray[np.float32]:
        part = 1.0
        if last_layer is not None:
            layers = self._llm.kv.stats().n_layer
            part = min(1.0, (last_layer + 1) / max(1, layers))
        self.n_evaluated += round(part * len(positions))
        return self._llm.kv.fill(
            self._tokens[positions], positions, logits=logits, last_layer=last_layer, watch=watch
        )


def _runs(mask: Mask) -> list[tuple[int, int]]:
    """[begin, end) of the parts that are True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
