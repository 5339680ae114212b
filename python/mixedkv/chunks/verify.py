"""Compares reuse with full evaluation, prompt by prompt, and finds damaged rows.

Rows in another context are other rows, so what full evaluation gives does not tell damage from context. They
are compared with those that evaluating their donor again gives, moved to the same place: these have the same
context. Evaluated in the same steps they are the same to the bit, otherwise they differ by rounding, in many
layers. In the first layer rows depend on the token and its position alone, so there they are compared with
those of full evaluation too, which shows a wrong turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.chunk_reuse import ChunkReuse, Repair
from mixedkv.chunks.donors import Segment
from mixedkv.chunks.gate import compare, follow
from mixedkv.chunks.repair import Method
from mixedkv.config.mixed import type_bits
from mixedkv.llama import Llama

Prompt = str | npt.ArrayLike
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Tensor: TypeAlias = tuple[int, str]  # a layer and "K" or "V"
Heads: TypeAlias = dict[Tensor, Floats]  # rows [n, heads, head size]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds for the errors of sound rows, per head; docs/benchmarks.md has measurements of sound and
    damaged rows.

    Args:
        turned: relative error from full evaluation in the first layer: rounding twice, since K is turned.
        off: relative error from the donor evaluated again in other steps.
        scaled: how much of the same block of 32 elements is added or lacks, in such a comparison. Rounding
            goes in all directions, so there is little of it along the row itself.
        element: error of an element, as a share of its block's largest. Rounding moves one by few steps.
        everywhere: the error that half of the elements have in the block where it is least. Rounding leaves
            many elements as they were.
    """

    turned: float
    off: float
    scaled: float
    element: float
    everywhere: float


_EIGHT = Bounds(0.05, 0.05, 0.03, 0.1, 0.02)
_FOUR = Bounds(0.3, 0.4, 0.15, 0.5, 0.032)
_COARSE = Bounds(0.6, 0.8, 0.4, 1.0, 0.1)
_BLOCK = 32
_ISOLATED = 8  # one layer in this many


def bounds_of(kind: str) -> Bounds:
    """Return the bounds of rows kept in a type."""
    bits = type_bits(kind)
    return _EIGHT if bits >= 8 else _FOUR if bits >= 4 else _COARSE


