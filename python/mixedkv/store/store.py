"""KV that is kept: put under its tokens, found again by them."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from mixedkv.ids import check_session_id, check_tenant
from mixedkv.kv.block import KVBlock
from mixedkv.store import coverage
from mixedkv.store.encryption import Cipher, KeyCipher, KeySource, PlainCipher
from mixedkv.store.entries import Entries, ParentGoneError, SessionRemovedError, TooLargeError, store_root
from mixedkv.store.entry_error import EntryError
from mixedkv.store.identity import Identity
from mixedkv.store.index import Eviction
from mixedkv.store.lookup import BLOCK
from mixedkv.store.results import EntryInfo, GCResult, Match, Restored, Saved, StoreStats, Tier, Verified
from mixedkv.tokens import Tokens, as_tokens

if TYPE_CHECKING:
    from mixedkv.llama import Llama

_LOG = logging.getLogger("mixedkv.store")
_GB = 10**9
_TRIES = 16  # entries that one restore passes over before it gives up


class KVStore:
    """Blocks of KV in memory and in a folder, found by the tokens they were computed from.

    Reading takes nothing out. What cannot be read is a miss with a reason, and is removed, so that it can be
    stored again. Several stores, in one process or several, may share a folder; one store may be used by
    several threads.

    Args:
        folder: where entries live; made if it is not there. None keeps them in memory only.
        max_ram_bytes: blocks kept in memory at most, 0 for none.
        max_kv_size_gb: files in the folder at most, in 10^9 bytes.
        eviction: what leaves first when a budget is full: "lru", the least recently used, or "oldest". What
            others build on leaves after them.
        key: where the master key comes from, e.g. `key_from_file(path)` or a callable that returns 32 bytes;
            None stores without encryption.
        check_key: refuse a folder whose entries are encrypted, none of them with this key.

    Raises:
        ValueError: a setting is wrong, or the key is not the folder's.
        OSError: the folder or the key cannot be read or written.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        max_ram_bytes: int = 2**30,
        max_kv_size_gb: float = 10.0,
        eviction: Eviction = "lru",
        key: KeySource | None = None,
        check_key: bool = True,
    ) -> None:
        if eviction not in get_args(Eviction):
            raise ValueError(f"eviction={eviction!r}: use one of {', '.join(get_args(Eviction))}")
        max_ram_bytes = int(_check_number("max_ram_bytes", max_ram_bytes))
        max_disk_bytes = int(_check_number("max_kv_size_gb", max_kv_size_gb) * _GB)
        self._cipher: Cipher = PlainCipher() if key is None else KeyCipher(key)
        self._has_folder = folder is not None
        self._entries = Entries(
            store_root(folder) if folder is not None else None,
            self._cipher,
            max_bytes=max_ram_bytes if folder is None else max_disk_bytes,
            max_ram_bytes=max_ram_bytes,
            eviction=eviction,
        )
        if check_key:
            try:
                _check_key(self._entries.key_ids(), self._cipher.key_id, folder)
            except BaseException:
                self._entries.close()
                raise
        self._lock = Lock()
        self._hits: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._tokens_hit = self._n_restored = 0
        self._seconds = 0.0

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write down what was used when, and let go of the index. Can be called again."""
        self._entries.close()

    # --- finding and reading ---

    def find(
        self,
        identity: Identity,
        tokens: npt.ArrayLike,
        *,
        max_tokens: int | None = None,
        exact_only: bool = False,
    ) -> Match | None:
        """The longest stored prefix of some tokens that can be used, or None, counted as a miss.

        Args:
            identity: what the KV must have been computed under.
            tokens: token ids from position 0.
            max_tokens: match this many at most.
            exact_only: leave out what would be restored approximately, see `Match.exact`.

        Raises:
            ValueError: the tokens are no token ids.
        """
        match, reason = self._entries.find(identity, as_tokens(tokens)[:max_tokens], exact_only)
        if match is None:
            self._miss(reason)
        return match

    def read(self, match: Match) -> list[KVBlock] | None:
        """The blocks of a match in order of position, cut to it; None is a miss, counted with its reason."""
        found = self.read_from(match)
        return found[0] if found else None

    def read_from(self, match: Match) -> tuple[list[KVBlock], Tier] | None:
        """As `read`, and where they came from: "ram", or "disk" if any of them did."""
        try:
            blocks, tier = self._entries.read(match)
        except EntryError as error:
            self._miss(error.reason)
            return None
        self._hit(tier, match.n_tokens)
        return blocks, tier

    def restore(
        self,
        llm: Llama,
        tokens: npt.ArrayLike,
        seq: int = 0,
        *,
        identity: Identity | None = None,
        tenant: str = "",
        max_tokens: int | None = None,
        exact_only: bool = False,
    ) -> Restored:
        """Put the longest stored prefix of some tokens into a sequence.

        What the sequence holds is dropped at a hit and stays at a miss; only after the miss "refused" it is
        empty. Nothing about the store makes this raise.

        Args:
            llm: with the same model and settings as what is stored, which the identity sees to.
            tokens: token ids from position 0.
            seq: the sequence.
            identity: of `llm`; made from it and the tenant if None.
            max_tokens, exact_only: as in `find`.

        Raises:
            ValueError: the tokens are no token ids, the context has no such sequence, or the tenant's name is
                refused.
        """
        begin = time.perf_counter()
        wanted = as_tokens(tokens)[:max_tokens]
        _check_sequence(llm, seq)
        check_tenant(tenant)
        try:
            identity = identity or Identity.of(llm, tenant=tenant)
        except (OSError, ValueError) as error:
            restored = self._missed(EntryError("identity", f"it cannot be computed: {error}"))
        else:
            restored = self._restore(llm, wanted, seq, identity, exact_only)
        seconds = time.perf_counter() - begin
        if restored.hit:
            with self._lock:
                self._n_restored += 1
                self._seconds += seconds
        return replace(restored, seconds=seconds)

    def _restore(
        self, llm: Llama, tokens: Tokens, seq: int, identity: Identity, exact_only: bool
    ) -> Restored:
        missed: Restored | None = None
        for _ in range(_TRIES):
            match, reason = self._entries.find(identity, tokens, exact_only)
            if match is None:
                return missed or self._missed(EntryError(reason, _EXPLAINED.get(reason, "")))
            try:
                blocks, tier = self._entries.read(match)
                _load(llm, blocks, seq)
            except EntryError as error:
                missed = self._missed(error)
                if error.reason in ("refused", "index"):
                    break
            else:
                self._hit(tier, match.n_tokens)
                passed_over = missed.reason if missed else ""
                return Restored(
                    n_tokens=match.n_tokens, exact=match.exact, tier=tier, seconds=0, reason=passed_over
                )
        assert missed is not None
        return missed

    # --- storing ---

    def put(
        self, identity: Identity, block: KVBlock, parent: Match | None = None, *, session: str | None = None
    ) -> str:
        """Store a block and return the id of its entry; if it is there already, of that.

        Args:
            identity: what the block was computed under.
            block: its arrays are kept in memory and must not be written to any more.
            parent: what covers the tokens before the block, [0, block.p0); None if it begins at 0.
            session: the session that the block and what it builds on belong to.

        Raises:
            LookupError: the parent has been removed meanwhile; `find` it again.
            ValueError: the block does not follow its parent, is larger than the budget together with what it
                builds on, or the session has been removed or its name is refused.
            OSError: it cannot be written.
        """
        return self._put(identity, block, parent, session)[0]

    def _put(
        self, identity: Identity, block: KVBlock, parent: Match | None, session: str | None
    ) -> tuple[str, bool]:
        member = None if session is None else self._session_hash(check_session_id(session), identity.tenant)
        if parent is not None and parent.identity != identity:
            raise ValueError("parent: it was computed under another identity")
        if block.p0 != (parent.n_tokens if parent else 0):
            raise ValueError(
                f"block: it begins at position {block.p0}, its parent ends at "
                f"{parent.n_tokens if parent else 0}; cut the match or export another range"
            )
        return self._entries.write(identity, block, parent, member)

    def save(
        self,
        llm: Llama,
        tokens: npt.ArrayLike | None = None,
        seq: int = 0,
        *,
        identity: Identity | None = None,
        tenant: str = "",
        session: str | None = None,
    ) -> Saved:
        """Store a sequence: only what is not stored yet, or not as exactly, is copied out of the cache.

        Of the tokens that the `Llama` itself evaluated, only those are stored whose rows are what evaluating
        them from the start gives (`llm.kv.exact_tokens`).

        Args:
            llm: the cache is its.
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
        _check_sequence(llm, seq)
        wanted = as_tokens(_known_tokens(llm, seq) if tokens is None else tokens)
        if not len(wanted):
            raise ValueError("tokens: there are none to store")
        if session is not None:
            check_session_id(session)
        identity = identity or Identity.of(llm, tenant=tenant)
        wanted = wanted[: _exact_tokens(llm, wanted, seq)]
        entry, block, reason = "", None, ""
        try:
            if len(wanted):
                entry, block = self._save(llm, wanted, seq, identity, session)
            else:
                reason = "none of the rows are what evaluating the tokens from the start gives"
        except (ParentGoneError, SessionRemovedError, TooLargeError, OSError) as error:
            reason = str(error)
            _LOG.warning("%d tokens could not be stored: %s", len(wanted), reason)
        return Saved(
            entry=entry,
            n_tokens=len(wanted),
            n_stored=len(block) if block else 0,
            nbytes=block.nbytes if block else 0,
            seconds=time.perf_counter() - begin,
            reason=reason,
        )

    def _save(
        self,
        llm: Llama,
        tokens: Tokens,
        seq: int,
        identity: Identity,
        session: str | None,
        again: bool = True,
    ) -> tuple[str, KVBlock | None]:
        n = len(tokens)
        match, _ = self._entries.find(identity, tokens, exact_only=False)
        whole = match if match is not None and match.n_tokens == n else None
        if whole is not None and whole.exact:
            return self._keep(identity, whole, session), None
        parent = _worth_building_on(match, coverage.window_begin(identity, n))
        p0 = parent.n_tokens if parent else 0
        block = llm.kv.export(seq, p0, n, tokens[p0:])
        worth = coverage.verdict_of_end(identity, coverage.of_block(block), p0, n)
        if whole is not None and worth != "exact":
            return self._keep(identity, whole, session), None
        try:
            entry, stored = self._put(identity, block, parent, session)
        except ParentGoneError:  # evicted between finding and storing
            if not again:
                raise
            return self._save(llm, tokens, seq, identity, session, again=False)
        return entry, block if stored else None

    def _keep(self, identity: Identity, match: Match, session: str | None) -> str:
        """What is there already belongs to the session too."""
        if session is not None:
            members = [link.entry for link in match.links]
            self._entries.add_to_session(self._session_hash(session, identity.tenant), members)
        return match.entry

    # --- looking after it ---

    def remove(self, entry: str | None = None, *, session: str | None = None, tenant: str = "") -> int:
        """Remove an entry, or a session's entries that belong to no other; and all that builds on them.

        A session that was removed gets no new entries: what is under way does not bring it back. With
        encryption keys are destroyed; while another program reads the index they stay in its log, and
        `stats().unerased` is true. Returns how many entries are gone, 0 if there was none.

        Raises:
            ValueError: not exactly one of `entry` and `session` is given, or the name is refused.
        """
        if (entry is None) == (session is None):
            raise ValueError("remove: give either an entry or a session")
        if session is not None:
            check_session_id(session)
            return self._entries.remove_session(self._session_hash(session, check_tenant(tenant)))
        return self._entries.remove(str(entry))

    def verify(self) -> Verified:
        """Read every file of the store from beginning to end; what is damaged is removed."""
        return self._entries.verify()

    def gc(self) -> GCResult:
        """Remove files that were left behind, entries whose file is gone, and what is over the budget."""
        return self._entries.collect()

    def entries(self) -> list[EntryInfo]:
        """All entries, last used first."""
        return self._entries.list()

    def stats(self) -> StoreStats:
        """What the store holds, and what was done with it since it was opened."""
        n_entries, n_bytes = self._entries.totals()
        counts, ram = self._entries.counts, self._entries.ram
        with self._lock:
            return StoreStats(
                n_entries=n_entries,
                bytes_disk=n_bytes if self._has_folder else 0,
                n_ram=len(ram),
                bytes_ram=ram.n_bytes,
                hits=dict(self._hits),
                misses=dict(self._misses),
                tokens_hit=self._tokens_hit,
                bytes_read=counts["bytes_read"],
                bytes_written=counts["bytes_written"],
                n_evicted=counts["evicted"],
                unerased=self._entries.unerased,
                n_restored=self._n_restored,
                seconds_restoring=self._seconds,
            )

    def _session_hash(self, session: str, tenant: str) -> bytes:
        return self._cipher.digest(b"session" + json.dumps([tenant, session]).encode())[:16]

    def _hit(self, tier: Tier, n_tokens: int) -> None:
        with self._lock:
            self._hits[tier] += 1
            self._tokens_hit += n_tokens

    def _miss(self, reason: str) -> None:
        with self._lock:
            self._misses[reason] += 1

    def _missed(self, error: EntryError) -> Restored:
        self._miss(error.reason)
        return Restored(n_tokens=0, exact=True, tier="none", seconds=0, reason=str(error))


