"""Which sequence has which rows, without a context."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import Any

import numpy as np
import pytest

from mixedkv._core import HotWindow
from mixedkv.config.cut_rule import CutRule
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.kv.rows import APPROXIMATE, COMPUTED, Validities
from mixedkv.prefix.checkpoints import CheckpointLimits
from mixedkv.prefix.sequences import NO_MATCH, Sequence, SequenceMatch, SequencePool
from mixedkv.prompts.overflow import DroppedTokens, LongPrompt
from mixedkv.work.turns import TenantLimits

pytestmark = pytest.mark.core


class FakeMemory:
    """Rows as sets of sequence ids, as a unified cache has them."""

    used = 0
    n_seq = 0

    def __init__(self, rule: CutRule) -> None:
        self.rule = rule
        self.calls: list[tuple[object, ...]] = []
        self.lengths: dict[int, int] = {}  # of sequences that are saved
        self.lost: set[int] = set()  # sequences whose windows went
        self.refuses = False
        self.short: dict[int, int] = {}
        self.released: set[int] = set()

    def remove(self, seq: int, p0: int = 0) -> None:
        self.calls.append(("rm", seq, p0))

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        self.calls.append(("cp", source, target, p1))

    def checkpoint(self, seq: int) -> Checkpoint:
        n = self.lengths[seq]
        state = np.zeros(1000, np.uint8)
        return Checkpoint(n=n, first=self.rule.saved_from(n), state=state)

    def validity(self, seq: int, tokens: Any, p0: int = 0) -> Validities:
        short = self.short.get(seq, p0 + len(tokens))
        return np.array([COMPUTED if p0 + i < short else APPROXIMATE for i in range(len(tokens))], np.uint8)

    def resume(self, point: Checkpoint, n: int, source: int, target: int) -> None:
        if self.refuses:
            raise ValueError("it does not fit")
        self.calls.append(("resume", point.n, n, source, target))

    def holds(self, seq: int, n: int) -> bool:
        return seq not in self.lost

    def release_hot_rows(self, seq: int) -> None:
        self.released.add(seq)

    def hold_hot_rows(self, seq: int) -> None:
        self.released.discard(seq)


F16 = CutRule()
MIXED = CutRule(HotWindow(32, 16, 4))
RECURRENT = CutRule(recurrent=True)


def make_pool(n: int = 3, rule: CutRule = F16, **options: Any) -> tuple[SequencePool, FakeMemory]:
    memory = FakeMemory(rule)
    memory.n_seq = n
    return SequencePool(memory, n, rule, **options), memory


def tokens(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int32)


def run(
    pool: SequencePool,
    prompt: np.ndarray,
    tenant: str = "",
    release: bool = True,
    keep: bool = False,
    save_at: Sequence_[int] = (),
) -> Sequence:
    """A job on a prompt, all of it evaluated."""
    seq = pool.acquire(tenant, pool.match(tenant, prompt))
    assert seq is not None
    for n in [*save_at, len(prompt)]:
        if n > len(seq.tokens):
            seq.tokens.extend(prompt[len(seq.tokens) : n].tolist())
            if n in save_at:
                pool._memory.lengths[seq.id] = n  # type: ignore[attr-defined]
                pool.save(seq)
    if release:
        pool.release(seq, keep)
    return seq


def kept(pool: SequencePool, tenant: str, n: int) -> list[Sequence]:
    """Warmed prefixes that have nothing in common."""
    first = 10_000 * ord(tenant)
    return [run(pool, tokens(first + 100 * i, first + 100 * i + 50), tenant, keep=True) for i in range(n)]


def test_warmed_prefixes_leave_half_of_the_places_to_others() -> None:
    pool, _ = make_pool(8, max_kept=4)
    assert len({id(seq) for seq in kept(pool, "a", 16)}) == 8
    ordinary = [run(pool, tokens(100 * i, 100 * i + 50), "b") for i in range(4)]
    assert [seq.tenant for seq in ordinary] == ["b"] * 4
    assert sorted(seq.tenant for seq in pool.idle()) == ["a"] * 4 + ["b"] * 4
    run(pool, tokens(5000, 5050), "b")  # from now on these are its own
    assert sorted(seq.tenant for seq in pool.idle()) == ["a"] * 4 + ["b"] * 4


def test_a_tenant_keeps_as_many_as_it_may() -> None:
    limits = {"a": TenantLimits(kept=1), "c": TenantLimits(kept=9)}
    pool, _ = make_pool(8, max_kept=4, most_kept=lambda tenant: limits[tenant].kept)
    kept(pool, "a", 4)
    kept(pool, "c", 4)
    order = [seq.tenant for seq in pool.idle()]  # of eviction; two places for each tenant
    assert order == ["a", "a", "a", "c", "c", "a", "c", "c"]


def test_who_keeps_prefixes_shares_their_places() -> None:
    pool, _ = make_pool(8, max_kept=4)
    kept(pool, "a", 16)
    kept(pool, "b", 2)
    for i in range(20):
        run(pool, tokens(100 * i, 100 * i + 50), "c")
    assert sorted(seq.tenant for seq in pool.idle() if seq.keep) == ["a", "a", "b", "b"]


def test_a_warmed_prefix_beyond_the_share_is_still_copied() -> None:
    pool, _ = make_pool(4, max_kept=1)
    first, _ = kept(pool, "a", 2)
    prompt = tokens(970_000, 970_080)
    assert run(pool, prompt, "a") is not first
    assert len(first.tokens) == 50


def test_an_idle_sequence_is_continued() -> None:
    pool, memory = make_pool()
    first = run(pool, tokens(0, 100))
    assert pool.match("", tokens(0, 150)).n == 100
    assert run(pool, tokens(0, 150)) is first
    assert memory.calls == []


def test_a_running_sequence_is_copied() -> None:
    pool, memory = make_pool()
    first = run(pool, tokens(0, 100), release=False)
    second = run(pool, np.r_[tokens(0, 60), tokens(500, 540)], release=False)
    assert second is not first
    assert memory.calls == [("cp", first.id, second.id, 60)]


def test_the_whole_prompt_is_never_taken() -> None:
    pool, _ = make_pool()
    run(pool, tokens(0, 100))
    assert pool.match("", tokens(0, 100)).n == 99


def test_a_kept_prefix_is_copied_and_leaves_last() -> None:
    pool, _ = make_pool(3)
    kept = run(pool, tokens(0, 50), keep=True)
    other = run(pool, tokens(1000, 1050))
    assert run(pool, tokens(0, 80)) is not kept
    assert [pool.evict() for _ in range(3)] == [True] * 3
    assert not pool.evict()
    assert not kept.tokens
    assert not other.tokens


def test_eviction_takes_what_was_used_the_longest_ago() -> None:
    pool, memory = make_pool(3)
    a, b, c = (run(pool, tokens(i * 1000, i * 1000 + 50)) for i in range(3))
    run(pool, tokens(0, 60))  # uses a again
    assert [seq.id for seq in pool.idle()] == [b.id, c.id, a.id]
    d = run(pool, tokens(9000, 9050))
    assert d is b
    assert memory.calls == [("rm", b.id, 0)]


def test_a_prefix_that_is_shared_is_in_use() -> None:
    pool, _ = make_pool(3)
    shared = run(pool, tokens(0, 100))
    other = run(pool, tokens(5000, 5050))
    run(pool, np.r_[tokens(0, 60), tokens(1000, 1040)])
    assert pool.idle()[0] is other
    assert shared.tokens


def test_a_prompt_goes_on_from_a_checkpoint_again_and_again() -> None:
    """The F16 copies at that length have gone with the tokens that followed."""
    pool, memory = make_pool(4, MIXED)
    first = run(pool, np.r_[tokens(0, 50), tokens(500, 600)], save_at=[50])
    for start in (1000, 2000, 3000):
        memory.calls.clear()
        prompt = np.r_[tokens(0, 50), tokens(start, start + 60)]
        match = pool.match("", prompt)
        assert (match.n, match.exact) == (50, True)
        assert run(pool, prompt) is not first
        assert ("resume", 50, 50, first.id, memory.calls[-1][-1]) == memory.calls[-1]


def test_a_checkpoint_serves_what_its_window_reaches() -> None:
    pool, _ = make_pool(4, MIXED)
    run(pool, tokens(0, 300), save_at=[100])
    first = MIXED.saved_from(100)
    assert 100 - 16 <= first < 100
    for n in (first, 100):
        assert pool.match("", np.r_[tokens(0, n), tokens(900, 950)]).n == n
    assert pool.match("", np.r_[tokens(0, first - 1), tokens(900, 950)]).n == 0
    assert pool.match("", np.r_[tokens(0, 150), tokens(900, 950)]).n == 100


@pytest.mark.parametrize("rule", [RECURRENT, CutRule(sliding=24)])
def test_a_state_is_resumed_at_the_last_checkpoint_before_an_edit(rule: CutRule) -> None:
    pool, memory = make_pool(4, rule)
    source = run(pool, tokens(0, 300), save_at=[50, 120, 200])
    match = pool.match("", np.r_[tokens(0, 199 - 5), tokens(900, 950)])
    assert (match.n, match.exact, match.longest) == (120, True, 194)
    seq = pool.acquire("", match)
    assert memory.calls[-1] == ("resume", 120, 120, source.id, seq.id)
    assert [point.n for point in seq.checkpoints] == [50, 120]
    assert len(seq.tokens) == 120


def test_a_checkpoint_that_does_not_fit_is_forgotten() -> None:
    pool, memory = make_pool(4, RECURRENT)
    source = run(pool, tokens(0, 300), save_at=[100])
    memory.refuses = True
    prompt = np.r_[tokens(0, 150), tokens(900, 950)]
    assert pool.acquire("", pool.match("", prompt)) is None
    assert source.checkpoints == []
    assert pool.match("", prompt).n == 0
    assert len(source.tokens) == 300


def test_an_idle_sequence_that_lost_its_window_is_asked_first() -> None:
    pool, memory = make_pool(4, MIXED)
    seq = run(pool, tokens(0, 300), save_at=[260])
    match = pool.match("", tokens(0, 400))
    assert match.n == 300
    memory.lost = {seq.id}
    assert not pool.confirm(match)
    match = pool.match("", tokens(0, 400))
    assert (match.n, match.checkpoint.n) == (260, 260)
    assert pool.confirm(match)


def test_checkpoints_are_counted_and_bounded() -> None:
    pool, _ = make_pool(4, RECURRENT, limits=CheckpointLimits(per_sequence=4, max_bytes=6500))
    a = run(pool, tokens(0, 1000), save_at=list(range(100, 1000, 100)))
    assert [point.n for point in a.checkpoints][0::3] == [100, 900]
    assert len(a.checkpoints) == 4
    b = run(pool, tokens(2000, 3000), save_at=list(range(100, 1000, 100)))
    assert len(b.checkpoints) == 4
    assert len(a.checkpoints) == 2  # 6500 bytes are six, and it was used before the other
    assert sum(point.nbytes for point in pool.checkpoints) <= 6500
    pool.drop(a)
    assert len(pool.checkpoints) == 4


def test_without_checkpoints_nothing_is_kept() -> None:
    pool, _ = make_pool(4, RECURRENT, limits=CheckpointLimits(per_sequence=0))
    assert run(pool, tokens(0, 100), save_at=[50]).checkpoints == []


def test_a_prefix_whose_f16_rows_made_room_is_not_exact() -> None:
    pool, memory = make_pool(4, MIXED, exact_only=False)
    seq = run(pool, tokens(0, 50))
    memory.lost.add(seq.id)
    match = pool.match("", tokens(0, 60))
    assert match.exact
    assert not pool.confirm(match)
    assert pool.match("", tokens(0, 60)) == SequenceMatch(seq, 50, False, 50)


def test_a_paused_answer_goes_on_without_its_f16_rows_and_says_so() -> None:
    pool, memory = make_pool(4, MIXED)
    seq = run(pool, tokens(0, 50), release=False)
    pool.pause(seq)
    memory.lost.add(seq.id)
    assert pool.own_rows(seq, "", tokens(0, 51)) == SequenceMatch(seq, 50, False, 0)


def test_what_was_evaluated_without_f16_rows_is_not_exact() -> None:
    pool, memory = make_pool(4, MIXED)
    first, other = (run(pool, tokens(at, at + 50), release=False) for at in (0, 1000))
    assert pool.is_exact(first)
    memory.short[first.id] = 40
    assert not pool.is_exact(first)
    assert pool.is_exact(first, end=40)
    assert pool.is_exact(other)


def test_checkpoints_from_before_f16_rows_made_room_stay_exact() -> None:
    pool, memory = make_pool(4, MIXED)
    seq = run(pool, tokens(0, 300), save_at=[100], release=False)
    memory.short[seq.id] = 250
    pool.release(seq)
    pool.save(seq)
    assert [point.n for point in seq.checkpoints] == [100]  # none of rows that are not exact
    match = pool.match("", tokens(0, 400))
    assert (match.n, match.exact, match.checkpoint.n) == (100, True, 100)


def test_f16_rows_of_idle_sequences_are_free_until_they_go_on() -> None:
    pool, memory = make_pool(4, MIXED)
    exact, short = (run(pool, tokens(at, at + 50), release=False) for at in (0, 1000))
    memory.short[short.id] = 40
    for seq in (exact, short):
        memory.lengths[seq.id] = 50
        pool.save(seq)
        assert seq.id not in memory.released
        pool.release(seq)
        pool.save(seq)
    assert memory.released == {exact.id, short.id}
    assert run(pool, tokens(0, 80), release=False) is exact
    assert memory.released == {short.id}


def test_nothing_is_found_of_another_tenant() -> None:
    pool, _ = make_pool()
    run(pool, tokens(0, 100), tenant="a")
    assert pool.match("b", tokens(0, 100)) == NO_MATCH
    assert pool.match("", tokens(0, 100)) == NO_MATCH


def test_all_running_is_no_place() -> None:
    pool, _ = make_pool(2)
    for i in range(2):
        run(pool, tokens(i * 1000, i * 1000 + 50), release=False)
    assert pool.acquire("", NO_MATCH) is None


def test_a_memory_that_cannot_be_cut_shares_whole_sequences_only() -> None:
    pool, _ = make_pool(rule=RECURRENT)
    run(pool, tokens(0, 100))
    assert pool.match("", tokens(0, 90)).n == 0
    assert pool.match("", tokens(0, 101)).n == 100


def test_a_forgotten_session_leaves_nothing() -> None:
    pool, _ = make_pool()
    seq = run(pool, tokens(0, 100), tenant="a", release=False)
    pool.release(seq, keep=True, session="s")
    pool.forget("b", "s")
    assert pool.match("a", tokens(0, 100)).n == 99
    pool.forget("a", "s")
    assert pool.match("a", tokens(0, 100)).n == 0


def test_a_mixed_cache_is_cut_only_where_it_is_exact() -> None:
    pool, _ = make_pool(rule=MIXED)
    run(pool, tokens(0, 200))
    match = pool.match("", np.r_[tokens(0, 100), tokens(500, 600)])
    assert (match.n, match.longest) == (0, 100)
    assert pool.match("", tokens(0, 300)).n == 200
    loose, _ = make_pool(rule=MIXED, exact_only=False)
    run(loose, tokens(0, 200))
    match = loose.match("", np.r_[tokens(0, 100), tokens(500, 600)])
    assert (match.n, match.exact) == (100, False)


def test_a_paused_sequence_goes_back_as_far_as_it_may() -> None:
    pool, memory = make_pool()
    seq = run(pool, tokens(0, 40), release=False)
    pool.pause(seq)
    other_end = np.concatenate([tokens(0, 36), tokens(90, 95)])
    assert pool.own_rows(seq, "", other_end, most_cut=3) == NO_MATCH
    assert pool.own_rows(seq, "someone", other_end, most_cut=4) == NO_MATCH
    assert len(seq.tokens) == 40
    match = pool.own_rows(seq, "", other_end, most_cut=4)
    assert (match.source, match.n) == (seq, 36)
    assert memory.calls[-1] == ("rm", seq.id, 36)
    again = pool.own_rows(seq, "", tokens(0, 36), most_cut=4)  # the last one is evaluated again
    assert again.n == len(seq.tokens) == 35


def test_long_prompts_are_told_apart_by_what_is_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing in a sequence is read where nothing else says no: it may be millions of tokens."""
    hashed: list[int] = []
    is_of = DroppedTokens.is_of
    monkeypatch.setattr(
        DroppedTokens,
        "is_of",
        lambda part, whole: hashed.append(len(whole)) or is_of(part, whole),
    )
    pool, rng = make_pool()[0], np.random.default_rng(0)
    prompts = [rng.integers(0, 999, 5000).astype(np.int32) for _ in range(2)]
    longs = [LongPrompt(prompt, 4, 512) for prompt in prompts]
    seq = pool.acquire("", NO_MATCH)
    assert seq is not None
    n = longs[0].to_drop()
    seq.dropped_tokens = longs[0].dropped_tokens(n)
    seq.tokens.extend(longs[0].without(n).tolist())
    pool.release(seq)
    assert pool.match_long("", longs[1])[0].n == 0
    assert not hashed
    match, dropped = pool.match_long("", longs[0])
    assert (match.n, dropped, len(hashed)) == (len(seq.tokens) - 1, n, 1)
