"""Returns the owners of entries and sessions, as hashes."""

from __future__ import annotations

import json
from collections.abc import Callable

from mixedkv.store.encryption import Cipher
from mixedkv.store.entry_row import Owner
from mixedkv.store.identity import Identity
from mixedkv.store.results import Share


class Ownership:
    """Hashes the names of tenants, sessions and owners for a store.

    Args:
        shares: returns a tenant's share, given its name; all are equal if None.
        session_owner: the program that removes the stored sessions; "" for none.
    """

    def __init__(
        self, cipher: Cipher, shares: Callable[[str], Share] | None = None, session_owner: str = ""
    ) -> None:
        self._cipher, self._shares, self._session_owner = cipher, shares, session_owner

    def of(self, identity: Identity) -> Owner:
        share = self._shares(identity.tenant) if self._shares is not None else Share()
        return Owner(
            tenant=share.owner or self._cipher.digest(b"tenant" + identity.tenant.encode())[:16],
            weight=share.weight,
            max_bytes=share.max_bytes,
            sessions=self.of_sessions,
        )

    @property
    def of_sessions(self) -> bytes:
        """Empty for nobody."""
        owner = self._session_owner
        return self._cipher.digest(b"session owner" + owner.encode())[:16] if owner else b""

    def session(self, session: str, tenant: str) -> bytes:
        return self._cipher.digest(b"session" + json.dumps([tenant, session]).encode())[:16]
