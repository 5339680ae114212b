"""Maps ids of chat messages to entries, and removes a message's KV by its id.

A row is removed with its entry.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable

from mixedkv.ids import check_id, check_tenant
from mixedkv.store.encryption import Cipher
from mixedkv.store.entries import Entries
from mixedkv.store.identity import Identity
from mixedkv.store.results import Match, MessageInfo

_MOST = 100_000  # message ids of one tenant, as clients can make any number up
_ROWS = """
SELECT message_id, messages.n_tokens, entries.id, entries.p0, CAST(entries.nbytes AS INTEGER),
    CAST(entries.created AS REAL), CAST(entries.used AS REAL), entries.label
FROM messages JOIN entries ON entries.id = messages.entry
"""


class MessageIds:
    """The message ids of a store, each visible to its tenant alone. Thread-safe.

    The index has ids as they are; names of tenants are hashed.
    """

    def __init__(self, entries: Entries, cipher: Cipher) -> None:
        self._entries, self._cipher = entries, cipher

    def note(self, match: Match, ends: Iterable[tuple[str, int]]) -> None:
        """Note in which entries of a stored sequence messages end.

        Args:
            match: the sequence; its identity has the tenant.
            ends: ids, and how many tokens the sequence has up to the end of each; those after the end of the
                match are ignored.

        Raises:
            OSError: the index cannot be written.
        """
        tenant, now = self._tenant(match.identity.tenant), time.time()
        rows = []
        for message_id, end in ends:
            entry = next((link.entry for link in match.links if 0 < end <= link.end), None)
            if entry is not None:
                rows.append((tenant, message_id, end, now, entry))
        if not rows:
            return

        def write(db: sqlite3.Connection) -> None:
            db.executemany(
                "INSERT OR REPLACE INTO messages (tenant, message_id, n_tokens, noted, entry) "
                "SELECT ?, ?, ?, ?, id FROM entries WHERE id = ?",
                rows,
            )
            db.execute(
                "DELETE FROM messages WHERE tenant = ? AND number <= (SELECT number FROM messages "
                "WHERE tenant = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (tenant, tenant, _MOST),
            )

        self._entries.change(write)

    def entries(self, tenant: str | None = None, message_id: str | None = None) -> list[MessageInfo]:
        """Return the entries that messages end in, the latest first: for one tenant, or all if it is None;
        for one message if it is given. A message in several conversations may end in several entries.

        Raises:
            ValueError: a name is refused.
            OSError: the index cannot be read.
        """
        conditions, values = ["1"], list[object]()
        if tenant is not None:
            conditions.append("tenant = ?")
            values.append(self._tenant(check_tenant(tenant)))
        if message_id is not None:
            conditions.append("message_id = ?")
            values.append(check_id("message_id", message_id))
        query = f"{_ROWS} WHERE {' AND '.join(conditions)} ORDER BY messages.number DESC"
        rows = self._entries.read_rows(query, values)
        return [
            MessageInfo(
                message_id=str(row[0]),
                n_tokens=int(row[1]),
                entry=str(row[2]),
                p0=int(row[3]),
                nbytes=row[4],
                created=row[5],
                used=row[6],
                label=str(row[7]),
            )
            for row in rows
        ]

    def sequences(self, identity: Identity, message_id: str) -> list[tuple[int, Match]]:
        """Return the sequences up to a message's end, each with the begin of the entry that the message ends
        in.
        """
        found = []
        for info in self.entries(identity.tenant, message_id):
            match = self._entries.sequence(identity, info.entry, info.n_tokens)
            if match is not None:
                found.append((info.p0, match))
        return found

    def remove(self, message_id: str, tenant: str = "") -> int:
        """Remove the entries that a message ends in and all that builds on them; return how many.

        An entry can hold several messages: the others go with it and are evaluated again when needed.

        Raises:
            ValueError: a name is refused.
            OSError: the index cannot be written.
        """
        entries = {info.entry for info in self.entries(tenant, message_id)}
        return sum(self._entries.remove(entry) for entry in entries)

    def _tenant(self, tenant: str) -> bytes:
        return self._cipher.name(b"messages of", json.dumps(tenant))
