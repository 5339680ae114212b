"""Results of a store's methods, and its counts of hits and misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mixedkv.sizes import format_bytes
from mixedkv.store.identity import Identity

Tier = Literal["ram", "disk", "remote", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A tenant's share of a folder: its weight compared with others, and its maximum number of bytes.

    `owner` is a 16-byte id for a tenant whose entries have several master keys; empty for a keyed hash of its
    name.
    """

    weight: float = 1.0
    max_bytes: int | None = None
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class Link:
    """One entry of a match: its positions [p0, p1), of which [p0, end) are used."""

    entry: str
    p0: int
    p1: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Stored entries that begin like the tokens asked for.

    Args:
        identity: the entries' identity.
        tokens: the tokens that were asked for and are covered, int32 [n_tokens].
        links: the entries in order of position; each begins where the one before is cut.
        exact: a cache restored from the entries continues as if it had never left. False if a mixed cache is
            cut at a place for which its recent rows were not stored in F16.
    """

    identity: Identity
    tokens: npt.NDArray[np.int32] = field(repr=False)
    links: tuple[Link, ...]
    exact: bool

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def entry(self) -> str:
        """The last entry."""
        return self.links[-1].entry


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Result of `KVStore.save`.

    Args:
        entry: id of the last entry; "" if nothing could be stored.
        n_tokens: tokens that were asked for; for sequence 0 without those whose rows are inexact, see
            `KVCache.exact_tokens`.
        n_stored: tokens newly stored, 0 if all were there.
        nbytes: bytes of their rows.
        reason: why nothing could be stored, "" otherwise.
    """

    entry: str
    n_tokens: int
    n_stored: int
    nbytes: int
    seconds: float
    reason: str = ""


