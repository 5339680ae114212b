"""Compares rows of a sequence with the same rows evaluated again, to tell damage from rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mixedkv.config.mixed import type_bits
from mixedkv.kv.cache import KVCache

Span: TypeAlias = tuple[int, int]  # positions [begin, end)
Rows: TypeAlias = dict[tuple[int, str], npt.NDArray[np.float32]]  # by layer and "K" or "V", [n, width]

# Relative errors. Sound rows of SmolLM2, Q4_0 behind a window of Q4_0 in place of F16, have 0.2 at most as
# the median of four tokens in a tensor, and 0.23 as a token's median over layers. Rows of another token or
# position, noise, another rotary layout or RoPE base and zeroed heads have more in one (docs/benchmarks.md).
_TENSOR = 0.35
_TOKEN = 0.35
_COARSE = 2.0  # times as much for types of fewer than four bits, and where tokens choose experts
_FIRST_LAYER = 0.1  # rows there depend on the token and its position alone: the same bits were seen


@dataclass(frozen=True, slots=True)
class Again:
    """Rows before and after they were evaluated again, and how far apart they are.

    Args:
        before, after: the rows, [n, width] by layer and "K" or "V".
        moved: tokens whose rows are read in another type now, cold instead of F16 or the other way round,
            bool [n].
        coarse: a layer keeps fewer than four bits of an element.
        experts: tokens choose experts. Rounding may choose others for single tokens, whose rows in the layers
            above are then others altogether.
    """

    before: Rows
    after: Rows
    moved: npt.NDArray[np.bool_]
    coarse: bool
    experts: bool = False

    @property
    def errors(self) -> Rows:
        """Relative errors of the rows as they were, [n] by layer and tensor."""
        return relative_errors(self.before, self.after)

    def problems(self, spans: Sequence[Span]) -> list[str]:
        """Return for each span what is wrong with its rows; "" if nothing is.

        A span is wrong if a tensor's errors are large for its tokens, if a token's are in most layers, or if
        one in the first layer is.
        """
        factor = _COARSE if self.coarse or self.experts else 1.0
        errors, found, first = self.errors, [], 0
        for begin, end in spans:
            part = slice(first, first + end - begin)
            first = part.stop
            found.append(self._problem({name: rows[part] for name, rows in errors.items()}, part, factor))
        return found

    def _problem(self, errors: Rows, part: slice, factor: float) -> str:
        for (il, which), rows in errors.items():
            same = rows[~self.moved[part]]
            if il == 0 and len(same) and same.max() > _FIRST_LAYER:
                return f"{which} of layer 0 is off by {same.max():.2g} of its size"
            off = rows.min() if self.experts else np.median(rows)  # not all tokens choose others at once
            if off > factor * _TENSOR:
                return f"{which} of layer {il} is off by {off:.2g} of its size"
        for which in ("K", "V"):
            of_tokens = [rows for (_, name), rows in errors.items() if name == which]
            of_token = np.median(of_tokens, axis=0) if of_tokens else np.zeros(1)
            worst = of_token.min() if self.experts else of_token.max()
            if worst > factor * _TOKEN:
                return f"{which} of a token is off by {worst:.2g} of its size in most layers"
        return ""


def read_rows(kv: KVCache, seq: int, spans: Sequence[Span]) -> Rows:
    """Return the rows at some positions of a sequence, of every layer that has all of them."""
    n, found = sum(end - begin for begin, end in spans), Rows()
    for view in kv.layer_views():
        layer = view.info
        for which, read in (("K", view.k), ("V", view.v)) if layer.head_size_v else (("K", view.k),):
            parts = [read(seq, begin, end, basis="model") for begin, end in spans]
            rows = np.concatenate([part.reshape(len(part), -1) for part in parts])
            if len(rows) == n and rows.shape[1]:
                found[layer.il, which] = rows
    return found


def evaluate_again(kv: KVCache, seq: int, tokens: npt.NDArray[np.int32], spans: Sequence[Span]) -> Again:
    """Evaluate some positions of a sequence again, in one batch, behind the rows before them.

    The sequence keeps the new rows. In a mixed cache the tokens read F16 rows where those before them are
    still there, else cold ones.

    Args:
        kv: the cache.
        seq: the sequence.
        tokens: all of its tokens.
        spans: the positions, ascending; n_batch tokens at most.

    Raises:
        UnsupportedModelError: the model keeps a state of the whole sequence.
        LookupError: there is no room.
    """
    before, hot = read_rows(kv, seq, spans), _hot(kv, seq, spans)
    for begin, end in spans:
        kv.remove(seq, begin, end)
    at = np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in spans])
    kv.fill(tokens[at], at, seq)
    coarse = any(type_bits(kind) < 4 for layer in kv.layers for kind in (layer.type_k, layer.type_v))
    moved, experts = hot != _hot(kv, seq, spans), kv.has_experts
    return Again(before, read_rows(kv, seq, spans), moved, coarse, experts)


def relative_errors(rows: Rows, expected: Rows) -> Rows:
    """Return how far each row is from the expected one, relative to its size, [n] by layer and tensor.

    NaN counts as infinitely far.
    """
    errors = Rows()
    for name, want in expected.items():
        if name in rows:
            with np.errstate(invalid="ignore", over="ignore"):
                size = np.linalg.norm(want.astype(np.float64), axis=1)
                off = np.linalg.norm(rows[name].astype(np.float64) - want, axis=1)
            errors[name] = np.nan_to_num(off / np.maximum(size, 1e-9), nan=np.inf).astype(np.float32)
    return errors


def _hot(kv: KVCache, seq: int, spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Return which of the tokens are read in F16 in a layer that has them all, bool [n]."""
    n = sum(end - begin for begin, end in spans)
    for view in kv.layer_views():
        hot = np.concatenate([view.hot(seq, begin, end) for begin, end in spans])
        if len(hot) == n:
            return hot
    return np.zeros(n, np.bool_)
