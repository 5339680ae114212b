"""Correct the rows that stay a donor's by what evaluation changed in the chosen rows of their passage.

What another context does to a passage is much the same for neighbours, most of all in K of deep layers.
Attention
adds up what neighbours share and averages out the rest. So the shared part is what divergence is made of, and
a few evaluated rows show it: the change is estimated everywhere from where it is known (kriging, Gaussian
process
regression over positions).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mixedkv.kv.cache import KVCache
from mixedkv.kv.rows import LayerRows
from mixedkv.tokens import Tokens


class DamagedRowsError(ValueError):
    """Rows are not those of these tokens at these positions."""


Rows: TypeAlias = npt.NDArray[np.float32]  # [n, n_head_kv, head size]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.int64]

_REACHES = (8.0, 64.0, 512.0)  # tokens over which a change fades to a third, an equal part of it each
_CONTENT = 1.0  # what rows of the same content share beside, wherever they are
_NOISE = 1.0  # what a row changes of its own, in the same unit: as much as it shares
_SINKS = 8  # tokens at the beginning of a passage, which change in a way of their own
_NOISE_OF_SINK = 5.0
_FAR = 1024  # tokens before a piece whose changes count for it
# In the first layer a row depends on token and position alone. Q4_0 keys, turned, are off by .11 in the
# median; turned to the next position by .22, and rows of other tokens by .8 in K and 1.2 in V. Context
# changes
# rows of other layers by their own size and more.
_FIRST_K, _FIRST_V, _OTHER = 0.16, 0.6, 3.0
_LEAST = 8  # evaluated rows that say something of a passage


def pieces(n: int) -> list[tuple[int, int]]:
    """Parts [low, high) of a passage of n tokens that are evaluated and corrected one after the other.
    They grow
    with the distance from the beginning, as changes fade, up to the rows that may be in memory as F32 at a
    time.
    """
    edges, size = [0], 16
    while edges[-1] + size + size // 2 < n:
        edges.append(edges[-1] + size)
        size = min(2 * size, 512)
    edges.append(n)
    return list(pairwise(edges))


class Drift:
    """One passage in a sequence. Made while all its rows are still the donor's, turned to their new place.

    Args:
        kv: the cache.
        seq: the sequence.
        begin, end: where the passage is.
        chosen: which of its tokens are to be evaluated, bool [end - begin].
    """

    def __init__(self, kv: KVCache, seq: int, begin: int, end: int, chosen: Mask) -> None:
        self._kv, self._seq, self._begin, self._end, self._chosen = kv, seq, begin, end, chosen
        self._at = np.flatnonzero(chosen)
        self._before = {layer.il: self._read(layer.il, begin, end, chosen) for layer in kv.layers}
        self._change = {il: [np.zeros_like(rows) for rows in old] for il, old in self._before.items()}
        self._off: dict[tuple[int, str], list[float]] = {}

    def correct(self, tokens: Tokens, low: int, high: int) -> None:
        """Add to each row of [low, high) of the passage that was not chosen what the chosen rows up to `high`
        say. Pieces come in order, each evaluated just before.

        Args:
            tokens: of the passage.
            low, high: the piece.

        Raises:
            LookupError: a row of the passage is missing.
            DamagedRowsError: what was evaluated says that the donor's rows are not of these tokens, or not of
                these positions.
        """
        self._note(low, high)
        if problem := self._problem(high):
            raise DamagedRowsError(problem)
        near = (self._at < high) & (self._at >= low - _FAR)
        stay = np.flatnonzero(~self._chosen[low:high]) + low
        if not near.any() or not len(stay):
            return
        p0, p1 = self._begin + low, self._begin + high
        block = self._kv.export(self._seq, p0, p1, tokens[low:high])
        groups = tuple(
            replace(group, layers=tuple(self._moved(layer, low, high, stay, near) for layer in group.layers))
            for group in block.without_hot().groups
        )
        self._kv.replace(replace(block, groups=groups, checkpoints=()), self._seq)

    def _moved(self, layer: LayerRows, low: int, high: int, stay: Places, near: Mask) -> LayerRows:
        """Return a layer of the piece [low, high) with the rows `stay` moved by the changes `near`."""
        rows = self._read(layer.il, self._begin + low, self._begin + high)
        of, at = [each[stay - low] for each in rows], [each[near] for each in self._before[layer.il]]
        weights = _weights(stay, self._at[near], of, at)
        for which, change in zip(rows, self._change[layer.il], strict=True):
            which[stay - low] += np.tensordot(weights, change[near], axes=1)
        return _with_rows(layer, rows)

    def _note(self, low: int, high: int) -> None:
        """Keep what changed in the chosen rows of a piece, and by how much of their size."""
        part = slice(*np.searchsorted(self._at, (low, high)).tolist())
        mask = self._chosen[low:high]
        for il, old in self._before.items():
            new = self._read(il, self._begin + low, self._begin + high, mask)
            for which, change, was, now in zip("KV", self._change[il], old, new, strict=False):
                change[part] = now - was[part]
                size = np.maximum(np.sqrt(np.square(now).sum(axis=(1, 2))), 1e-9)
                off = np.sqrt(np.square(change[part]).sum(axis=(1, 2))) / size
                self._off.setdefault((il, which), []).extend(off.tolist())

    def _problem(self, high: int) -> str:
        """Return what is wrong with the donor's rows, "" if nothing is."""
        first = min(self._before)
        for (il, which), off in self._off.items():
            bound = _OTHER if il != first else _FIRST_K if which == "K" else _FIRST_V
            if len(off) >= _LEAST and not np.median(off) <= bound:  # nor is what is not finite
                return (
                    f"{which} of the passage at [{self._begin}, {self._end}) in layer {il} is off by "
                    f"{np.median(off):.2g} of its size where it was evaluated, and sound rows are by "
                    f"{bound:g} at most: the rows are damaged, another text's, or of other positions"
                )
        return ""

    def _read(self, il: int, p0: int, p1: int, mask: Mask | None = None) -> list[Rows]:
        """K, and V where the layer has any, as the model computes them."""
        view = self._kv.layer(il)
        rows = [view.k(self._seq, p0, p1, basis="model")]
        if view.info.head_size_v:
            rows.append(view.v(self._seq, p0, p1, basis="model"))
        return rows if mask is None else [each[mask] for each in rows]