_EXPLAINED = {
    "unknown": "nothing stored begins like this",
    "window": "what is stored lacks rows of a sliding window there",
    "inexact": "what is stored is exact at another place only",
    "key": "what is stored is encrypted with another key",
    "index": "the index cannot be read",
}


def _load(llm: Llama, blocks: list[KVBlock], seq: int) -> None:
    """Replace what a sequence holds."""
    try:
        _empty(llm, seq)
        for block in blocks:
            llm.kv.load(block, seq)
    except (ValueError, LookupError) as error:
        _empty(llm, seq)
        raise EntryError("refused", str(error)) from error


def _empty(llm: Llama, seq: int) -> None:
    llm.kv.remove(seq)


def _known_tokens(llm: Llama, seq: int) -> npt.ArrayLike:
    if seq != 0:
        raise ValueError(f"tokens: give the ids of sequence {seq}; the Llama knows those of sequence 0 only")
    return llm.input_ids[: llm.n_tokens]


def _exact_tokens(llm: Llama, tokens: Tokens, seq: int) -> int:
    """How many of a sequence's tokens may be stored; what is done through llama.cpp's own functions is not
    known here, but to who does it.
    """
    n = len(tokens)
    if seq != 0 or llm.n_tokens < n or not np.array_equal(llm.input_ids[:n], tokens):
        return n
    return min(n, llm.kv.exact_tokens)


