"""Servers that keep bytes under names, by URL; when one that does not answer is asked again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

from mixedkv.backoff import Backoff

_DAY = 86400
EXTRAS = {"redis": "redis", "rediss": "redis", "unix": "redis", "s3": "s3", "file": "s3"}  # by scheme
FAILURES = 3  # in a row, until nobody asks any more
_FIRST_SECONDS, _LONGEST_SECONDS = 2.0, 60.0


class RemoteError(Exception):
    """The server does not answer, or not as it should: it is asked again later."""


class RefusedError(Exception):
    """The server takes no more, since its memory is full for example."""


class Backend(Protocol):
    """Protocol of a remote server, which several threads use at once. All raise RemoteError; ValueError where
    the URL, a password or a right is wrong.

    Args:
        fan: names that may be asked for at once.
    """

    fan: int

    def check(self) -> None:
        """Ask the server whether it serves us."""

    def get(self, names: Sequence[str]) -> list[bytes | None]: ...

    def put(self, values: Mapping[str, bytes]) -> None:
        """Store values by their names.

        Raises:
            RefusedError: there is no room.
        """

    def delete(self, names: Sequence[str]) -> None: ...

    def abort(self) -> None:
        """End what other threads wait for."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteURL:
    """Address of a remote, and how it is used.

    Args:
        url: without our options, with its password.
        ttl: seconds that the server keeps what is stored; the bucket's own rules in S3.
        timeout: seconds for an answer.
    """

    url: str = field(repr=False)
    scheme: str
    ttl: int
    timeout: float

    @classmethod
    def parse(cls, text: str) -> RemoteURL:
        """Parse the URL of a remote.

        Raises:
            ValueError: it is no URL of a remote.
        """
        parts = urlsplit(text)
        if parts.scheme not in EXTRAS or not (parts.netloc or parts.path):
            raise ValueError(
                f"remote: {text.partition(':')[0][:20]!r} is not the URL of a remote: use "
                "redis://HOST:PORT/DB, rediss://..., unix://PATH, s3://BUCKET/PREFIX or file:///FOLDER"
            )
        options = dict(parse_qsl(parts.query))
        ttl = _number("ttl", options.pop("ttl", 7 * _DAY), 60, 10 * 365 * _DAY)
        timeout = _number("timeout", options.pop("timeout", 1.0), 0.01, 60)
        url = text.partition("?")[0] + ("?" + urlencode(options) if options else "")
        return cls(url, parts.scheme, int(ttl), timeout)

    @property
    def shown(self) -> str:
        """Without a password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not low <= number <= high:
        raise ValueError(f"remote: {name}={str(value)[:40]}: use a number of seconds from {low} to {high}")
    return number


class Breaker:
    """After three failures in a row nobody asks for two seconds. Then one may: if that fails too, nobody for
    twice as long, up to a minute. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._failures = Lock(), 0
        self._backoff = Backoff(_FIRST_SECONDS, _LONGEST_SECONDS, clock)

    @property
    def is_open(self) -> bool:
        """Nobody asks, or one does to find out."""
        return self._failures >= FAILURES

    def allows(self) -> bool:
        """Return whether to ask now; a caller that gets True says how it went."""
        with self._lock:
            allowed = not self.is_open or not self._backoff.left
            if self.is_open and allowed:
                self._backoff.wait()  # the others wait for this one
            return allowed

    def succeeded(self) -> bool:
        """Note a success, and return whether nobody asked before this."""
        with self._lock:
            was_open, self._failures = self.is_open, 0
            self._backoff.succeeded()
            return was_open

    def failed(self, times: int = 1) -> bool:
        """Note a failure, and return whether nobody asks from now on."""
        with self._lock:
            was_open = self.is_open
            self._failures += times
            if self.is_open:
                self._backoff.failed()
            return self.is_open and not was_open
