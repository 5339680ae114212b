"""Corrects a donor's rows by the changes that evaluation made in chosen rows of their passage.

Another context changes the rows of neighbours in much the same way, most of all K in deep layers. Attention
adds up what neighbours share and averages out the rest, so divergence comes from the shared part. A few
evaluated rows show that part, from which the change of all others is estimated (kriging: Gaussian process
regression over positions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from mixedkv.kv.cache import KVCache
from mixedkv.kv.layer_view import LayerView
from mixedkv.kv.rows import LayerRows
from mixedkv.tokens import Tokens


class DamagedRowsError(ValueError):
    """The rows are not those of these tokens at these positions."""


Rows: TypeAlias = npt.NDArray[np.float32]  # [n, width]
Mask: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.int64]

_REACHES = (8.0, 64.0, 512.0)  # distances in tokens over which equal parts of a change fade to a third
_CONTENT = 1.0  # share of a change that rows of equal content have in common, wherever they are
_NOISE = 1.0  # change of a row of its own, in the same unit: as much as it shares
_SINKS = 8  # tokens at the beginning of a passage, which change differently
_NOISE_OF_SINK = 5.0
_FAR = 1024  # tokens before a slice whose changes are used for it
# In the first layer a row depends on token and position alone. Q4_0 keys, turned, are off by 0.11 in the
# median; turned to the next position by 0.22, and rows of other tokens by 0.8 in K and 1.2 in V. Context
# changes rows of other layers by their own size and more. Of those that are not corrected the first tokens of
# a passage are looked at.
_FIRST_K, _FIRST_V, _OTHER = 0.16, 0.6, 3.0
_FIRST_SLICE, _GROWTH, _LOOKED_AT = 256, 4, 32
_KEPT_AS_THEY_ARE = 1 / 2  # of the layers, the first ones: their rows carry little of the error
_TURNS = 4  # passages that look at all layers together, where none is corrected
_LEAST = 8  # fewest evaluated rows that allow a conclusion about a passage


def slices(n: int) -> list[tuple[int, int]]:
    """Return the parts [low, high) of a passage of n tokens, which are evaluated and corrected one after the
    other. They grow with the distance from the beginning, as changes fade, up to the number of F32 rows that
    may be in memory.
    """
    edges, size = [0], _FIRST_SLICE
    while edges[-1] + size + size // 2 < n:
        edges.append(edges[-1] + size)
        size = min(_GROWTH * size, 512)
    edges.append(n)
    return list(pairwise(edges))


@dataclass(frozen=True, slots=True)
class RepairedLayers:
    """The layers of a cache: `corrected` are those whose rows are corrected, and the first one; of the others
    the beginning of a passage is looked at for damage.
    """

    corrected: Sequence[LayerView]
    others: Sequence[LayerView]

    @classmethod
    def of(cls, kv: KVCache) -> RepairedLayers:
        views = kv.layer_views()
        kept = max(1, int(_KEPT_AS_THEY_ARE * len(views)))
        return cls((views[0], *views[kept:]), views[1:kept])

    def to_look_at(self, i: int) -> RepairedLayers:
        """Return those to look at where none is corrected, in passage number `i`. Passages take turns: a look
        at all layers in each costs a tenth of a cold prompt.
        """
        first, *rest = self.corrected
        return RepairedLayers([first], [*self.others, *rest][i % _TURNS :: _TURNS])


class Drift:
    """Corrects one passage in a sequence, or only looks for damage. Made while all rows are still the
    donor's, shifted to their new place.

    Args:
        kv: the cache.
        layers: of the cache.
        seq: the sequence.
        begin, end: positions of the passage.
        chosen: which of its tokens will be evaluated, bool [end - begin].
    """

    def __init__(
        self, kv: KVCache, layers: RepairedLayers, seq: int, begin: int, end: int, chosen: Mask
    ) -> None:
        self._kv, self._seq, self._begin, self._chosen = kv, seq, begin, chosen
        self._at, self._n_noted = np.flatnonzero(chosen), 0
        looked = min(end, begin + _LOOKED_AT)
        with _blas().limit(limits=1):
            self._layers = {view.info.il: _Layer(view, seq, begin, end, chosen) for view in layers.corrected}
            self._others = {
                view.info.il: _Layer(view, seq, begin, looked, chosen[: looked - begin])
                for view in layers.others
            }

    def correct(self, tokens: Tokens, low: int, high: int) -> None:
        """Correct each row of [low, high) that was not chosen, by the changes of the chosen rows up to
        `high`. Call it for one slice after the other, each just after its evaluation.

        Args:
            tokens: of the passage.
            low, high: the slice.

        Raises:
            LookupError: a row of the passage is missing.
            DamagedRowsError: evaluation shows that the donor's rows are not of these tokens or positions.
        """
        p0, p1 = self._begin + low, self._begin + high
        part, mask = slice(*np.searchsorted(self._at, (low, high)).tolist()), self._chosen[low:high]
        rows = {il: layer.read(self._seq, p0, p1) for il, layer in self._layers.items()}
        for il, layer in self._layers.items():
            layer.note(part, rows[il][mask])
        for layer in self._others.values() if low == 0 else ():
            layer.look(self._seq)
        self._n_noted = part.stop
        self._check()
        near = (self._at < high) & (self._at >= low - _FAR)
        stay = np.flatnonzero(~mask)
        if not near.any() or not len(stay):
            return
        at = self._at[near]
        among, to_stay = _Places(at, at), _Places(at, stay + low)
        among.near += np.diag(np.where(at < _SINKS, _NOISE_OF_SINK, 1.0) * _NOISE)
        with _blas().limit(limits=1):
            for il, layer in self._layers.items():
                rows[il][stay] += layer.moves(rows[il][stay], near, among, to_stay)
        block = self._kv.export(self._seq, p0, p1, tokens[low:high])
        groups = tuple(
            replace(
                group,
                layers=tuple(
                    self._layers[each.il].put(each, rows[each.il]) if each.il in rows else each
                    for each in group.layers
                ),
            )
            for group in block.without_hot().groups
        )
        self._kv.replace(replace(block, groups=groups, checkpoints=()), self._seq)

    def look(self) -> None:
        """Look for damage only, once all chosen rows are evaluated.

        Raises:
            LookupError, DamagedRowsError: as `correct`.
        """
        for layer in (*self._layers.values(), *self._others.values()):
            layer.look(self._seq)
        self._n_noted = len(self._at)
        self._check()

    def _check(self) -> None:
        """Raise DamagedRowsError if rows changed more than another context can change them."""
        if self._n_noted < _LEAST:
            return
        first = min(self._layers)
        for il, layer in {**self._layers, **self._others}.items():
            off = layer.off[:, : self._n_noted]
            if off.shape[1] < _LEAST:
                continue
            for which, size in zip("KV", np.median(off, axis=1), strict=False):
                bound = _OTHER if il != first else _FIRST_K if which == "K" else _FIRST_V
                if not size <= bound:  # NaN and infinity are damage too
                    passage = f"[{self._begin}, {self._begin + len(self._chosen)})"
                    raise DamagedRowsError(
                        f"{which} of the passage at {passage} in layer {il} is off by {size:.2g} of its size "
                        f"where it was evaluated, and sound rows are by {bound:g} at most: the rows are "
                        f"damaged, another text's, or of other positions"
                    )


@cache
def _blas() -> ThreadpoolController:
    """Limit NumPy's products to one thread: they are so small that waiting for a second one would take
    longer.
    """
    return ThreadpoolController().select(user_api="blas")


class _Places:
    """The covariance of changes at places `a` and `b` of a passage, float64 [n of a, n of b].

    Attributes:
        near: the part that their distance alone gives.
        fade: what it leaves of the part for rows that are alike.
    """

    def __init__(self, a: Places, b: Places) -> None:
        apart = np.abs(a[:, None] - b[None])
        fades = [np.exp(-apart / reach) for reach in _REACHES]
        self.near: npt.NDArray[np.float64] = np.mean(fades, axis=0)
        self.fade = _CONTENT * fades[-1]

    def covariance(self, cosines: Rows) -> npt.NDArray[np.float64]:
        """Return the covariance, given the cosines of the rows."""
        both: npt.NDArray[np.float64] = self.near + self.fade * np.maximum(cosines, 0)
        return both


class _Layer:
    """The chosen rows of a passage, or of its beginning, in one layer: what they were in the donor, and what
    evaluation changed.

    A row is K and behind it V, where the layer has any, as the model computes them.

    Attributes:
        off: changes by the size of the evaluated row, of K and of V, float32 [1 or 2, n chosen].
    """

    def __init__(self, view: LayerView, seq: int, begin: int, end: int, chosen: Mask) -> None:
        self._view, self._width_k = view, view.info.n_head_kv * view.info.head_size_k
        self._begin, self._chosen = begin, chosen
        self._before = self.read(seq, begin, end)[chosen]
        self._change = np.zeros_like(self._before)
        self.off: Rows = np.zeros((2 if view.info.head_size_v else 1, len(self._before)), np.float32)

    @cached_property
    def _middle(self) -> Rows:
        mean: Rows = self._before.sum(axis=0, keepdims=True) / np.float32(max(1, len(self._before)))
        return mean

    @cached_property
    def _units(self) -> Rows:
        return self._unit(self._before)

    @cached_property
    def _alike(self) -> Rows:
        return self._units @ self._units.T

    def read(self, seq: int, p0: int, p1: int) -> Rows:
        """Return the rows at [p0, p1) of a sequence."""
        reads = [self._view.k, self._view.v][: 2 if self._view.info.head_size_v else 1]
        rows = [read(seq, p0, p1, basis="model") for read in reads]
        return np.concatenate([each.reshape(len(each), -1) for each in rows], axis=1)

    def look(self, seq: int) -> None:
        """Record the changes of all chosen rows."""
        rows = self.read(seq, self._begin, self._begin + len(self._chosen))
        self.note(slice(None), rows[self._chosen])

    def note(self, part: slice, rows: Rows) -> None:
        """Record the changes of those chosen rows that have just been evaluated."""
        self._change[part] = rows - self._before[part]
        for off, change, now in zip(
            self.off, self._split(self._change[part]), self._split(rows), strict=True
        ):
            size = np.maximum(np.linalg.norm(now, axis=1), 1e-9)
            off[part] = np.linalg.norm(change, axis=1) / size

    def moves(self, rows: Rows, near: Mask, among: _Places, to_rows: _Places) -> Rows:
        """Return the estimated changes of rows, given the changes of the chosen rows that are `near`.

        Args:
            rows: the donor's.
            near: bool [n chosen].
            among: places of these chosen ones, and of them, with what each changes of its own.
            to_rows: places of these chosen ones, and of the rows.
        """
        known = among.covariance(self._alike[np.ix_(near, near)])
        to_known = to_rows.covariance(self._units[near] @ self._unit(rows).T)
        weights = np.linalg.solve(known, to_known).T.astype(np.float32)
        moved: Rows = weights @ self._change[near]
        return moved

    def put(self, layer: LayerRows, rows: Rows) -> LayerRows:
        """Write rows in F32 into the layer; the cache converts them to its types."""
        return _with_rows(layer, self._split(rows))

    def _split(self, rows: Rows) -> list[Rows]:
        """Return K, and V where there is any."""
        parts = np.split(rows, [self._width_k], axis=1)
        return parts if parts[1].shape[1] else parts[:1]

    def _unit(self, rows: Rows) -> Rows:
        """Scale rows, less what all of them share, so that their products are cosines: the mean of K's and
        V's.
        """
        parts = self._split(rows - self._middle)
        sizes = [np.linalg.norm(each, axis=1, keepdims=True) * np.sqrt(len(parts)) for each in parts]
        units = [each / np.maximum(size, 1e-9) for each, size in zip(parts, sizes, strict=True)]
        return np.concatenate(units, axis=1, dtype=np.float32)


def _with_rows(layer: LayerRows, rows: Sequence[Rows]) -> LayerRows:
    """Return the layer with these rows in F32: K, and V where there is any."""
    k, *v = (np.ascontiguousarray(each, np.float32).reshape(len(each), -1).view(np.uint8) for each in rows)
    layer = replace(layer, type_k="f32", rotation_k=0, equalization=0, k=k)
    return replace(layer, type_v="f32", rotation_v=0, v=v[0]) if v else layer
