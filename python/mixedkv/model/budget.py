"""Spends bytes: on the types of rows first, then on the window."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

from mixedkv.model.layer_plan import LayerPlan

T = TypeVar("T")
Types = list[tuple[int, str, str]]
Room = int | str


def spend(
    budget: int,
    plan: LayerPlan,
    windows: Sequence[int],
    rooms: Callable[[int], Sequence[Room]],
    make: Callable[[Types, int, Room], T],
    size: Callable[[T], int],
) -> T:
    """Return the setting of least divergence that takes `budget` bytes at most.

    Args:
        windows: F16 tokens of the recent window, ascending; the first one is what is wanted. It is halved
            where not even the coarsest types fit with it, and grows when all rows have the finest.
        rooms: for a window, room for F16 tokens that sequences share, ascending; the last one is what is
            wanted.
        make: a setting of these types of layers, this window and this room.
        size: bytes of a setting.

    Raises:
        ValueError: nothing fits; the message has the bytes of the smallest setting.
    """
    coarsest, window = plan.types(0), windows[0]
    while True:
        choice = rooms(window)
        n_rooms = bisect_right(choice, budget, key=lambda room: size(make(coarsest, window, room)))
        if n_rooms or not window:
            break
        window //= 2
    if not n_rooms:
        smallest = size(make(coarsest, 0, choice[0]))
        raise ValueError(
            f"budget={budget}: the smallest cache takes {smallest} bytes: raise the budget, or lower n_ctx"
        )
    room = choice[n_rooms - 1]
    steps = range(len(plan) + 1)
    n = bisect_right(steps, budget, key=lambda n: size(make(plan.types(n), window, room))) - 1
    if n == len(plan) and window == windows[0]:
        wide = bisect_right(windows, budget, key=lambda wider: size(make(plan.types(n), wider, room)))
        window = windows[wide - 1]
    return make(plan.types(n), window, room)
