"""The store: keeps KV under its tokens and finds it again by them."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

import numpy.typing as npt

from mixedkv.ids import check_session_id, check_tenant
from mixedkv.kv.block import KVBlock
from mixedkv.kv.fetched import Fetched, WrongRowsError
from mixedkv.kv.row_setting import difference
from mixedkv.kv.row_source import RowSource, check_sequence, exact_tokens, known_tokens
from mixedkv.kv.rows import NAMES
from mixedkv.sizes import GB, size_of
from mixedkv.store import coverage
from mixedkv.store.encryption import PLAIN_ENTRIES, Cipher, KeyCipher, KeySource, PlainCipher, check_key_id
from mixedkv.store.entries import Entries, TooLargeError
from mixedkv.store.entry_row import EXPLAINED, EntryError, Owner, Reason
from mixedkv.store.eviction import EVICTIONS, Eviction
from mixedkv.store.folder import store_root
from mixedkv.store.identity import Identity
from mixedkv.store.index import ParentGoneError
from mixedkv.store.lookup import worth_building_on
from mixedkv.store.message_ids import MessageIds
from mixedkv.store.recheck import Recheck
from mixedkv.store.remote.shared_entries import SharedEntries
from mixedkv.store.remote.tier import RemoteTier
from mixedkv.store.results import (
    NOTHING_SAVED,
    EntryInfo,
    GCResult,
    Match,
    Restored,
    Saved,
    Share,
    StoreStats,
    Tally,
    Tier,
    Verified,
)
from mixedkv.store.session_rows import SessionRemovedError
from mixedkv.tokens import Tokens, as_tokens

_LOG = logging.getLogger("mixedkv.store")


class KVStore:
    """A store of KV blocks in memory, in a folder and on a server, found by the tokens they were computed
    from.

    Reading removes nothing. An entry that cannot be read is a miss with a reason, and is removed so that it
    can be stored again. Several stores, in one process or several, may share a folder, and several threads
    may use one store. `messages` maps ids of chat messages to the entries that hold them.

    Args:
        folder: folder for entries, created if it is missing. None keeps them in memory only.
        max_ram_bytes: maximum size of the blocks kept in memory, 0 for none; a number or e.g. "2GiB".
        max_kv_size_gb: maximum size of the files in the folder, in 10^9 bytes, or e.g. "20GiB".
        eviction: which entry is evicted first when a budget is full: "lru", the least recently used;
            "oldest"; or "gdsf", which weighs how often an entry was used, how long ago, and the work to
            evaluate it for its size (GreedyDual-Size-Frequency). Entries that others build on leave after
            them.
        max_age_seconds: entries that were not used for so long are removed when the store is opened and by
            `gc`; None keeps them. An entry that a younger one builds on stays with it.
        key: where the master key comes from, e.g. `key_from_file(path)` or a callable that returns 32 bytes;
            None stores without encryption.
        check_key: refuse a folder that was encrypted, but not with this key.
        shares: returns a tenant's share of the folder, given its name; all are equal if None.
        session_owner: id of the program that removes the sessions stored here, see `remove_orphans`; "" for
            none.
        remote: URL of a server that is shared with other stores, redis://... or s3://..., see docs/store.md.
        recheck: before the first use of an entry that another process stored, evaluate some of its tokens
            again, and remove it if its rows differ.

    Raises:
        ValueError: a setting is wrong, the key is not the folder's, or the remote refuses us.
        OSError: the folder or the key cannot be read or written.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        max_ram_bytes: int | str = 2**30,
        max_kv_size_gb: float | str = 10.0,
        eviction: Eviction = "lru",
        max_age_seconds: float | None = None,
        key: KeySource | None = None,
        check_key: bool = True,
        shares: Callable[[str], Share] | None = None,
        session_owner: str = "",
        remote: str | None = None,
        recheck: bool = True,
    ) -> None:
        if eviction not in EVICTIONS:
            raise ValueError(f"eviction={eviction!r}: use one of {', '.join(EVICTIONS)}")
        max_ram_bytes = size_of("max_ram_bytes", max_ram_bytes)
        max_disk_bytes = size_of("max_kv_size_gb", max_kv_size_gb, GB)
        if max_age_seconds is not None:
            _check_number("max_age_seconds", max_age_seconds)
        self._cipher: Cipher = PlainCipher() if key is None else KeyCipher(key)
        self.folder = Path(folder) if folder is not None else None
        self._shares, self._session_owner = shares, session_owner
        self._remote: RemoteTier | None = None
        kind = Entries if remote is None else SharedEntries
        self._entries = kind(
            store_root(folder) if folder is not None else None,
            self._cipher,
            max_bytes=max_ram_bytes if folder is None else max_disk_bytes,
            max_ram_bytes=max_ram_bytes,
            eviction=eviction,
            max_age_seconds=max_age_seconds,
            owner=self._owner,
        )
        self.messages = MessageIds(self._entries, self._cipher)
        self._tally = Tally()
        self.recheck = Recheck(self._entries, self._tally, recheck)
        try:
            if check_key:
                check_key_id(key_ids := self._entries.key_ids(), self._cipher.key_id, folder)
                if key is not None and "" in key_ids:
                    _LOG.warning(PLAIN_ENTRIES, folder)
            self._entries.adopt_key(note=check_key)
            if n := self._entries.remove_expired():
                _LOG.info("%d entries were removed that were not used for %.0f s", n, max_age_seconds)
            if remote is not None and isinstance(self._entries, SharedEntries):
                self._remote = RemoteTier(remote, self._entries, self._cipher)
        except BaseException:
            self._entries.close()
            raise

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Send the entries that wait for the remote, write the times of last use, and close the index. Can be
        called again.
        """
        if self._remote is not None:
            self._remote.close()
        self._entries.close()

    # --- finding and reading ---

    def find(
        self,
        identity: Identity,
        tokens: npt.ArrayLike,
        *,
        max_tokens: int | None = None,
        exact_only: bool = False,
        remote: bool = True,
    ) -> Match | None:
        """Find the longest stored prefix of some tokens that can be used. None is counted as a miss.

        Args:
            identity: what the KV must have been computed under.
            tokens: token ids from position 0.
            max_tokens: match this many at most.
            exact_only: ignore entries that would be restored approximately, see `Match.exact`.
            remote: also look in the remote, and wait for it.

        Raises:
            ValueError: the tokens are no token ids.
        """
        find = self._find if remote else self._entries.find
        match, reason = find(identity, as_tokens(tokens)[:max_tokens], exact_only)
        if match is None:
            self._tally.miss(reason)
        return match

    def _find(self, identity: Identity, tokens: Tokens, exact_only: bool) -> tuple[Match | None, Reason]:
        """Find a match here, and in the remote if it has more."""
        found = self._entries.find(identity, tokens, exact_only)
        n = found[0].n_tokens if found[0] is not None else 0
        if self._remote is not None and self._remote.pull(identity, tokens, n, exact_only):
            return self._entries.find(identity, tokens, exact_only)
        return found

    def sequences(self, identity: Identity, known: Collection[str] = ()) -> list[Match]:
        """Return all that is stored under an identity: a match for each sequence that no other continues.

        Args:
            identity: what the KV was computed under.
            known: last entries of sequences to leave out.
        """
        return self._entries.sequences(identity, known)

    def find_session(self, identity: Identity, session: str, n_tokens: int) -> Match | None:
        """Find the first tokens of the longest sequence that belongs to a session. None is counted as a miss.

        Raises:
            ValueError: the session's name is refused.
        """
        member = self._session(session, identity.tenant)
        match = self._entries.session_match(identity, member, n_tokens)
        if match is None:
            self._tally.miss("unknown")
        return match

    def read(self, match: Match) -> list[KVBlock] | None:
        """Read the blocks of a match in order of position, cut to it. None is a miss, counted with its
        reason.
        """
        found = self.read_from(match)
        return found[0] if found else None

    def read_from(self, match: Match, begin: int = 0) -> tuple[list[KVBlock], Tier] | None:
        """Read as `read` does, and return where the blocks came from: "ram", or "disk" or "remote" if any of
        them did.

        Args:
            match: from `find` or `sequences`.
            begin: blocks that end before this position are left out.
        """
        try:
            return self.read_stored(match, begin)
        except EntryError:
            return None

    def read_stored(self, match: Match, begin: int = 0) -> tuple[list[KVBlock], Tier]:
        """Read as `read_from` does.

        Raises:
            EntryError: an entry is damaged, has gone, or cannot be read; it is counted as a miss.
        """
        try:
            blocks, tier = self._entries.read(match, begin)
        except EntryError as error:
            self._tally.miss(error.reason)
            raise
        self._tally.hit(tier, match.n_tokens - begin)
        return blocks, tier

    def restore(
        self,
        llm: RowSource,
        tokens: npt.ArrayLike,
        seq: int = 0,
        *,
        identity: Identity | None = None,
        tenant: str = "",
        max_tokens: int | None = None,
        exact_only: bool = False,
    ) -> Restored:
        """Put the longest stored prefix of some tokens into a sequence.

        The sequence is replaced at a hit and stays at a miss, except that after the miss "refused" it is
        empty. Problems of the store raise no exception.

        Args:
            llm: the `Llama`; its identity must be that of the stored entries.
            tokens: token ids from position 0.
            seq: the sequence.
            identity: of `llm`; made from it and the tenant if None.
            max_tokens, exact_only: as in `find`.

        Raises:
            ValueError: the tokens are no token ids, the context has no such sequence, or the tenant's name is
                refused.
        """
        begin = time.perf_counter()
        requested = as_tokens(tokens)[:max_tokens]
        check_sequence(llm, seq)
        check_tenant(tenant)
        try:
            identity = identity or Identity.of(llm, tenant=tenant)
        except (OSError, ValueError) as error:
            restored = self._missed(EntryError("identity", f"it cannot be computed: {error}"))
        else:
            restored = self._restore(llm, requested, seq, identity, exact_only)
        seconds = time.perf_counter() - begin
        if restored.hit:
            self._tally.add(n_restored=1, seconds_restoring=seconds)
        return replace(restored, seconds=seconds)

    def _restore(
        self, llm: RowSource, tokens: Tokens, seq: int, identity: Identity, exact_only: bool
    ) -> Restored:
        """Restore the longest match that can be read and is right; what is not is removed on the way."""
        missed: Restored | None = None
        for _ in range(_TRIES):
            match, reason = self._find(identity, tokens, exact_only)
            if match is None:
                return missed or self._missed(EntryError(reason, EXPLAINED.get(reason, "")))
            try:
                blocks, tier = self._entries.read(match)
                _load(llm, seq, Fetched(blocks, tier, match.exact, self.recheck.unverified(match, llm)))
            except EntryError as error:
                missed = self._missed(error)
                if error.reason in ("refused", "index"):
                    break
            else:
                self._tally.hit(tier, match.n_tokens)
                n, passed_over = match.n_tokens, missed.reason if missed else ""
                exact = llm.kv.exact(seq, match.tokens) >= n and llm.kv.holds(seq, n)
                return Restored(n_tokens=n, exact=exact, tier=tier, seconds=0, reason=passed_over)
        assert missed is not None
        return missed

    def _missed(self, error: EntryError) -> Restored:
        self._tally.miss(error.reason)
        return Restored(n_tokens=0, exact=True, tier="none", seconds=0, reason=str(error))

    # --- storing ---

    def put(
        self, identity: Identity, block: KVBlock, parent: Match | None = None, *, session: str | None = None
    ) -> str:
        """Store a block and return the id of its entry, or of the one that is there already.

        Args:
            identity: what the block was computed under.
            block: its arrays are kept in memory and must not be written to any more.
            parent: match that covers the tokens before the block, [0, block.p0); None if it begins at 0.
            session: the session that the block and what it builds on belong to.

        Raises:
            LookupError: the parent has been removed meanwhile; `find` it again.
            ValueError: the block does not follow its parent, is larger than the budget together with what it
                builds on, is foreign, has rows that are not exact, or was computed under another setting than
                the identity's; or the session has been removed or its name is refused.
            OSError: it cannot be written.
        """
        return self._put(identity, block, parent, session)[0]

    def _put(
        self, identity: Identity, block: KVBlock, parent: Match | None, session: str | None
    ) -> tuple[str, bool]:
        member = None if session is None else self._session(session, identity.tenant)
        if parent is not None and parent.identity != identity:
            raise ValueError("parent: it was computed under another identity")
        if block.foreign:
            raise ValueError("block: another program made its rows: compare them with `load_packed` first")
        if block.n_exact < len(block):
            raise ValueError(
                f"block: its row at position {block.p0 + block.n_exact} is "
                f"{NAMES[block.validity[block.n_exact]]}, and only those of an evaluation from the start are "
                f"stored: export the rows before it"
            )
        if identity.setting and block.setting != identity.setting:
            reason = difference(block.setting, identity.setting)
            raise ValueError(f"block: computed under another setting than the identity's: {reason}")
        if block.p0 != (parent.n_tokens if parent else 0):
            raise ValueError(
                f"block: it begins at position {block.p0}, its parent ends at "
                f"{parent.n_tokens if parent else 0}; cut the match or export another range"
            )
        entry, stored = self._entries.write(identity, block, parent, member)
        if stored:
            self.recheck.believe([entry])
        if stored and self._remote is not None:
            self._remote.offer(entry, identity)
        return entry, stored

    def save(
        self,
        llm: RowSource,
        tokens: npt.ArrayLike | None = None,
        seq: int = 0,
        *,
        identity: Identity | None = None,
        tenant: str = "",
        session: str | None = None,
    ) -> Saved:
        """Store a sequence. Only rows that are not stored yet, or not as exactly, are copied out of the
        cache.

        Of the tokens that the `Llama` itself evaluated, only those are stored whose rows equal those of an
        evaluation from the start (`llm.kv.exact_tokens`).

        Args:
            llm: the `Llama` that has the cache.
            tokens: token ids of the sequence from position 0; None are those that the `Llama` itself
                evaluated (sequence 0). Give all of the sequence: a mixed cache or sliding window restored to
                an earlier place may lack its recent rows.
            seq: the sequence.
            identity: of `llm`; made from it and the tenant if None.
            session: the session that the tokens belong to, besides those they belong to already.

        Raises:
            LookupError: the sequence does not have these positions.
            ValueError: there are no tokens, the context has no such sequence, the model's file was replaced,
                or the tenant's or the session's name is refused.
            UnsupportedModelError: the model keeps more than rows of tokens.
        """
        begin = time.perf_counter()
        check_sequence(llm, seq)
        requested = as_tokens(known_tokens(llm, seq) if tokens is None else tokens)
        if not len(requested):
            raise ValueError("tokens is empty: give one token or more")
        if session is not None:
            check_session_id(session)
        identity = identity or Identity.of(llm, tenant=tenant)
        requested = requested[: exact_tokens(llm, requested, seq)]

        def export(p0: int, p1: int) -> KVBlock:
            return llm.kv.export(seq, p0, p1, requested[p0:p1])

        saved, reason = NOTHING_SAVED, ""
        try:
            if not len(requested):
                reason = _why_inexact(llm, seq, identity)
            else:
                saved = self.keep(identity, requested, export, session=session)
                reason = saved.reason
        except (ParentGoneError, SessionRemovedError, TooLargeError, OSError) as error:
            reason = str(error)
        if reason and len(requested):
            _LOG.warning("%d tokens could not be stored: %s", len(requested), reason)
        seconds = time.perf_counter() - begin
        return replace(saved, n_tokens=len(requested), seconds=seconds, reason=reason)

    def keep(
        self,
        identity: Identity,
        tokens: Tokens,
        export: Callable[[int, int], KVBlock | None],
        *,
        session: str | None = None,
        most: int | None = None,
    ) -> Saved:
        """Store what is not stored yet of a sequence, or not as exactly.

        Args:
            identity: what it was computed under.
            tokens: all of its tokens; at least one.
            export: copies the rows at [p0, p1) out of the cache; None where they have gone.
            session: the session that the tokens belong to.
            most: store blocks of so many tokens, each of which builds on the one before; None makes one.

        Returns:
            What was stored; `n_tokens` of the tokens are in the store now.

        Raises:
            LookupError, ValueError, OSError: as in `put`.
        """
        n, window, begin, saved = len(tokens), coverage.window_begin(identity, len(tokens)), -1, NOTHING_SAVED
        for attempt in itertools.count():
            match, _ = self._entries.find(identity, tokens, exact_only=False)
            whole = match if match is not None and match.n_tokens == n else None
            if whole is not None and whole.exact:
                return replace(saved, entry=self._join(whole, session), n_tokens=n)
            parent = worth_building_on(match, window)
            p0 = parent.n_tokens if parent else 0
            # the last block has the whole F16 window
            p1 = n if most is None or p0 + most > window else p0 + most
            if p0 <= begin or (block := export(p0, p1)) is None:  # removed meanwhile, or the budget is small
                return replace(saved, n_tokens=p0)
            verdict = coverage.verdict_of_end(identity, coverage.of_block(block), p0, p1)
            exact = verdict == "exact" and block.n_exact == len(block)
            if p1 == n and whole is not None and not exact:
                return replace(saved, entry=self._join(whole, session), n_tokens=n)
            if p1 == n and verdict == "unusable" and identity.recurrent:
                return replace(saved, entry="", n_tokens=p0, reason=_NO_STATE)
            try:
                entry, is_new = self._put(identity, block, parent, session)
            except ParentGoneError:  # evicted between finding and storing
                if attempt:
                    raise
                continue
            begin = p0
            n_new, nbytes = (len(block), block.nbytes) if is_new else (0, 0)
            saved = replace(saved, entry=entry, n_stored=saved.n_stored + n_new, nbytes=saved.nbytes + nbytes)
            if p1 == n:
                break
        return replace(saved, n_tokens=n)

    def _join(self, match: Match, session: str | None) -> str:
        if session is not None:
            self.add_to_session(match, session)
        return match.entry

    def add_to_session(self, match: Match, session: str) -> None:
        """Add the entries of a match to a session.

        Raises:
            ValueError: the session has been removed, or its name is refused.
            OSError: it cannot be written.
        """
        member = self._session(session, match.identity.tenant)
        self._entries.add_to_session(member, [link.entry for link in match.links], match.identity)

    # --- removing ---

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        """Remove an entry, or the entries that belong to one session alone, with all that builds on them.

        A session that was removed gets no new entries, even if work for it is under way. With encryption the
        keys are destroyed; while another program reads the index they stay in its log, and `stats().unerased`
        is true. Returns how many entries were removed.

        Raises:
            ValueError: not exactly one of `entry` and `session` is given, or the name is refused.
        """
        if (entry is None) == (session is None):
            raise ValueError("remove: give either an entry or a session")
        if session is not None:
            return self._entries.remove_session(self._session(session, check_tenant(tenant)))
        return self._entries.remove(str(entry))

    def remove_orphans(self, living: Iterable[tuple[str, str]], before: float) -> int:
        """Remove the sessions of this store's `session_owner` that are not among the living and whose first
        entry was stored before a time (seconds since 1970), with the entries that belong to no other session.
        Return how many sessions.

        Args:
            living: tenants and sessions.
        """
        if not self._session_owner:
            return 0
        hashes = {self._session(session, tenant) for tenant, session in living}
        return self._entries.remove_orphans(self._owner_of_sessions, hashes, before)

    # --- whose it is, as hashes ---

    def _owner(self, identity: Identity) -> Owner:
        share = self._shares(identity.tenant) if self._shares is not None else Share()
        return Owner(
            tenant=share.owner or self._cipher.name(b"tenant", identity.tenant),
            weight=share.weight,
            max_bytes=share.max_bytes,
            sessions=self._owner_of_sessions,
        )

    @property
    def _owner_of_sessions(self) -> bytes:
        return self._cipher.name(b"session owner", self._session_owner) if self._session_owner else b""

    def _session(self, session: str, tenant: str) -> bytes:
        """Return the hash of a session's name; ValueError if it is refused."""
        return self._cipher.name(b"session", json.dumps([tenant, check_session_id(session)]))

    # --- looking after it ---

    def verify(self) -> Verified:
        """Read every file of the store from beginning to end and remove damaged entries."""
        return self._entries.verify()

    def gc(self) -> GCResult:
        """Remove files that were left behind, entries whose file is gone or that were not used for
        `max_age_seconds`, and entries over the budget.
        """
        return self._entries.collect()

    def entries(self) -> list[EntryInfo]:
        """Return all entries, last used first."""
        return self._entries.list()

    def stats(self) -> StoreStats:
        """Return the contents of the store, and counts since it was opened."""
        n_entries, n_bytes = self._entries.totals()
        counts, ram = self._entries.counts, self._entries.ram
        return StoreStats(
            n_entries=n_entries,
            bytes_disk=n_bytes if self.folder is not None else 0,
            n_ram=len(ram),
            bytes_ram=ram.n_bytes,
            bytes_read=counts["bytes_read"],
            bytes_written=counts["bytes_written"],
            n_evicted=counts["evicted"],
            n_expired=counts["expired"],
            unerased=self._entries.unerased,
            remote=self._remote.stats() if self._remote is not None else None,
            **self._tally.stats(),
        )


def _why_inexact(llm: RowSource, seq: int, identity: Identity) -> str:
    """Return why none of a sequence's rows are stored."""
    setting = llm.kv.setting_of(seq, 0)
    differs = difference(setting, identity.setting) if setting else ""
    return "none of the rows are what evaluating the tokens from the start gives" + (
        differs and f": {differs}"
    )


_TRIES = 16  # entries that cannot be read before a restore gives up
_NO_STATE = "nothing could go on from it: the recurrent layers have no state of that position any more"


def _load(llm: RowSource, seq: int, fetched: Fetched) -> None:
    """Put rows in the place of what a sequence holds.

    Raises:
        EntryError: the cache refuses them, or they are not the model's.
    """
    llm.kv.remove(seq)
    try:
        while not fetched.is_loaded:
            fetched.advance(llm.kv, seq)
    except WrongRowsError as error:
        raise EntryError("wrong", str(error)) from error
    except (ValueError, LookupError) as error:
        raise EntryError("refused", str(error)) from error


def _check_number(field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field}={value!r}: use a number")
    if not 0 <= value < 2**50:
        raise ValueError(f"{field}={value}: use a number from 0 to {2**50}")
