"""Shortens the recent window step by step while memory is short, and extends it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mixedkv import _core
from mixedkv.limits import INT32_MAX
from mixedkv.native.memory import Room, memory_rooms, memory_stall
from mixedkv.sizes import format_bytes

log = logging.getLogger("mixedkv.kv")

_INTERVAL = 1.0  # seconds between two looks
_CALM = 5  # looks in a row that find room before a window grows
_RESERVE, _MOST_RESERVE = 1 / 16, 512 << 20  # of a limit, and bytes at most, that shall stay free
_STALL = 10.0  # percent of the time spent waiting for memory


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that the process may still take, in bytes, and the share of the time it waits for memory, in
    percent.
    """

    rooms: list[Room] = field(default_factory=memory_rooms)
    stall: float = field(default_factory=memory_stall)

    @property
    def is_short(self) -> bool:
        return self.stall >= _STALL or any(room.left < _reserve(room) for room in self.rooms)

    def has_room(self, n_bytes: int) -> bool:
        """Return whether there is room for so many bytes, and as much again as shall stay free."""
        return self.stall < _STALL / 10 and all(
            room.left >= 2 * _reserve(room) + n_bytes for room in self.rooms
        )

    def __str__(self) -> str:
        least = min(self.rooms, key=lambda room: room.left / max(1, room.limit))
        left, limit = format_bytes(max(0, least.left)), format_bytes(least.limit)
        return f"{left} of {limit} left, {self.stall:.0f}% waiting"


class WindowRelief:
    """Halves the recent window of a context while memory is short, and doubles it when there is room.

    A step is taken at most once a second, and undone if it frees no memory, as with F16 rows on a device.
    Tokens evaluated with a shorter window are not exact, which `short_from` reports.

    Args:
        address: that of the context.
        look: what memory there is.
        clock: seconds.
    """

    def __init__(
        self,
        address: Callable[[], int],
        look: Callable[[], Memory] = Memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.look, self.clock = look, clock
        self._address = address
        self._next_look = 0.0
        self._level, self._n_calm = 0, 0
        self._most = INT32_MAX  # no memory comes of a level above

    def follow(self) -> None:
        """Adapt the window to the memory there is; called between two evaluations, on their thread."""
        if self.clock() < self._next_look:
            return
        self._next_look = self.clock() + _INTERVAL
        memory, before = self.look(), _core.stats(self._address())
        threshold = before["threshold"]
        if memory.is_short:
            self._n_calm = 0
            if self._level < min(threshold.bit_length(), self._most):
                self._shorten(memory, threshold, before["bytes_given_back"])
        elif self._level and memory.has_room(before["bytes_hot"] >> self._level):
            self._n_calm += 1
            if self._n_calm >= _CALM:
                self._n_calm = 0
                self._set(self._level - 1, threshold)
                log.info("%s: the F16 window is %d tokens again", memory, threshold >> self._level)
        else:
            self._n_calm = 0

    def _shorten(self, memory: Memory, threshold: int, given_back: int) -> None:
        self._set(self._level + 1, threshold)
        gained = _core.stats(self._address())["bytes_given_back"] - given_back
        if gained > 0:
            log.warning(
                "memory is short (%s): the F16 window is %d of %d tokens, %s given back",
                memory,
                threshold >> self._level,
                threshold,
                format_bytes(gained),
            )
        else:
            self._set(self._level - 1, threshold)
            self._most = self._level

    def _set(self, level: int, threshold: int) -> None:
        self._level = level
        _core.limit_window(self._address(), threshold >> level if level else 2**32 - 1)


def _reserve(room: Room) -> int:
    return min(int(room.limit * _RESERVE), _MOST_RESERVE)
