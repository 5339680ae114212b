"""Servers that keep bytes under names, by URL."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import parse_qsl, urlencode, urlsplit

_DAY = 86400
_SCHEMES = ("redis", "rediss", "unix", "s3")


class RemoteError(Exception):
    """The server does not answer, or not as it should: it is asked again later."""


class RefusedError(Exception):
    """The server takes no more, since its memory is full for example."""


class Backend(Protocol):
    """Protocol of a remote server, which several threads use at once.

    Args:
        fan: names that may be asked for at once.

    All raise RemoteError; ValueError where the URL, a password or a right is wrong.
    """

    fan: int

    def check(self) -> None:
        """Ask the server whether it serves us."""

    def get(self, names: Sequence[str]) -> list[bytes | None]: ...

    def fetch(
        self, values: Sequence[tuple[str, int]], until: float
    ) -> Generator[memoryview | None, None, None]:
        """Fetch values one after the other, the next ones already on their way; None for one that is gone or
        has another size. What is given holds until the next one is asked for.

        Args:
            values: names and sizes.
            until: `time.monotonic` from when on waiting is of no use.
        """

    def exist(self, names: Sequence[str]) -> list[bool]: ...

    def put(self, values: Mapping[str, bytes]) -> None:
        """Store values by their names.

        Raises:
            RefusedError: there is no room.
        """

    def delete(self, names: Iterable[str]) -> None: ...

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
        if parts.scheme not in _SCHEMES or not (parts.netloc or parts.path):
            raise ValueError(
                f"remote: {text.partition(':')[0][:20]!r} is not the URL of a remote: use "
                "redis://HOST:PORT/DB, "
                "rediss://..., unix://PATH or s3://BUCKET/PREFIX"
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
