"""Reused rows beside those they should be: which of them are damaged.

Rows in another context are other rows, so what full evaluation gives does not tell damage from context. They
are compared with those that evaluating their donor again gives, moved to the same place: these have the same
context and differ by rounding. In the first layer rows depend on the token and its position alone, so there
they are compared with those of full evaluation too, which shows a wrong turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.plan import Segment
from mixedkv.config.row_types import type_bits
from mixedkv.kv.evaluate_again import Rows
from mixedkv.llama import Llama

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]

# Relative errors; docs/chunks.md has what sound and damaged rows of a real model have.
_FIRST_LAYER = 0.2  # of a row, from full evaluation: rows of Q4_0, turned, have 0.11
_ROW = 0.25  # of a row, from its donor evaluated again
_COARSE = 2.0  # times as much for types of fewer than four bits


@dataclass(frozen=True, slots=True)
class RowErrors:
    """How far reused rows are off, as a share of their size.

    Args:
        from_full: from full evaluation, in the first layer, [n] for K and V.
        from_donor: from their donors evaluated again, [n] by layer and tensor.
        coarse: a layer keeps fewer than four bits of an element.
    """

    from_full: Rows
    from_donor: Rows
    coarse: bool

    @property
    def worst_first(self) -> float:
        """The largest error in the first layer."""
        return max((float(errors.max()) for errors in self.from_full.values() if len(errors)), default=0.0)

    @property
    def damaged(self) -> Mask:
        """Which of the rows are damaged, bool [n]."""
        wrong = [errors > bound for _, errors, bound in self._all()]
        mask: Mask = np.any(wrong, axis=0) if wrong else np.zeros(0, np.bool_)
        return mask

    def problem(self, positions: npt.NDArray[np.int64]) -> str:
        """Return what is wrong with the first tensor that has a damaged row, "" if none has."""
        for (il, which), errors, bound in self._all():
            if len(errors) and errors.max() > bound:
                return (
                    f"{which} of position {positions[int(errors.argmax())]} in layer {il} is off by "
                    f"{errors.max():.2g} of its size: it is damaged, was turned to another position, or is "
                    f"another token's"
                )
        return ""

    def _all(self) -> list[tuple[tuple[int, str], Floats, float]]:
        factor = _COARSE if self.coarse else 1.0
        first = [(name, errors, factor * _FIRST_LAYER) for name, errors in self.from_full.items()]
        return first + [(name, errors, factor * _ROW) for name, errors in self.from_donor.items()]


def row_errors(llm: Llama, found: Rows, full: Rows, again: Rows, at: npt.NDArray[np.int64]) -> RowErrors:
    """Compare the rows at some positions.

    Args:
        found, full, again: rows of all positions: as reuse left them, as full evaluation gives them, and as
            their donors evaluated again do.
        at: the positions of reused rows.
    """
    kinds = [kind for layer in llm.kv.layers for kind in (layer.type_k, layer.type_v)]
    first = min(il for il, _ in full)
    return RowErrors(
        {name: _off(found[name][at], rows[at]) for name, rows in full.items() if name[0] == first},
        {name: _off(found[name][at], rows[at]) for name, rows in again.items()},
        any(type_bits(kind) < 4 for kind in kinds),
    )


def all_rows(llm: Llama) -> Rows:
    """Return the rows of sequence 0 as attention reads them, by layer and tensor, [n, width]."""
    found: Rows = {}
    for layer in llm.kv.layers:
        view = llm.kv.layer(layer.il)
        found[layer.il, "K"] = _flat(view.k())
        if layer.head_size_v:
            found[layer.il, "V"] = _flat(view.v())
    return found


def evaluate_donors(llm: Llama, segments: Sequence[Segment], n: int) -> Rows:
    """Evaluate the donors of some passages again, each from its first token on, and move their rows to where
    the passages stand in a prompt of `n` tokens. Other rows are 0. Sequence 0 is empty afterwards.
    """
    kv, moved = llm.kv, []
    ends: dict[str, int] = {}
    for segment in segments:
        entry, end = segment.source.entry, segment.at + len(segment)
        ends[entry] = max(end, ends.get(entry, 0))
    for entry, end in ends.items():
        mine = [segment for segment in segments if segment.source.entry == entry]
        kv.remove(0)
        llm.eval(mine[0].source.tokens[:end].tolist())
        moved += [(each, kv.export(0, each.at, each.at + len(each)).without_hot()) for each in mine]
    kv.remove(0)
    for segment, block in moved:
        kv.load(block, 0, segment.begin)
    rows = all_rows(llm)
    kv.remove(0)
    at = np.concatenate([np.arange(each.begin, each.end) for each in sorted(segments, key=lambda s: s.begin)])
    return {name: _spread(part, at, n) for name, part in rows.items() if len(part) == len(at)}


def _spread(rows: Floats, at: npt.NDArray[np.int64], n: int) -> Floats:
    whole = np.zeros((n, rows.shape[1]), np.float32)
    whole[at] = rows
    return whole


def _flat(rows: Floats) -> Floats:
    flat: Floats = rows.reshape(len(rows), -1)
    return flat


def _off(rows: Floats, wanted: Floats) -> Floats:
    """[n]; what is not a number is infinitely far off."""
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.linalg.norm(wanted.astype(np.float64), axis=1)
        off = np.linalg.norm(rows.astype(np.float64) - wanted, axis=1)
    errors: Floats = np.nan_to_num(off / np.maximum(size, 1e-9), nan=np.inf).astype(np.float32)
    return errors
