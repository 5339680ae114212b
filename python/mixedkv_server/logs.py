"""Writes the log: one line for each record, with its time and the id of its request."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal

LogFormat = Literal["text", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")

_INDENT = "    "  # indent of the lines of a traceback
_WINDOW, _MOST = 60.0, 10  # seconds, and the maximum number of warnings of a kind in them
_MOST_KINDS = 1000


def install(form: LogFormat = "text") -> None:
    """Log to stderr. As JSON, warnings of Python are records too, so that every line is one object."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else Formatter())
    if form == "json":
        warnings.showwarning = _log_warning  # type: ignore[assignment]
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
        head = f"{_time(record)} {record.levelname}: {f'[{name}] ' if name else ''}"
        lines = [head + _escaped(record.getMessage())]
        if record.exc_info:
            lines += [_INDENT + _escaped(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


class JSONFormatter(logging.Formatter):
    """Formats each record as a JSON object on a line. `fields` of a record are further members."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.get():
            entry["request_id"] = name
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def of_model(name: str, line: str, form: LogFormat) -> str:
    """Return a line that the process of a model wrote, with the model's name."""
    if form == "text":
        return f"[{name}] {line}"
    try:
        entry = json.loads(line)
    except ValueError:
        entry = line
    if not isinstance(entry, dict):  # from llama.cpp, or from Python as it ends
        entry = {"time": _utc(time.time()), "level": "INFO", "logger": "mixedkv.model", "message": line}
    return json.dumps({**entry, "model": name})


def message_of(line: str) -> str:
    """Return the message of a line, of either format."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return str(entry.get("message", line)) if isinstance(entry, dict) else line


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


def _log_warning(message: Warning | str, *_: object) -> None:
    logging.getLogger("mixedkv").warning("%s", " ".join(str(message).split()))


def _time(record: logging.LogRecord) -> str:
    return _utc(record.created)


def _utc(seconds: float) -> str:
    return (
        datetime.fromtimestamp(seconds, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
