"""Drops tokens from the middle of a sequence and moves the later rows down."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from mixedkv.errors import UnsupportedModelError


class Movable(Protocol):
    """The part of a `KVCache` that is needed to close a gap."""

    @property
    def can_shift(self) -> bool: ...

    def remove(self, seq: int = 0, p0: int = 0, p1: int = -1) -> None: ...

    def shift(self, seq: int, p0: int, p1: int, by: int) -> None: ...

    def export(self, seq: int = 0, p0: int = 0, p1: int = -1, tokens: npt.ArrayLike | None = None) -> Any: ...

    def load(self, block: Any, seq: int = 0, at: int | None = None) -> None: ...


def check_can_shift(kv: Movable) -> None:
    """Refuse a cache whose positions cannot be moved.

    Raises:
        UnsupportedModelError: positions cannot be moved.
    """
    if not kv.can_shift:
        raise UnsupportedModelError(
            "the context is full, and this model's memory cannot drop tokens (recurrent or "
            "sliding-window layers): raise n_ctx, shorten the conversation, or, with sliding-window layers, "
            "set swa_full=True"
        )


def close_gap(kv: Movable, seq: int, begin: int, end: int, *, shared: npt.ArrayLike | None = None) -> None:
    """Drop positions [begin, end) of a sequence; the rows behind them move down, turned by RoPE.

    Args:
        shared: where other sequences have some of these rows too, the tokens of the rows behind; these are
            then copied, since a cell has one position.

    Raises:
        ValueError: the range is empty or negative; or there is no room for copies, and the rows behind
            `begin` are gone.
        UnsupportedModelError: the memory cannot shift.
    """
    if not 0 <= begin < end:
        raise ValueError(f"[{begin}, {end}) is not a valid range of positions to drop")
    check_can_shift(kv)
    if shared is None:
        kv.remove(seq, begin, end)
        kv.shift(seq, end, -1, begin - end)
        return
    block = kv.export(seq, end, -1, shared)
    kv.remove(seq, begin)
    kv.load(block, seq, begin)
