"""Tells which rows a chain of blocks has, and so where it may be cut.

A cache of one type can be cut anywhere. A sliding-window layer may only have the rows of its window as it
stood at the end of the exported block, and a mixed cache has recent rows in F16 as of then. At another cut
the window may lack rows, so that the cut is unusable, or F16 copies, so that it is not exact. The state of
recurrent layers is in checkpoints alone. A cut at a checkpoint is always exact.

All rows of an entry were computed from the start: `KVStore.put` takes no others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock
from mixedkv.kv.rows import RowGroup
from mixedkv.store.entry_row import EntryError
from mixedkv.store.identity import Identity

Runs = list[tuple[int, int]]  # ranges [begin, end) of positions, ascending
Verdict = Literal["exact", "inexact", "unusable"]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The positions that have rows in one group of layers, and those that also have F16 copies."""

    rows: Runs
    hot: Runs


@dataclass(frozen=True, slots=True)
class Coverage:
    """The rows of a block by group of layers, and the cuts that its checkpoints serve, [first, last] each."""

    groups: list[GroupRows]
    served: list[tuple[int, int]] = field(default_factory=list)

    def serves(self, n: int) -> bool:
        return any(first <= n <= last for first, last in self.served)

    def served_before(self, n: int) -> int:
        """Return the longest cut up to n that a checkpoint serves; 0: none."""
        return max((min(n, last) for first, last in self.served if first <= n), default=0)


def of_block(block: KVBlock) -> Coverage:
    """Return the coverage of a block."""
    groups = [_rows_of(group) for group in block.groups]
    served = [(point.first, point.n) for point in block.checkpoints]
    return Coverage(groups, served)


def to_text(coverage: Coverage) -> str:
    groups = [[group.rows, group.hot] for group in coverage.groups]
    return json.dumps({"groups": groups, "served": coverage.served}, separators=(",", ":"))


def from_text(text: str) -> Coverage:
    """Read what `to_text` wrote.

    Raises:
        EntryError: the text is something else.
    """
    try:
        what = json.loads(text)
        groups, served = what["groups"], what["served"]
        rows = [GroupRows(_checked(rows), _checked(hot)) for rows, hot in groups]
        ranges = _checked([[first, last + 1] for first, last in served])
        return Coverage(rows, [(begin, end - 1) for begin, end in ranges])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise EntryError("damaged", f"the rows of an entry are not readable: {error}") from error


def verdict(identity: Identity, chain: Sequence[tuple[Coverage, int, int]], n: int) -> Verdict:
    """Return how a chain of blocks can be used when cut at position n.

    Args:
        identity: of the blocks.
        chain: the rows of each block, and the positions [begin, end) that it is used for, together [0, n).
        n: where the restored sequence ends.
    """
    if len({len(coverage.groups) for coverage, _, _ in chain}) != 1:
        return "unusable"
    served = chain[-1][0].serves(n)
    if identity.recurrent and not served:
        return "unusable"
    is_exact = True
    for i in range(len(chain[0][0].groups)):
        used = [(coverage.groups[i], begin, end) for coverage, begin, end in chain]
        rows = _union(run for group, begin, end in used for run in _clip(group.rows, begin, end))
        if not _has_rows(identity, rows, n, served):
            return "unusable"
        hot = _union(run for group, begin, end in used for run in _clip(group.hot, begin, end))
        is_exact = is_exact and (served or _has_f16_rows(identity, rows, hot, n))
    return "exact" if is_exact else "inexact"


def _has_rows(identity: Identity, rows: Runs, n: int, served: bool) -> bool:
    """Return whether all rows that the query at n reads are there; it reads none before a sliding window."""
    if rows == [(0, n)]:
        return True
    window = identity.sliding_window
    return bool(window) and (served or _covers(rows, max(0, n - window), n))


def _has_f16_rows(identity: Identity, rows: Runs, hot: Runs, n: int) -> bool:
    """Return whether the rows that the query at n reads in F16 are there in F16."""
    needed = [part for begin, end in _hot_positions(identity, n) for part in _clip(rows, begin, end)]
    return all(_covers(hot, begin, end) for begin, end in needed)


def window_begin(identity: Identity, n: int) -> int:
    """Return the position from which a block that ends at n needs F16 rows of its own, if earlier blocks have
    lost theirs.
    """
    return min((begin for begin, _ in _hot_positions(identity, n)[1:]), default=n)


def verdict_of_end(identity: Identity, coverage: Coverage, p0: int, p1: int) -> Verdict:
    """Return how a block [p0, p1) can be used at its own end, if the blocks before it are complete."""
    before = Coverage([GroupRows([(0, p0)], [(0, p0)])] * len(coverage.groups))
    chain = [(before, 0, p0)] if p0 else []
    return verdict(identity, [*chain, (coverage, p0, p1)], p1)


def _hot_positions(identity: Identity, n: int) -> Runs:
    """Return the positions that the query at n reads in F16, of a sequence that was never cut."""
    window = identity.window
    if not (window.threshold or window.sink_tokens):
        return []
    return [(0, min(window.sink_tokens, n)), (min(window.begin(n), n), n)]


def _rows_of(group: RowGroup) -> GroupRows:
    """Return the positions with rows and with F16 copies. Positions within an image need no rows."""
    hot = group.positions[group.hot]
    if group.xy is None:
        return GroupRows(_runs(group.positions), _runs(hot))
    covered = list(zip(group.positions.tolist(), group.ends.tolist(), strict=True))
    copies = [(p, p + 1) for p in hot.tolist()]
    return GroupRows(_union(covered), _union([*copies, *((p + 1, end) for p, end in covered if end > p + 1)]))


def _runs(positions: npt.NDArray[np.int32]) -> Runs:
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    begins, ends = positions[np.r_[0, breaks]], positions[np.r_[breaks - 1, len(positions) - 1]] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


def _checked(runs: object) -> Runs:
    if not isinstance(runs, list):
        raise TypeError("runs are not a list")
    pairs = [(begin, end) for begin, end in runs]
    if any(type(begin) is not int or type(end) is not int or begin >= end for begin, end in pairs):
        raise ValueError("a run is not a range of positions")
    return pairs


def _clip(runs: Iterable[tuple[int, int]], begin: int, end: int) -> Runs:
    clipped = [(max(begin, a), min(end, b)) for a, b in runs]
    return [(a, b) for a, b in clipped if a < b]


def _union(runs: Iterable[tuple[int, int]]) -> Runs:
    merged: Runs = []
    for begin, end in sorted(runs):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _covers(runs: Runs, begin: int, end: int) -> bool:
    return begin >= end or any(a <= begin and end <= b for a, b in runs)


def is_better(identity: Identity, block: KVBlock, rows: str) -> bool:
    """Return whether a block continues from its end more exactly than the same tokens that are stored."""
    return is_better_row(identity, block.p0, block.p1, to_text(of_block(block)), rows)


def is_better_row(identity: Identity, p0: int, p1: int, rows: str, stored: str) -> bool:
    """Return whether the first of two entries of the same range has the better rows."""
    ranks = [_rank(identity, p0, p1, text) for text in (rows, stored)]
    return ranks[0] > ranks[1]


def _rank(identity: Identity, p0: int, p1: int, rows: str) -> int:
    try:
        return _RANKS.index(verdict_of_end(identity, from_text(rows), p0, p1))
    except EntryError:
        return -1


_RANKS = ("unusable", "inexact", "exact")