def _weights(of: Places, at: Places, rows_of: list[Rows], rows_at: list[Rows]) -> npt.NDArray[np.float32]:
    """Return what the change of each row `at` counts for the rows `of`, float32 [n of, n at].

    Args:
        of, at: positions in the passage.
        rows_of, rows_at: the donor's K and V there, which say what is alike.
    """
    noise = np.diag(np.where(at < _SINKS, _NOISE_OF_SINK, 1.0) * _NOISE)
    content = [_content(*each) for each in zip(rows_of, rows_at, strict=True)]
    to_of, to_at = (np.mean(each, axis=0) for each in zip(*content, strict=True))
    found = np.linalg.solve(_alike(at, at, to_at) + noise, _alike(at, of, to_of))
    weights: npt.NDArray[np.float32] = found.T.astype(np.float32)
    return weights


def _alike(a: Places, b: Places, cosines: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return how much changes at two positions have in common, [n of a, n of b]: where they are near each
    other, and where their rows are alike.
    """
    apart = np.abs(a[:, None] - b[None])
    near: npt.NDArray[np.float64] = np.mean([np.exp(-apart / reach) for reach in _REACHES], axis=0)
    alike: npt.NDArray[np.float64] = _CONTENT * np.maximum(cosines, 0) * np.exp(-apart / max(_REACHES))
    return np.add(near, alike)


def _content(of: Rows, at: Rows) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the cosines of the rows `at` with the rows `of` and with each other, less what all share."""
    middle = at.mean(axis=0)
    far = [(rows - middle).reshape(len(rows), -1) for rows in (of, at)]
    of, at = (each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-9) for each in far)
    return at @ of.T, at @ at.T


def _with_rows(layer: LayerRows, rows: list[Rows]) -> LayerRows:
    """The layer with these rows in F32, of which the cache then makes its own."""
    k, *v = (np.ascontiguousarray(each, np.float32).reshape(len(each), -1).view(np.uint8) for each in rows)
    layer = replace(layer, type_k="f32", rotation_k=0, equalization=0, k=k)
    return replace(layer, type_v="f32", rotation_v=0, v=v[0]) if v else layer