def _check_sequence(llm: Llama, seq: int) -> None:
    """llama.cpp would end the process, or take -1 for all sequences."""
    n = llm.kv.stats().n_seq_max
    if isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq < n:
        raise ValueError(f"seq={seq!r}: use a number from 0 to {n - 1}")


def _worth_building_on(match: Match | None, window: int) -> Match | None:
    """Without a last entry of which a few tokens would be used: it would have to be read whole for them. Of
    what is not exact, only what lies before the window, whose rows are then stored in F16.
    """
    if match is None:
        return None
    links = match.links
    if not match.exact:
        links = tuple(replace(link, end=min(link.end, window)) for link in links if link.p0 < window)
    while links and links[-1].end < links[-1].p1 and links[-1].end - links[-1].p0 < BLOCK:
        links = links[:-1]
    if not links:
        return None
    return replace(match, links=links, tokens=match.tokens[: links[-1].end])


def _check_key(stored: set[str], given: str, folder: str | Path | None) -> None:
    encrypted = stored - {""}
    if encrypted and given not in encrypted:
        what = "with another key: give that one" if given else "with a key: give it"
        raise ValueError(f"{folder}: what is stored there is encrypted {what}, or use another folder")


def _check_number(field: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field}={value!r}: use a number")
    if not 0 <= value < 2**50:
        raise ValueError(f"{field}={value}: use a number from 0 to {2**50}")
    return value
