"""Decides where a prompt's checkpoints are taken, and which of them stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mixedkv.config.cut_rule import CutRule
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.limits import INT32_MAX
from mixedkv.sizes import size_of

_APART = 16  # tokens between two checkpoints at least
_AFTER = 16  # tokens of a message that may change without its first checkpoint being lost


@dataclass(frozen=True, slots=True)
class CheckpointLimits:
    """Limits on how many checkpoints a context keeps, and where.

    Args:
        per_sequence: of one sequence at most; 0 keeps none.
        every: also after each so many tokens of a prompt; 0 takes only those at messages and at the end.
        max_bytes: of all sequences together, a number or e.g. "2GiB".

    Raises:
        ValueError: one is negative.
    """

    per_sequence: int = 16
    every: int = 0
    max_bytes: int | str = 1 << 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_bytes", size_of("checkpoints: max_bytes", self.max_bytes))
        for field in ("per_sequence", "every"):
            if (value := getattr(self, field)) < 0:
                raise ValueError(f"checkpoints: {field}={value}: use 0 or more")


def places(
    rule: CutRule, limits: CheckpointLimits, boundaries: Sequence[int], begin: int, end: int
) -> list[int]:
    """Return after how many tokens of a prompt to take checkpoints, ascending, in [begin, end].

    Args:
        boundaries: where its messages begin and end.
        begin: tokens that are there already.
        end: of the prompt.
    """
    if rule.anywhere or not limits.per_sequence:
        return []
    ahead = begin + _APART if begin else 1
    found = [_around(rule, at, end) for at in _apart(rule, boundaries, ahead, end)]
    kept = max(1, limits.per_sequence // 2)
    taken = {at for around in found[:1] + found[1:][-kept:] for at in around}
    if any(begin <= at < ahead for at in boundaries):  # a step that ends there would be a few tokens long
        taken.add(begin)
    if not rule.recurrent:
        taken.add(end)
    elif end - 1 > begin and max(taken, default=0) < end - _APART:
        taken.add(end - 1)  # the same prompt again: its last token is evaluated in any case
    if limits.every:
        taken.update(range((begin // limits.every + 1) * limits.every, end, limits.every))
    return sorted(taken)


def _apart(rule: CutRule, boundaries: Sequence[int], begin: int, end: int) -> list[int]:
    """Return the boundaries in [begin, end), but for those that a checkpoint of the one before serves; of
    those that a state is kept at, the later ones of some that are close.
    """
    inside = [at for at in boundaries if begin <= at < end]
    if rule.recurrent:
        return [
            at for at, after in zip(inside, [*inside[1:], INT32_MAX], strict=False) if after - at >= _APART
        ]
    starts: list[int] = []
    for at in inside:
        if not starts or at > _around(rule, starts[-1], end)[-1]:
            starts.append(at)
    return starts


def _around(rule: CutRule, at: int, end: int) -> list[int]:
    """Return where to save for cuts at a boundary and some tokens behind it."""
    first = rule.save_at(at, end)
    if not rule.only_approximate or first == end or first - at >= _AFTER:
        return [first]
    return [first, rule.save_at(first + 1, end)]


def thinned(points: Sequence[Checkpoint], n: int) -> list[Checkpoint]:
    """Return at most `n` checkpoints: those closest to their neighbours go, the first and the last stay."""
    points = sorted(points, key=lambda point: point.n)
    while len(points) > max(0, n):
        gaps = [points[i + 1].n - points[i - 1].n for i in range(1, len(points) - 1)]
        del points[gaps.index(min(gaps)) + 1 if gaps else 0]
    return points
