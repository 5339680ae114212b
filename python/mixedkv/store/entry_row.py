"""A row of the index, which has all of an entry but its KV, and the reasons why an entry cannot be used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from mixedkv.limits import INT32_MAX

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryRow:
    """An entry as the index has it.

    Args:
        content: hash of the identity, all tokens up to `p1`, and `p0`; unique.
        tokens: of [p0, p1), int32 little-endian; encrypted in a store with a key.
        rows: the positions that have rows, as text, see `coverage`.
        nbytes: of the file; of the arrays, where there is no folder.
        key_id, key: name of the master key, and the data key wrapped by it; both empty without encryption.
        created, used: seconds since 1970.
    """

    id: str
    content: bytes
    identity: bytes
    label: str
    parent: str | None
    p0: int
    p1: int
    tokens: bytes
    rows: str
    nbytes: int
    key_id: str
    key: bytes
    created: float
    used: float


FIELDS = tuple(field.name for field in fields(EntryRow))
_TYPES = (str, bytes, bytes, str, (str, type(None)), int, int, bytes, str, int, str, bytes, float, float)


@dataclass(frozen=True, slots=True)
class Owner:
    """An entry's tenant, and what the tenant may have.

    Args:
        tenant: a hash of its name.
        weight: its share compared with other tenants.
        max_bytes: of its files; None for no limit of its own.
        sessions: a hash of who removes its sessions, empty for nobody.
    """

    tenant: bytes = b""
    weight: float = 1.0
    max_bytes: int | None = None
    sessions: bytes = b""


NOBODY = Owner()


def sound_row(values: Sequence[object]) -> EntryRow | None:
    """Return the row made of values in the order of `FIELDS`; None if no writer can have written them."""
    kinds: tuple[Any, ...] = _TYPES
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        return None
    named: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
    row = EntryRow(**named)
    whole = _ID.fullmatch(row.id) and 0 <= row.p0 < row.p1 <= INT32_MAX and row.nbytes >= 0
    return row if whole else None


Reason = Literal[
    "unknown",  # nothing stored begins like these tokens
    "window",  # the stored entry lacks rows that a sliding window needs there
    "inexact",  # an exact restore was asked for, and only an inexact one is possible
    "missing",  # the file is gone
    "damaged",  # the file or its row in the index is not what was written
    "version",  # of another version of the format
    "identity",  # of another model, setting or tenant, or another entry
    "key",  # encrypted with another master key
    "tokens",  # the file has other tokens than the index says
    "wrong",  # evaluating its tokens again gives other rows
    "refused",  # the cache does not take it
    "index",  # the index cannot be read
]
REASONS: tuple[str, ...] = get_args(Reason)

EXPLAINED = {
    "unknown": "nothing stored begins like this",
    "window": "what is stored lacks rows of a sliding window there, or a recurrent state",
    "inexact": "what is stored is exact at another place only",
    "key": "what is stored is encrypted with another key",
    "index": "the index cannot be read",
}


class EntryError(Exception):
    """An entry that cannot be used; `reason` says in one word why, the message in a line."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason

    def __str__(self) -> str:
        return f"{self.reason}: {super().__str__()}"