NOTHING_SAVED = Saved(entry="", n_tokens=0, n_stored=0, nbytes=0, seconds=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """Result of `KVStore.restore`.

    Args:
        n_tokens: tokens now in the sequence; 0 is a miss, and the sequence is as it was.
        exact: the sequence can be gone on from as if it had never left, as its rows say; True for a miss.
        tier: "ram", "disk" or "remote" if any part came from there, or "none".
        seconds: time of the call, including the lookup.
        reason: why it was a miss, or why an entry was skipped on the way; "" otherwise. The first word is one
            of `REASONS`.
    """

    n_tokens: int
    exact: bool
    tier: Tier
    seconds: float
    reason: str = ""

    @property
    def hit(self) -> bool:
        """True if tokens were restored."""
        return self.n_tokens > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryInfo:
    """An entry, for listings."""

    id: str
    parent: str | None
    label: str
    p0: int
    p1: int
    nbytes: int
    created: float
    used: float
    encrypted: bool
    n_sessions: int
    in_ram: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageInfo:
    """An entry that a chat message ends in.

    Args:
        n_tokens: tokens of the conversation up to the message's end.
        p0: position where the entry begins.
        nbytes: size of the entry, which can hold more than this message.
        created, used: of the entry, seconds since 1970.
    """

    message_id: str
    n_tokens: int
    entry: str
    p0: int
    nbytes: int
    created: float
    used: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Result of `KVStore.verify`: entries that are whole, those it removed and why, and those encrypted with
    another key, which it left alone.
    """

    n_whole: int
    damaged: Mapping[str, str]
    unreadable: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GCResult:
    """Result of `KVStore.gc`.

    Args:
        n_unfinished: files that were never finished.
        n_orphans: files without an entry.
        n_missing: entries without their file.
        n_expired: entries that were not used for `max_age_seconds`.
        n_evicted: entries that were over the budget.
    """

    n_unfinished: int
    n_orphans: int
    n_missing: int
    n_expired: int
    n_evicted: int

    @property
    def total(self) -> int:
        return self.n_unfinished + self.n_orphans + self.n_missing + self.n_expired + self.n_evicted


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteStats:
    """Counts of what this process did with its remote.

    Args:
        url: where it is, without a password.
        up: True if it answers, as far as is known.
        waiting: entries that are still to be sent.
        hits, misses: searches that copied entries from there, and searches that did not.
        failures: requests that it did not answer in time.
        refused: entries that it refused for lack of room.
        dropped: entries that were not sent as too many were waiting.
        bytes_read, bytes_written: of files.
    """

    COUNTS: ClassVar = ("hits", "misses", "failures", "refused", "dropped", "bytes_read", "bytes_written")

    url: str
    up: bool
    waiting: int
    hits: int
    misses: int
    failures: int
    refused: int
    dropped: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Contents of a store, and counts of what this process did with it.

    Args:
        n_entries, bytes_disk: entries in the folder, by all processes; without a folder `bytes_disk` is 0.
        n_ram, bytes_ram: blocks this process keeps in memory.
        hits: lookups whose rows were read, by tier.
        misses: lookups without a result, by reason (the words of `REASONS`).
        tokens_hit: tokens that need not be computed again.
        bytes_read, bytes_written: of files.
        n_evicted: entries this process removed to make room.
        n_expired: entries that this process removed as they were not used for `max_age_seconds`.
        unerased: keys of removed entries may still be in the index's log, as another program is reading it.
        n_restored, seconds_restoring: calls of `restore` that hit, and their time together.
        n_rechecked, n_wrong: entries of which tokens were evaluated again, and those of them that were wrong
            and removed.
        remote: the tier behind the disk, if there is one.
    """

    n_entries: int
    bytes_disk: int
    n_ram: int
    bytes_ram: int
    hits: Mapping[str, int]
    misses: Mapping[str, int]
    tokens_hit: int
    bytes_read: int
    bytes_written: int
    n_evicted: int
    unerased: bool
    n_restored: int
    seconds_restoring: float
    n_expired: int = 0
    n_rechecked: int = 0
    n_wrong: int = 0
    remote: RemoteStats | None = None

    @property
    def n_hits(self) -> int:
        """Number of searches that found something, of all tiers."""
        return sum(self.hits.values())

    @property
    def n_misses(self) -> int:
        """Number of searches that found nothing, for any reason."""
        return sum(self.misses.values())

    def __str__(self) -> str:
        misses = ", ".join(f"{reason} {n}" for reason, n in sorted(self.misses.items()))
        per_restore = 1e3 * self.seconds_restoring / self.n_restored if self.n_restored else 0.0
        return "\n".join(
            [
                f"entries   {self.n_entries}, {format_bytes(self.bytes_disk)} on disk, "
                f"{format_bytes(self.bytes_ram)} in RAM",
                f"hits      {self.n_hits} ({self.hits.get('ram', 0)} RAM, {self.hits.get('disk', 0)} disk, "
                f"{self.hits.get('remote', 0)} remote), "
                f"{self.tokens_hit} tokens",
                f"misses    {self.n_misses}" + (f" ({misses})" if misses else ""),
                f"bytes     {format_bytes(self.bytes_read)} read, {format_bytes(self.bytes_written)} written",
                f"evicted   {self.n_evicted} to make room, {self.n_expired} by age",
                f"restored  {self.n_restored}, {per_restore:.1f} ms each",
            ]
        )


class Tally:
    """Counts of a store's work, see `StoreStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._hits, self._misses = Counter[str](), Counter[str]()
        self._counts: dict[str, Any] = {
            "tokens_hit": 0,
            "n_restored": 0,
            "seconds_restoring": 0.0,
            "n_rechecked": 0,
            "n_wrong": 0,
        }

    def hit(self, tier: Tier, n_tokens: int) -> None:
        with self._lock:
            self._hits[tier] += 1
            self._counts["tokens_hit"] += n_tokens

    def miss(self, reason: str) -> None:
        with self._lock:
            self._misses[reason] += 1

    def add(self, **counts: float) -> None:
        with self._lock:
            for name, n in counts.items():
                self._counts[name] += n

    def stats(self) -> dict[str, Any]:
        """Return the tally's part of `StoreStats`."""
        with self._lock:
            return {"hits": dict(self._hits), "misses": dict(self._misses), **self._counts}
