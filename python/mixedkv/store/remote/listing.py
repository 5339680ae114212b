"""Finds entries in a remote by the hashes of their tokens, without a shared index.

    at/HASH             content hash of the last entry that was stored over this block boundary
    entry/CONTENT       the entry's row, and how its file is cut
    piece/ID/I          piece I of its file, as it would lie on a disk

A boundary has a name if those before it in the same prompt have one, so a few questions find the last. What
is missing or of another is a miss: an entry is written before the boundaries that name it, its pieces before
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mixedkv.store.entry_row import FIELDS, EntryError, EntryRow, sound_row
from mixedkv.store.lookup import BLOCK

_VERSION = 1
PIECE = 2 << 20  # bytes of a piece: larger ones are not faster, smaller ones are
_MAX_PIECES = 1 << 20
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
    def pieces(self) -> list[tuple[str, int]]:
        """Their names and sizes."""
        n = self.row.nbytes
        return [
            (f"v{_VERSION}/piece/{self.row.id}/{i}", min(PIECE, n - i * PIECE)) for i in range(-(-n // PIECE))
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
        if row is None or row.nbytes > PIECE * _MAX_PIECES:
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