@dataclass(frozen=True, slots=True)
class RowErrors:
    """Errors of reused rows, as a share of the size of each head of them.

    Args:
        from_full: from full evaluation, in the first layer, [n, heads] for K and V.
        off: from their donors evaluated again, [n, heads] by tensor.
        in_blocks: what `Bounds` calls scaled, element and everywhere, [n, heads, 3] by tensor.
        kinds: the type of each tensor.
    """

    from_full: Heads
    off: Heads
    in_blocks: Heads
    kinds: dict[Tensor, str]

    @property
    def worst_first(self) -> float:
        """The largest error in the first layer."""
        return max((float(errors.max()) for errors in self.from_full.values() if len(errors)), default=0.0)

    @property
    def isolated(self) -> Mask:
        """Rows that differ in a few layers and not in all that are deeper, bool [n]. A difference by rounding
        goes on into every deeper layer, and may begin in the last one.
        """
        if not self.off:  # nothing was reused
            return np.zeros(0, np.bool_)
        layers = sorted({il for il, _ in self.off})
        differs = [
            np.any([errors.any(axis=1) for name, errors in self.off.items() if name[0] == il], axis=0)
            for il in layers
        ]
        n, first = np.sum(differs, axis=0), np.argmax(differs, axis=0)
        goes_on = n == len(layers) - first
        mask: Mask = (n > 0) & (n <= len(layers) // _ISOLATED) & ~goes_on
        return mask

    @property
    def damaged(self) -> Mask:
        """Flags of the rows that are damaged, bool [n]."""
        wrong = [(errors > bound).any(axis=1) for _, errors, bound in self._all()]
        mask: Mask = np.any([self.isolated, *wrong], axis=0)
        return mask

    def problem(self, positions: npt.NDArray[np.int64]) -> str:
        """Return what is wrong with the first tensor that has a damaged row, "" if none has."""
        for (il, which), errors, bound in self._all():
            if len(errors) and errors.max() > bound:
                row, head = np.unravel_index(int(errors.argmax()), errors.shape)
                return (
                    f"{which} of position {positions[row]} in layer {il}, head {head}, is off by "
                    f"{errors.max():.2g} of its size: it is damaged, was turned to another position, or is "
                    f"another token's"
                )
        for row in np.flatnonzero(self.isolated)[:1].tolist():
            worst, (il, which) = max((float(errors[row].max()), name) for name, errors in self.off.items())
            return (
                f"{which} of position {positions[row]} in layer {il} is off by {worst:.2g} of its size, and "
                f"other "
                f"layers are not: it is damaged"
            )
        return ""

    def _all(self) -> list[tuple[Tensor, Floats, float]]:
        bounds = {name: bounds_of(kind) for name, kind in self.kinds.items()}
        found = [(name, errors, bounds[name].turned) for name, errors in self.from_full.items()]
        found += [(name, errors, bounds[name].off) for name, errors in self.off.items()]
        for i, bound in enumerate(("scaled", "element", "everywhere")):
            found += [
                (name, each[..., i], getattr(bounds[name], bound)) for name, each in self.in_blocks.items()
            ]
        return found


def row_errors(llm: Llama, found: Heads, full: Heads, again: Heads, at: npt.NDArray[np.int64]) -> RowErrors:
    """Compare the reused rows at some positions.

    Args:
        found, full, again: rows of all positions: as reuse left them, as full evaluation gives them, and as
            their donors evaluated again do.
        at: the positions of reused rows.
    """
    first = min(il for il, _ in full)
    return RowErrors(
        {name: _off(found[name][at], rows[at]) for name, rows in full.items() if name[0] == first},
        {name: _off(found[name][at], rows[at]) for name, rows in again.items()},
        {name: _in_blocks(found[name][at], rows[at]) for name, rows in again.items()},
        {(each.il, "K"): each.type_k for each in llm.kv.layers}
        | {(each.il, "V"): each.type_v for each in llm.kv.layers},
    )


def all_rows(llm: Llama) -> Heads:
    """Return the rows of sequence 0 as attention reads them."""
    found = Heads()
    for view in llm.kv.layer_views():
        found[view.info.il, "K"] = view.k()
        if view.info.head_size_v:
            found[view.info.il, "V"] = view.v()
    return found


def evaluate_donors(llm: Llama, segments: Sequence[Segment], n: int) -> Heads:
    """Evaluate the donors of some passages again, each from its first token on, and move their rows to where
    the passages stand in a prompt of `n` tokens. Other rows are 0. Sequence 0 is empty afterwards.
    """
    kv, moved = llm.kv, []
    ends: dict[str, int] = {}
    for segment in segments:
        entry, end = segment.source.entry, segment.at + len(segment)
        end = -(-end // llm.n_batch) * llm.n_batch  # the same batch as when it was stored, for the same bits
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
    whole = np.zeros((n, *rows.shape[1:]), np.float32)
    whole[at] = rows
    return whole


def _off(rows: Floats, expected: Floats) -> Floats:
    """Return the error of each head as a share of its size, [n, heads]. A head that is nearly 0 counts as a
    hundredth of the row. What is not a number is infinitely far off.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        apart, energy = rows.astype(np.float64) - expected, np.square(expected, dtype=np.float64).sum(axis=2)
        energy = np.maximum(energy, np.maximum(1e-4 * energy.sum(axis=1, keepdims=True), 1e-18))
        return _finite(np.sqrt(np.square(apart).sum(axis=2) / energy))


def _in_blocks(rows: Floats, expected: Floats) -> Floats:
    """Return the error of each head along its blocks, of its worst element, and of the half of each block
    that is off least, [n, heads, 3]; the last is the least of all heads of a row. A block that is nearly 0
    counts as a tenth of the row.
    """
    n, heads, size = rows.shape
    shape = (n, heads, -1, _BLOCK if size % _BLOCK == 0 else size)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = expected.reshape(shape).astype(np.float64)
        apart = rows.reshape(shape).astype(np.float64) - wide
        least = np.maximum(0.01 * np.square(wide).mean(axis=(1, 2, 3), keepdims=True), 1e-18)[..., 0]
        energy = np.maximum(np.square(wide).mean(axis=3), least)
        along = np.abs((apart * wide).mean(axis=3) / energy).max(axis=2)
        worst = (np.abs(apart).max(axis=3) / np.maximum(np.abs(wide).max(axis=3), np.sqrt(least))).max(axis=2)
        half = (np.median(np.abs(apart), axis=3) / np.sqrt(energy)).min(axis=(1, 2), keepdims=True)[..., 0]
        return _finite(np.stack([along, worst, np.broadcast_to(half, along.shape)], axis=2))


def _finite(errors: npt.NDArray[np.float64]) -> Floats:
    found: Floats = np.nan_to_num(errors, nan=np.inf).astype(np.float32)
    return found


class Filled(Protocol):
    """The part of a `Generation` that says how its prompt was filled."""

    @property
    def chunks(self) -> ChunkReuse | None: ...

    @property
    def kv_reuse_ratio(self) -> float: ...


class FillsSequence(Protocol):
    """The part of a `PromptCache` that is verified."""

    @property
    def llm(self) -> Llama: ...

    def prefill(
        self, prompt: Prompt, *, reuse: Any = None, method: Any = None, tenant: str | None = None
    ) -> Filled: ...


_AS_STORED = Method(repair="none")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptCheck:
    """The result of comparing one prompt with reuse to a full evaluation.

    Args:
        reuse: the reuse of the prompt.
        kld: mean divergence over the tokens that follow, in nats.
        same_top1: share of these with the same likeliest token.
        first_diverging: index of the first of these with another likeliest token; None if all agree.
        worst_row: largest relative error of a head of a reused row in the first layer; 0 if none was reused.
        problem: what is wrong; "" if nothing is.
        damaged: positions whose rows are wrong.
    """

    reuse: Filled
    kld: float
    same_top1: float
    first_diverging: int | None
    worst_row: float
    problem: str
    damaged: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class CorrectnessReport(Sequence[PromptCheck]):
    """The checks of several prompts, in order, and their averages.

    Args:
        checks: one for each prompt.
    """

    checks: tuple[PromptCheck, ...]

    @overload
    def __getitem__(self, at: int) -> PromptCheck: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[PromptCheck, ...]: ...
    def __getitem__(self, at: int | slice) -> PromptCheck | tuple[PromptCheck, ...]:
        return self.checks[at]

    def __len__(self) -> int:
        return len(self.checks)

    @property
    def ok(self) -> bool:
        """True if no prompt has a problem."""
        return all(check.ok for check in self.checks)

    @property
    def kld(self) -> float:
        """Mean divergence over all prompts, in nats."""
        return float(np.mean([check.kld for check in self.checks])) if self.checks else 0.0

    @property
    def same_top1(self) -> float:
        """Share of all compared tokens with the same likeliest token."""
        return float(np.mean([check.same_top1 for check in self.checks])) if self.checks else 1.0

    @property
    def reuse_ratio(self) -> float:
        """Mean share of the prompts' tokens that was not evaluated."""
        return float(np.mean([check.reuse.kv_reuse_ratio for check in self.checks])) if self.checks else 0.0

    def __str__(self) -> str:
        lines = [
            f"prompt {i}: {check.problem or 'ok'}; {check.reuse.kv_reuse_ratio:.0%} reused, "
            f"KLD {check.kld:.2g}, {check.same_top1:.0%} of first choices the same"
            for i, check in enumerate(self.checks)
        ]
        return "\n".join(lines)


def verify_correctness(
    cache: FillsSequence,
    prompts: Sequence[Prompt],
    method: Method | Repair | None = None,
    *,
    n_gen: int = 8,
    max_kld: float | None = None,
    tenant: str = "",
) -> CorrectnessReport:
    """Evaluate each prompt fully and with reuse, and compare.

    Args:
        cache: the `PromptCache` to verify, with reuse="chunks" on a plain `Llama`.
        prompts: texts or token ids.
        method: how seams are repaired, a `Method` or the name of a repair; None is the cache's own.
        n_gen: number of tokens after each prompt to compare; they are those that full evaluation chooses.
        max_kld: mean divergence above which a prompt has a problem; None for no limit.
        tenant: whose KV is reused.

    Raises:
        ContextLengthError: a prompt with its n_gen tokens does not fit the context.
    """
    return CorrectnessReport(
        tuple(_check(cache, prompt, method, n_gen, max_kld, tenant) for prompt in prompts)
    )


def _check(
    cache: FillsSequence,
    prompt: Prompt,
    method: Method | Repair | None,
    n_gen: int,
    max_kld: float | None,
    tenant: str,
) -> PromptCheck:
    llm = cache.llm
    cache.prefill(prompt, reuse="exact", tenant=tenant)
    full = all_rows(llm)
    tokens, exact = follow(llm, n_gen)
    llm.kv.remove(0)  # drop live rows, so that reuse starts from the store
    reuse = cache.prefill(prompt, tenant=tenant, method=method)
    _, other = follow(llm, n_gen, tokens)
    llm.kv.remove(0)
    # a repair would have moved the rows it keeps
    stored = cache.prefill(prompt, tenant=tenant, method=_AS_STORED).chunks
    found, at = all_rows(llm), np.flatnonzero(stored.kept) if stored is not None else np.zeros(0, np.int64)
    again = evaluate_donors(llm, stored.segments, len(stored.kept)) if stored is not None and len(at) else {}
    errors = row_errors(llm, found, full, again, at)
    deviations = [compare(a, b) for a, b in zip(exact, other, strict=True)]
    kld = float(np.mean([each.kld for each in deviations]))
    differing = [i for i, each in enumerate(deviations) if not each.same_top1]
    problem = errors.problem(at)
    if not problem and not np.isfinite(kld):
        problem = "the distribution is not finite"
    if not problem and max_kld is not None and kld > max_kld:
        problem = f"the answer deviates by {kld:.3g} nats, more than {max_kld:g}"
    return PromptCheck(
        reuse=reuse,
        kld=kld,
        same_top1=1 - len(differing) / n_gen,
        first_diverging=differing[0] if differing else None,
        worst_row=errors.worst_first,
        problem=problem,
        damaged=tuple(at[errors.damaged].tolist()),
    )
