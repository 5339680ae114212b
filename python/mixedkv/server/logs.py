"""Writes the log: one line for each record, with the id of its request."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")

_INDENT = "    "  # indent of the lines of a traceback
_WINDOW, _MOST = 60.0, 10  # seconds, and the maximum number of warnings of a kind in them
_MOST_KINDS = 1000


def install() -> None:
    """Log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter())
    handler.addFilter(RateLimit())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # httpx logs every request at INFO
    logging.getLogger("httpx").setLevel(logging.WARNING)


class Formatter(logging.Formatter):
    """Formats records with control characters escaped and further lines indented, so that text from a client
    cannot look like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        name = request_id.get()
        lines = [f"{record.levelname}: {f'[{name}] ' if name else ''}{_escaped(record.getMessage())}"]
        if record.exc_info:
            lines += [_INDENT + _escaped(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


class RateLimit(logging.Filter):
    """Lets ten warnings or errors of a kind through in a minute; the next one says how many it held back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # by kind: since when, and how many

    def __len__(self) -> int:
        return len(self._kinds)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, str(record.msg)), self._clock()
        began, n = self._kinds.get(kind, (now, 0))
        if now - began >= _WINDOW:
            if n > _MOST:
                record.msg = f"{record.msg} (and {n - _MOST} more like it)"
            began, n = now, 0
        if len(self._kinds) >= _MOST_KINDS:  # for messages that have the values in them
            self._kinds.clear()
        self._kinds[kind] = began, n + 1
        return n < _MOST


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
