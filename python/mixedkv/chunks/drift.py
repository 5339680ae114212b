"""Correct the rows that stay a donor's by what evaluation changed in the chosen rows near them.

What another context does to a passage is much the same for neighbours: over 16 tokens half of it in K of deep
layers. Attention adds up what neighbours share and averages out the rest. So the shared part is what
divergence is made of, and a few evaluated rows show it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mixedkv.kv.cache import KVCache
from mixedkv.kv.rows import LayerRows
from mixedkv.tokens import Tokens


class DamagedRowsError(ValueError):
    """Rows are not those of these tokens at these positions."""


Rows: TypeAlias = npt.NDArray[np.float32]  # [n, n_head_kv, head size]

_REACH = 16  # tokens over which a change fades to a third; K is turned, and further off turned too far
_DOUBT = 0.5  # rows that have not changed which count along with those that have
_SINKS = 8  # tokens at the beginning of a passage, which change in a way of their own
_OF_SINK = 0.2  # what the change of one counts
# In the first layer a row depends on token and position alone. Q4_0 keys, turned, are off by .11 in the
# median; turned to the next position by .22, and rows of other tokens by .8 in K and 1.2 in V. In other
# layers context changes a row by .25 in the median, other rows are off by 1.2.
_FIRST_K, _FIRST_V, _OTHER = 0.16, 0.6, 1.0
_LEAST = 8  # evaluated rows that say something of a passage
_PIECE = 512  # rows that are in memory as F32 at a time


class Drift:
    """One passage in a sequence. Made while all its rows are still the donor's, turned to their new place.

    Args:
        kv: the cache.
        seq: the sequence.
        begin, end: where the passage is.
        chosen: which of its tokens are to be evaluated, bool [end - begin].
    """

    def __init__(self, kv: KVCache, seq: int, begin: int, end: int, chosen: npt.NDArray[np.bool_]) -> None:
        self._kv, self._seq, self._begin, self._end = kv, seq, begin, end
        self._at = np.flatnonzero(chosen)
        layers = kv.stats(by_layer=True).layers or ()
        self._before = {layer.il: tuple(rows[self._at] for rows in self._read(layer.il)) for layer in layers}

    def correct(self, tokens: Tokens) -> None:
        """Add to each row that was not chosen what changed near it.

        Args:
            tokens: of the passage.

        Raises:
            LookupError: a row of the passage is missing.
            DamagedRowsError: what was evaluated says that the donor's rows are not of these tokens, or not of
                these positions.
        """
        if not len(self._at):
            return
        after = {il: [rows[self._at] for rows in self._read(il)] for il in self._before}
        if problem := self._problem(after):
            raise DamagedRowsError(problem)
        changes = {
            il: [new - old for new, old in zip(rows, self._before[il], strict=True)]
            for il, rows in after.items()
        }
        if len(self._at) == self._end - self._begin:
            return
        for low in range(self._begin, self._end, _PIECE):
            high = min(low + _PIECE, self._end)
            weights = self._weights(np.arange(low, high) - self._begin)
            block = self._kv.export(self._seq, low, high, tokens[low - self._begin : high - self._begin])
            groups = tuple(
                replace(
                    group,
                    layers=tuple(
                        _with_rows(
                            layer,
                            [
                                rows + np.tensordot(weights, change, axes=1)
                                for rows, change in zip(
                                    self._read(layer.il, low, high), changes[layer.il], strict=True
                                )
                            ],
                        )
                        for layer in group.layers
                    ),
                )
                for group in block.without_hot().groups
            )
            self._kv.replace(replace(block, groups=groups, checkpoints=()), self._seq)

    def _problem(self, after: dict[int, list[Rows]]) -> str:
        """What is wrong with the donor's rows, "" if nothing is."""
        first = min(after)
        for il, rows in after.items() if len(self._at) >= _LEAST else ():
            for which, new, old in zip("KV", rows, self._before[il], strict=False):
                size = np.sqrt(np.square(new).sum(axis=(1, 2)))
                off = np.sqrt(np.square(new - old).sum(axis=(1, 2))) / np.maximum(size, 1e-9)
                bound = _OTHER if il != first else _FIRST_K if which == "K" else _FIRST_V
                if not np.median(off) <= bound:  # nor is what is not finite
                    return (
                        f"{which} of the passage at [{self._begin}, {self._end}) in layer {il} is off by "
                        f"{np.median(off):.2g} of its size where it was evaluated, and sound rows are by "
                        f"{bound:g} at most: the rows are damaged, another text's, or of other positions"
                    )
        return ""

    def _weights(self, of: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """What each chosen row's change counts for these rows, float32 [n, n of chosen]."""
        weights = np.exp(-np.abs(of[:, None] - self._at) / _REACH) * np.where(self._at < _SINKS, _OF_SINK, 1)
        weights /= weights.sum(axis=1, keepdims=True) + _DOUBT
        weights[np.isin(of, self._at)] = 0
        found: npt.NDArray[np.float32] = weights.astype(np.float32)
        return found

    def _read(self, il: int, p0: int = -1, p1: int = -1) -> list[Rows]:
        """K, and V where the layer has any, as the model computes them."""
        begin, end = (self._begin, self._end) if p0 < 0 else (p0, p1)
        view = self._kv.layer(il)
        rows = [view.k(self._seq, begin, end, basis="model")]
        if view.info.head_size_v:
            rows.append(view.v(self._seq, begin, end, basis="model"))
        return rows


def _with_rows(layer: LayerRows, rows: list[Rows]) -> LayerRows:
    """The layer with these rows in F32, of which the cache then makes its own."""
    k, *v = (np.ascontiguousarray(each, np.float32).reshape(len(each), -1).view(np.uint8) for each in rows)
    layer = replace(layer, type_k="f32", rotation_k=0, equalization=0, k=k)
    return replace(layer, type_v="f32", rotation_v=0, v=v[0]) if v else layer
