"""The tier behind the disk: a server that several machines share.

What a store writes goes there later, on a thread of its own; what a search misses is looked for there and
taken over into the folder, where it is found and checked like everything else. A server that is slow or gone
is a miss: every question has a time-out, and after three failures nobody asks for a while.

Entries are found by the hashes of their tokens, without a shared index:

    v1/at/HASH          content hash of the last entry that was stored over this block boundary
    v1/entry/CONTENT    the entry's row, and how its file is cut
    v1/piece/ID/I       part I of its file, as it would lie on a disk

A boundary has a name if those before it in the same prompt have one, so a few questions find the last. What
is missing or of another is a miss: an entry is written before the boundaries that name it, its parts before
it.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mixedkv.log_once import LogOnce
from mixedkv.store import coverage
from mixedkv.store.encryption import Cipher
from mixedkv.store.entries import TooLargeError
from mixedkv.store.entry_row import FIELDS, EntryError, EntryRow, sound_row
from mixedkv.store.identity import Identity
from mixedkv.store.index import ParentGoneError
from mixedkv.store.lookup import BLOCK, Search, block_hashes, content_hash
from mixedkv.store.remote.backend import (
    EXTRAS,
    FAILURES,
    Backend,
    Breaker,
    RefusedError,
    RemoteError,
    RemoteURL,
)
from mixedkv.store.remote.shared_entries import SharedEntries
from mixedkv.store.results import RemoteStats
from mixedkv.store.sealing import unseal
from mixedkv.tokens import Tokens

_VERSION = 1
PART_BYTES = 2 << 20  # bytes of a part: larger ones are not faster, smaller ones are slower
_MAX_PARTS = 1 << 20
_HEX = ("content", "identity", "key")  # bytes in JSON
_AHEAD = 64  # entries that are asked for together with the one that builds on them


def at_name(block_hash: bytes) -> str:
    return f"v{_VERSION}/at/{block_hash.hex()}"


def boundaries(row: EntryRow) -> slice:
    """Return the boundaries that name an entry: those behind its beginning, which is the end of the one
    before.
    """
    first, last = row.p0 // BLOCK + 1, row.p1 // BLOCK
    return slice(max(1, min(first, last)), last + 1)


def entry_name(content: str) -> str:
    return f"v{_VERSION}/entry/{content}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """An entry of a remote.

    Args:
        row: its `parent` is a content hash, in hex, as its name there.
        above: content hashes of what it builds on, the nearest first.
    """

    row: EntryRow
    above: tuple[str, ...]

    @property
    def name(self) -> str:
        return entry_name(self.row.content.hex())

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Their names and sizes."""
        n = self.row.nbytes
        return [
            (f"v{_VERSION}/piece/{self.row.id}/{i}", min(PART_BYTES, n - i * PART_BYTES))
            for i in range(-(-n // PART_BYTES))
        ]

    def encode(self) -> bytes:
        head = {name: getattr(self.row, name) for name in FIELDS if name not in ("parent", "tokens", "used")}
        head |= {name: head[name].hex() for name in _HEX} | {"above": self.above}
        return json.dumps(head, separators=(",", ":")).encode() + b"\n" + self.row.tokens

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode a manifest.

        Raises:
            EntryError: it is something else.
        """
        text, _, tokens = data.partition(b"\n")
        try:
            head: dict[str, Any] = json.loads(text)
            above = tuple(_content(name) for name in head["above"])
            head |= {name: bytes.fromhex(head[name]) for name in _HEX}
            head |= {"parent": above[0] if above else None, "tokens": tokens, "used": head["created"]}
            row = sound_row([head[name] for name in FIELDS])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise EntryError("damaged", f"its description is not readable: {error}") from None
        if row is None or row.nbytes > PART_BYTES * _MAX_PARTS:
            raise EntryError("damaged", "its description is not what was written")
        return cls(row, above)


class RemoteListing:
    """Lists the entries of a remote for a search; see `lookup.Listing`.

    Args:
        get: asks the remote for values by name.
        fan: names asked for at once.
        beyond: tokens that need not be looked for.
    """

    def __init__(
        self, get: Callable[[Sequence[str]], list[bytes | None]], *, fan: int, beyond: int = 0
    ) -> None:
        self._get, self._fan, self._beyond = get, fan, beyond
        self._at: dict[bytes, str] = {}
        self._data: dict[str, bytes | None] = {}
        self.manifests: dict[str, Manifest] = {}  # by id

    def known(self, hashes: Sequence[bytes]) -> set[bytes]:
        """Return some of the hashes under which entries are listed, the last one among them."""
        begin, end = self._beyond // BLOCK + 1, len(hashes)  # under the first all are
        while begin < end:
            step = -(-(end - begin) // self._fan)
            places = [*range(begin + step - 1, end - 1, step), end - 1]
            values = self._get([at_name(hashes[i]) for i in places])
            there = {i: value.hex() for i, value in zip(places, values, strict=True) if value is not None}
            self._at.update((hashes[i], content) for i, content in there.items())
            if step == 1:
                break
            last = max(there, default=begin - 1)
            begin, end = last + 1, next((i for i in places if i > last), end)
        return set(self._at)

    def candidates(self, block_hash: bytes, limit: int) -> list[str]:
        return [self._at[block_hash]]

    def get(self, entry: str) -> EntryRow | None:
        """Return an entry by its content hash.

        Raises:
            EntryError: it is gone, or not what was written.
        """
        if entry not in self._data:
            self._ask([entry])
        data = self._data[entry]
        if data is None:
            raise EntryError("missing", "it is gone from the remote")
        manifest = Manifest.decode(data)
        if manifest.row.content.hex() != entry:
            raise EntryError("damaged", "its description is another entry's")
        self.manifests[manifest.row.id] = manifest
        ahead = [name for name in manifest.above[:_AHEAD] if name not in self._data]
        if ahead:
            self._ask(ahead)
        return manifest.row

    def has_other_key(self, identity: bytes, key_id: str) -> bool:
        return False

    def _ask(self, entries: list[str]) -> None:
        values = self._get([entry_name(entry) for entry in entries])
        self._data.update(zip(entries, values, strict=True))


def _content(name: Any) -> str:
    if not isinstance(name, str) or len(bytes.fromhex(name)) != 16:
        raise ValueError("a name without a content hash")
    return name.lower()


_LOG = logging.getLogger("mixedkv.store")
_T = TypeVar("_T")
_LEAST_RATE = 20e6  # bytes per second: what is slower is a miss
_ASKERS = 32  # who waits for one of them has its own time going by
_MAX_WAITING = 256  # entries that are still to be sent
_NAMES = 512  # that are written or removed by one message
_CLOSE_SECONDS = 20.0  # for what waits, when the store is closed
_PAUSE = 0.05
_PARTS_AHEAD = 4  # on their way at a time: the server copies what it is asked for


class _Send(NamedTuple):
    """An entry that is to be sent."""

    entry: str
    identity: Identity


class RemoteTier:
    """Reads and writes for one store.

    Args:
        url: of the remote, see docs/store.md.

    Raises:
        ValueError: the URL, its password or its bucket is wrong. A server that does not answer is no error.
    """

    def __init__(self, url: str, entries: SharedEntries, cipher: Cipher) -> None:
        self._url = RemoteURL.parse(url)
        self._entries, self._cipher = entries, cipher
        self._backend = _open(self._url)
        self._breaker = Breaker()
        self._askers = ThreadPoolExecutor(_ASKERS, "mixedkv-remote")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._once = LogOnce(_LOG)
        self._news = threading.Condition()  # reentrant
        self._waiting: deque[_Send | list[bytes]] = deque()  # entries to send, and contents to remove
        self._closing = threading.Event()
        try:
            self._wait_for(self._backend.check)
        except RemoteError as error:
            self._breaker.failed(FAILURES)
            _LOG.warning("%s does not answer: the store goes without it until it does: %s", self, error)
        except RefusedError as error:
            self._once.warning(f"{self} takes nothing: {error}")
        except ValueError:
            self._shut()
            raise
        entries.on_removed = self.remove
        self._writer = threading.Thread(target=self._write, name="mixedkv-remote-write", daemon=True)
        self._writer.start()

    def __str__(self) -> str:
        return f"the remote {self._url.shown}"

    def close(self) -> None:
        """Send what waits, as long as the server takes it and 20 seconds at most."""
        self.flush(_CLOSE_SECONDS)
        with self._news:
            self._closing.set()
            self._news.notify()
        self._writer.join(_CLOSE_SECONDS)
        if self._waiting:
            _LOG.warning(
                "%s: %d entries were not sent, and %d not removed, which stay there until their time is over",
                self,
                self._n_to_send(),
                sum(len(each) for each in self._waiting if isinstance(each, list)),
            )
        self._shut()

    def flush(self, seconds: float) -> bool:
        """Wait until all is sent; False if it was not, or the server does not answer."""
        end = time.monotonic() + seconds
        while self._waiting:
            if self._breaker.is_open or time.monotonic() > end or not self._writer.is_alive():
                return False
            time.sleep(0.005)
        return True

    def stats(self) -> RemoteStats:
        with self._lock:
            counts = {name: self._counts[name] for name in RemoteStats.COUNTS}
        return RemoteStats(
            url=self._url.shown, up=not self._breaker.is_open, waiting=self._n_to_send(), **counts
        )

    # --- reading ---

    def pull(self, identity: Identity, tokens: Tokens, n_local: int, exact_only: bool) -> bool:
        """Take over what the remote has of some tokens beyond the first `n_local`, if that is a block more at
        least; whether there was something.
        """
        if len(tokens) < n_local + BLOCK or self._closing.is_set() or not self._breaker.allows():
            return False
        try:
            listing = RemoteListing(self._get, fan=self._backend.fan, beyond=n_local)
            search = Search(listing, self._cipher, identity, tokens)
            match = search.find(exact_only)
            found = False
            if match is not None and match.n_tokens >= n_local + BLOCK:
                chain = [listing.manifests[link.entry] for link in match.links]
                if sum(manifest.row.nbytes for manifest in chain) <= self._entries.max_bytes:
                    found = self._take_over(identity, tokens, chain)
            self._answered()
        except RemoteError as error:
            self._failed(error)
            return False
        except OSError as error:  # of the folder
            self._once.warning(
                f"what {self} has cannot be written here: {error.strerror or type(error).__name__}"
            )
            self._answered()
            return False
        self.remove(
            listing.manifests[entry].row.content if entry in listing.manifests else bytes.fromhex(entry)
            for entry, error in search.broken.items()
            if error.reason == "damaged"
        )
        self._count("hits" if found else "misses")
        return found

    def _take_over(self, identity: Identity, tokens: Tokens, chain: list[Manifest]) -> bool:
        """Take entries over, and return whether at least one of them was."""
        missing = [manifest for manifest in chain if not self._entries.has(manifest.row.content)]
        until = time.monotonic() + self._seconds(sum(manifest.row.nbytes for manifest in missing))
        found = not missing  # another thread or process was faster
        try:
            with closing(self._parts([part for each in missing for part in each.parts], until)) as coming:
                for manifest in missing:
                    self._adopt(identity, tokens, manifest, b"".join(islice(coming, len(manifest.parts))))
                    found = True
        except EntryError as error:
            _LOG.warning("an entry of %s is not used: %s", self, error)
            if error.reason not in ("key", "version"):
                self.remove([manifest.row.content])
        except (ParentGoneError, TooLargeError) as error:
            text = f"entries of {self} are not taken over for want of room ({type(error).__name__})"
            self._once.warning(text)
        except ValueError as error:  # a right that was taken away meanwhile
            raise RemoteError(str(error)) from None
        return found

    def _parts(self, parts: Sequence[tuple[str, int]], until: float) -> Generator[bytes, None, None]:
        """Yield parts of files in order, the next ones already on their way."""
        coming: deque[Future[list[bytes | None]]] = deque()
        try:
            for i, (_, size) in enumerate(parts):
                for name, _ in parts[i + len(coming) : i + _PARTS_AHEAD]:
                    coming.append(self._submit(partial(self._backend.get, [name])))
                (part,) = coming.popleft().result(max(0.0, until - time.monotonic()))
                if part is None or len(part) != size:
                    raise EntryError("missing", "a part of it is gone from the remote, or is another's")
                yield part
        except TimeoutError:
            raise RemoteError("it sends too slowly") from None
        finally:
            for one in coming:
                one.cancel()

    def _adopt(self, identity: Identity, tokens: Tokens, manifest: Manifest, file: bytes) -> None:
        row = manifest.row
        block = unseal(self._cipher, row, io.BytesIO(file), len(file))
        before = tokens[: row.p0]
        hashes = block_hashes(self._cipher, identity, np.concatenate([before, block.tokens]))
        if content_hash(self._cipher, hashes, before, block.tokens) != row.content:
            raise EntryError("tokens", "its file has other tokens")
        parent = bytes.fromhex(row.parent) if row.parent is not None else None
        self._entries.adopt(identity, row, parent, file, block, hashes)
        self._count("bytes_read", row.nbytes)

    # --- writing ---

    def offer(self, entry: str, identity: Identity) -> None:
        """Send an entry later, after what it builds on."""
        with self._news:
            full = self._n_to_send() >= _MAX_WAITING
            if not full:
                self._waiting.append(_Send(entry, identity))
                self._news.notify()
        if full:
            self._count("dropped")
            self._once.warning(f"{self} takes less than is stored: entries are not sent")

    def remove(self, contents: Iterable[bytes]) -> None:
        """Remove entries there, by their content hashes, before others are sent."""
        if change := list(contents):
            with self._news:
                self._waiting.appendleft(change)
                self._news.notify()

    def _n_to_send(self) -> int:
        with self._news:
            return sum(isinstance(each, _Send) for each in self._waiting)

    def _write(self) -> None:
        """Do what waits; what the server does not answer to stays and is done again."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting or self._closing.is_set())
            if self._closing.is_set():
                return
            if not self._breaker.allows():
                self._closing.wait(_PAUSE)
                continue
            change = self._waiting[0]
            try:
                self._write_next(change)
                self._answered()
            except RemoteError as error:
                self._failed(error)
                continue
            with self._news:
                self._waiting.remove(change)

    def _write_next(self, change: _Send | list[bytes]) -> None:
        try:
            if isinstance(change, list):
                self._remove(change)
            else:
                self._send(change.entry, change.identity)
        except RefusedError as error:
            if isinstance(change, _Send):
                self._count("refused")
            self._once.warning(f"{self} takes no more: {error}; what is refused is not sent again")
        except EntryError as error:
            _LOG.info("an entry is not sent to %s: %s", self, error)  # evicted meanwhile
        except RemoteError:
            raise
        except Exception as error:  # storing is a service
            _LOG.warning("an entry is not sent to %s: %s: %s", self, type(error).__name__, error)

    def _send(self, entry: str, identity: Identity) -> None:
        """Send an entry, and those it builds on that are not there yet."""
        chain, hashes = self._entries.chain(identity, entry)
        names = [row.content.hex() for row in chain]  # none: evicted meanwhile
        there = self._get([entry_name(name) for name in names])
        for i, (row, data) in enumerate(zip(chain, there, strict=True)):
            is_last = row is chain[-1]
            if data is None or (is_last and _is_better(identity, row, data)):
                self._send_file(row, tuple(names[:i][::-1]))
            if data is None or is_last:
                listed, n = hashes[: row.p1 // BLOCK + 1][boundaries(row)], min(_NAMES, self._backend.fan)
                for begin in range(0, len(listed), n):
                    self._put({at_name(name): row.content for name in listed[begin : begin + n]})

    def _send_file(self, row: EntryRow, above: tuple[str, ...]) -> None:
        sent: list[str] = []
        try:
            with self._entries.open(row) as (file, size):
                manifest = Manifest(replace(row, nbytes=size), above)
                for name, n in manifest.parts:
                    sent.append(name)
                    self._put({name: file.read(n)})
            self._put({manifest.name: manifest.encode()})
        except RefusedError:
            with suppress(RemoteError, RefusedError):
                self._ask(self._backend.delete, sent)  # of no use alone
            raise
        self._count("bytes_written", size)

    def _remove(self, contents: list[bytes]) -> None:
        """Remove entries: descriptions first, since they hold the keys."""
        names = [entry_name(content.hex()) for content in contents]
        parts: list[str] = []
        for data in self._get(names):
            if data is not None:
                with suppress(EntryError):
                    parts += (name for name, _ in Manifest.decode(data).parts)
        for some in (names, parts):
            for begin in range(0, len(some), _NAMES):
                self._ask(self._backend.delete, some[begin : begin + _NAMES])

    # --- asking ---

    def _get(self, names: Sequence[str]) -> list[bytes | None]:
        """Ask for all names, as many at once as are answered in the time of one answer."""
        n = self._backend.fan
        return [
            found for i in range(0, len(names), n) for found in self._ask(self._backend.get, names[i : i + n])
        ]

    def _put(self, values: Mapping[str, bytes]) -> None:
        try:
            self._wait_for(lambda: self._backend.put(values), sum(map(len, values.values())))
        except ValueError as error:  # who may only read
            raise RefusedError(str(error)) from None

    def _ask(self, ask: Callable[..., _T], what: object) -> _T:
        try:
            return self._wait_for(lambda: ask(what))
        except ValueError as error:
            raise RemoteError(str(error)) from None

    def _wait_for(self, ask: Callable[[], _T], n_bytes: int = 0) -> _T:
        future = self._submit(ask)
        try:
            return future.result(self._seconds(n_bytes))
        except TimeoutError:
            future.cancel()
            self._backend.abort()
            raise RemoteError(f"no answer within {self._seconds(n_bytes):.1f} s") from None

    def _submit(self, ask: Callable[[], _T]) -> Future[_T]:
        try:
            return self._askers.submit(ask)
        except RuntimeError:  # closed meanwhile
            raise RemoteError("the store is closed") from None

    def _seconds(self, n_bytes: int) -> float:
        return self._url.timeout + n_bytes / _LEAST_RATE

    def _answered(self) -> None:
        if self._breaker.succeeded():
            _LOG.warning("%s answers again", self)

    def _failed(self, error: RemoteError) -> None:
        self._backend.abort()
        self._count("failures")
        if self._breaker.failed():
            _LOG.warning("%s does not answer: the store goes without it until it does: %s", self, error)

    def _count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def _shut(self) -> None:
        self._backend.close()
        self._askers.shutdown(wait=False, cancel_futures=True)


def _open(url: RemoteURL) -> Backend:
    """Open the client of a URL.

    Raises:
        ValueError: the URL cannot be used, or the package for it is not installed.
    """
    extra = EXTRAS[url.scheme]
    try:
        if extra == "s3":
            from mixedkv.store.remote.objects import ObjectBackend

            return ObjectBackend(url)
        from mixedkv.store.remote.redis_server import RedisBackend

        return RedisBackend(url)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"remote: {url.scheme}:// needs {error.name}, which is not installed: "
            f"pip install 'mixedkv[{extra}]'"
        ) from None


def _is_better(identity: Identity, row: EntryRow, data: bytes) -> bool:
    """Return whether an entry is better than the remote's of the same name. One with another master key is of
    no use.
    """
    try:
        other = Manifest.decode(data).row
    except EntryError:
        return True
    return row.key_id != other.key_id or coverage.is_better_row(
        identity, row.p0, row.p1, row.rows, other.rows
    )
