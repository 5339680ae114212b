"""Which sequence has which rows, without a context."""

from __future__ import annotations

import numpy as np

from mixedkv.config import UniformKV
from mixedkv.engine.sequences import NO_MATCH, Sequence, SequencePool
from mixedkv.hot_window import HotWindow


class FakeMemory:
    """Rows as sets of sequence ids, as a unified cache has them."""

    used = 0

    def __init__(self, can_cut: bool) -> None:
        self.can_cut = can_cut
        self.calls: list[tuple[object, ...]] = []

    def remove(self, seq: int, p0: int = 0) -> None:
        self.calls.append(("rm", seq, p0))

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        self.calls.append(("cp", source, target, p1))


F16 = UniformKV().window


def make_pool(
    n: int = 3, window: HotWindow = F16, *, can_cut: bool = True, **options: int
) -> tuple[SequencePool, FakeMemory]:
    memory = FakeMemory(can_cut)
    return SequencePool(memory, n, window, **options), memory


def tokens(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int32)


def run(
    pool: SequencePool, prompt: np.ndarray, tenant: str = "", release: bool = True, keep: bool = False
) -> Sequence:
    """A job on a prompt, all of it evaluated."""
    seq = pool.acquire(tenant, pool.match(tenant, prompt))
    assert seq is not None
    seq.tokens.extend(prompt[len(seq.tokens) :].tolist())
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


def test_a_snapshot_is_copied_again_and_again() -> None:
    """In a mixed cache it is the only sequence that still has the F16 rows at that length."""
    pool, memory = make_pool(4, HotWindow(32, 16, 4))
    first = run(pool, tokens(0, 50), release=False)
    pool.snapshot(first)
    first.tokens.extend(tokens(500, 600).tolist())
    pool.release(first)
    for start in (1000, 2000, 3000):
        memory.calls.clear()
        assert run(pool, np.r_[tokens(0, 50), tokens(start, start + 60)]).id != 1
        assert memory.calls[-1][:2] == ("cp", 1)
        assert pool.held()[1].tokens.tolist() == list(range(50))


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
    pool, _ = make_pool(can_cut=False)
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
    window = HotWindow(32, 16, 4)
    pool, _ = make_pool(window=window)
    run(pool, tokens(0, 200))
    match = pool.match("", np.r_[tokens(0, 100), tokens(500, 600)])
    assert (match.n, match.approximate) == (0, 100)
    assert pool.match("", tokens(0, 300)).n == 200
    loose, _ = make_pool(window=window, exact_only=False)
    run(loose, tokens(0, 200))
    match = loose.match("", np.r_[tokens(0, 100), tokens(500, 600)])
    assert (match.n, match.exact) == (100, False)
