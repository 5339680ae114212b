"""What a store finds: the longest prefix that is there and can be used, and no other's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixedkv.kv.rows import UNVERIFIED
from mixedkv.store import Identity, KVStore
from mixedkv.store.index import Index
from support.stores.blocks import identity, make_block, put_chain, same, stored_match

pytestmark = pytest.mark.core

TOKENS = list(range(500, 700))
WHO = identity()


@pytest.fixture(params=["memory", "folder", "encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    folder = None if request.param == "memory" else tmp_path / "kv"
    key = (lambda: b"k" * 32) if request.param == "encrypted" else None
    with KVStore(folder, key=key) as store:
        yield store


def test_what_was_put_is_read(store: KVStore) -> None:
    block = make_block(TOKENS, kind="q4_0", hot=[0, 1, 198, 199])
    store.put(WHO, block)
    match = stored_match(store, WHO, TOKENS)
    assert match.tokens.tolist() == TOKENS
    for _ in range(2):  # reading takes nothing out
        (read,) = store.read(match) or []
        assert same(read, block)
    assert store.stats().n_hits == 2


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 150, 199])
def test_a_match_may_end_anywhere(store: KVStore, n: int) -> None:
    block = make_block(TOKENS)
    store.put(WHO, block)
    match = stored_match(store, WHO, [*TOKENS[:n], 1, 2, 3])
    assert (match.n_tokens, match.exact) == (n, True)
    (read,) = store.read(match) or []
    assert same(read, block.slice(0, n))


def test_a_chain_is_read_in_order(store: KVStore) -> None:
    entries = put_chain(store, WHO, TOKENS, [40, 77, 200])
    match = stored_match(store, WHO, TOKENS[:150])
    assert [link.entry for link in match.links] == entries
    assert [(link.p0, link.end, link.p1) for link in match.links] == [
        (0, 40, 40),
        (40, 77, 77),
        (77, 150, 200),
    ]
    blocks = store.read(match)
    assert blocks is not None
    assert [(block.p0, block.p1) for block in blocks] == [(0, 40), (40, 77), (77, 150)]
    assert np.concatenate([block.tokens for block in blocks]).tolist() == TOKENS[:150]


def test_an_entry_may_build_on_a_part_of_another(store: KVStore) -> None:
    first = make_block(TOKENS)
    store.put(WHO, first)
    other = [*TOKENS[:101], *range(50)]
    parent = stored_match(store, WHO, other)
    assert parent.n_tokens == 101
    second = make_block(other[101:], 101)
    store.put(WHO, second, parent)
    match = stored_match(store, WHO, other)
    assert match.n_tokens == 151
    blocks = store.read(match) or []
    assert same(blocks[0], first.slice(0, 101))
    assert same(blocks[1], second)


def test_where_blocks_come_from(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        put_chain(store, WHO, TOKENS, [40, 77])
        match = stored_match(store, WHO, TOKENS)
        assert (store.read_from(match) or ())[1] == "ram"
    with KVStore(tmp_path) as store:
        blocks, tier = store.read_from(match) or ([], "")
        assert (len(blocks), tier) == (2, "disk")
        store.remove(match.entry)
        assert store.read_from(match) is None


def test_nothing_is_stored_twice(store: KVStore) -> None:
    put_chain(store, WHO, TOKENS, [40, 77])
    put_chain(store, WHO, TOKENS, [40, 77])
    assert len(store.entries()) == 2
    assert store.stats().n_entries == 2


def test_max_tokens(store: KVStore) -> None:
    store.put(WHO, make_block(TOKENS))
    assert stored_match(store, WHO, TOKENS, max_tokens=199).n_tokens == 199


def test_misses(store: KVStore) -> None:
    assert store.find(WHO, TOKENS) is None
    store.put(WHO, make_block(TOKENS))
    assert store.find(WHO, [1, *TOKENS[1:]]) is None
    assert store.find(WHO, []) is None
    assert dict(store.stats().misses) == {"unknown": 3}


@pytest.mark.parametrize("tokens", [[[1, 2]], ["a"], [1.5], [2**31], [None]])
def test_what_is_no_list_of_tokens(store: KVStore, tokens: list) -> None:
    with pytest.raises(ValueError, match=r"tokens=.*: give a flat list"):
        store.find(WHO, tokens)


OTHERS: list[Identity] = [
    identity(tenant="someone else"),
    identity("q8_0"),
    identity("mixed"),
    identity(model="b"),
    identity(adapters=[["c", 1.0]]),
    identity(context={"rope_freq_base": 10_000.0}),
    identity(extra="x"),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda who: str(who.facts) + who.tenant)
def test_never_across_identities(store: KVStore, other: Identity) -> None:
    store.put(WHO, make_block(TOKENS))
    match = store.find(WHO, TOKENS)
    assert store.find(other, TOKENS) is None
    with pytest.raises(ValueError, match="another identity"):
        store.put(other, make_block([1], 200), match)
    store.put(other, make_block(TOKENS[:50], seed=1))
    found = stored_match(store, other, TOKENS)
    assert found.n_tokens == 50
    (block,) = store.read(found) or []
    assert same(block, make_block(TOKENS[:50], seed=1))


def test_a_block_must_follow_its_parent(store: KVStore) -> None:
    store.put(WHO, make_block(TOKENS[:100]))
    match = store.find(WHO, TOKENS, max_tokens=90)
    for parent, p0 in ((None, 100), (match, 0), (match, 100)):
        with pytest.raises(ValueError, match=f"begins at position {p0}"):
            store.put(WHO, make_block(TOKENS[100:], p0), parent)


def test_a_parent_that_is_gone(store: KVStore) -> None:
    entry = store.put(WHO, make_block(TOKENS[:100]))
    match = store.find(WHO, TOKENS)
    store.remove(entry)
    with pytest.raises(LookupError, match="removed"):
        store.put(WHO, make_block(TOKENS[100:], 100), match)
    assert store.read(match) is None  # type: ignore[arg-type]
    assert store.stats().misses["missing"] == 1
    assert store.stats().n_entries == 0


@settings(max_examples=60)
@given(st.data())
def test_the_longest_prefix_is_found(data: st.DataObject) -> None:
    """Against a plain list of all that was stored. Few different tokens, so that much is shared."""
    sequence = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
        lambda runs: [bit for run in runs for bit in [run] * 25]
    )
    stored: list[list[int]] = []
    with KVStore(None) as store:
        for tokens in data.draw(st.lists(sequence, min_size=1, max_size=8)):
            parent = store.find(WHO, tokens)
            p0 = parent.n_tokens if parent else 0
            if p0 < len(tokens):
                store.put(WHO, make_block(tokens[p0:], p0), parent)
            stored.append(tokens)
        expected = data.draw(sequence) + data.draw(st.lists(st.integers(0, 1), max_size=5))
        match = store.find(WHO, expected)
        assert (match.n_tokens if match else 0) == max(_common(expected, tokens) for tokens in stored)
        if match:
            blocks = store.read(match) or []
            assert np.concatenate([block.tokens for block in blocks]).tolist() == expected[: match.n_tokens]


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- where it may be cut ---

MIXED = identity("mixed:threshold=32,group=16,sinks=4")


def hot_at(n: int) -> list[int]:
    """What is F16 in a sequence of n tokens with a window of 32, groups of 16 and 4 sinks."""
    begin = max(0, -(-(n + 1 - 32) // 16) * 16)
    return [*range(min(4, n)), *range(max(4, begin), n)]


def test_a_mixed_cache_is_exact_where_its_window_was_stored(store: KVStore) -> None:
    assert hot_at(100)[4] == 80
    store.put(MIXED, make_block(TOKENS[:100], kind="q4_0", hot=hot_at(100)))
    is_exact = {}
    for n in (100, 99, 96, 95, 90, 36, 3):
        match = stored_match(store, MIXED, TOKENS[:n])
        assert match.n_tokens == n
        is_exact[n] = match.exact
    # At 95 tokens the window begins at 64, of which the rows up to 80 had left it when this was stored.
    assert is_exact == {100: True, 99: True, 96: True, 95: False, 90: False, 36: False, 3: True}
    assert store.find(MIXED, TOKENS[:90], exact_only=True) is None
    assert store.stats().misses == {"inexact": 1}


def test_a_chain_of_a_mixed_cache(store: KVStore) -> None:
    store.put(MIXED, make_block(TOKENS[:100], kind="q4_0", hot=hot_at(100)))
    parent = store.find(MIXED, TOKENS[:100])
    store.put(MIXED, make_block(TOKENS[100:110], 100, kind="q4_0", hot=hot_at(110)), parent)
    match = stored_match(store, MIXED, TOKENS[:110])
    assert (match.n_tokens, match.exact, len(match.links)) == (110, True, 2)
    assert stored_match(store, MIXED, [*TOKENS[:98], 0], exact_only=True).n_tokens == 98


def test_exact_only_goes_back_to_where_it_is_exact(store: KVStore) -> None:
    store.put(MIXED, make_block(TOKENS[:60], kind="q4_0", hot=hot_at(60)))
    parent = store.find(MIXED, TOKENS[:60])
    store.put(MIXED, make_block(TOKENS[60:200], 60, kind="q4_0", hot=hot_at(200)), parent)
    match = stored_match(store, MIXED, TOKENS[:150], exact_only=True)
    assert (match.n_tokens, match.exact, len(match.links)) == (60, True, 1)
    match = stored_match(store, MIXED, TOKENS[:150])
    assert (match.n_tokens, match.exact, len(match.links)) == (150, False, 2)


def test_a_sliding_window_is_cut_only_where_its_rows_are(store: KVStore) -> None:
    who = identity("f16", sliding_window=16)
    store.put(who, make_block(TOKENS[:60], window=list(range(44, 60))))
    parent = store.find(who, TOKENS[:60])
    store.put(who, make_block(TOKENS[60:100], 60, window=list(range(80, 100))), parent)
    found = {}
    for n in (100, 98, 96, 95, 61, 60, 59, 30):
        match = store.find(who, TOKENS[:n])
        found[n] = match.n_tokens if match else 0
    assert found == {100: 100, 98: 98, 96: 96, 95: 60, 61: 60, 60: 60, 59: 0, 30: 0}
    assert store.stats().misses == {"window": 2}


def test_rows_that_are_missing_without_a_window_are_not_used(store: KVStore) -> None:
    store.put(WHO, make_block(TOKENS[:60], window=list(range(44, 60))))
    assert store.find(WHO, TOKENS) is None
    assert store.stats().misses == {"window": 1}


def test_a_better_block_takes_the_place_of_a_poor_one(store: KVStore) -> None:
    """Of the same tokens with more F16 rows at its end; what builds on it, and its session, stay."""
    poor = make_block(TOKENS[:100], kind="q4_0", hot=[])
    whole = make_block(TOKENS[:100], kind="q4_0", hot=hot_at(100))
    first = store.put(MIXED, poor, session="a")
    parent = store.find(MIXED, TOKENS[:100])
    child = store.put(MIXED, make_block(TOKENS[100:], 100, kind="q4_0", hot=hot_at(200)), parent)
    assert store.find(MIXED, TOKENS[:100], exact_only=True) is None
    second = store.put(MIXED, whole)
    assert store.put(MIXED, poor) == store.put(MIXED, whole) == second != first
    match = stored_match(store, MIXED, TOKENS, exact_only=True)
    assert [link.entry for link in match.links] == [second, child]
    assert same((store.read(match) or [])[0], whole)
    assert len(store.entries()) == 2
    assert store.remove(session="a") == 2


# --- how much work it is ---


def test_a_search_looks_at_some_of_many(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands that branch off at one place, and once only at each: what they share is found."""
    system = list(range(100))
    store.put(WHO, make_block(system))
    parent = store.find(WHO, system)
    for i in range(400):
        store.put(WHO, make_block([1000 + i, *range(100)], 100, n_layers=1), parent)
    loaded: list[str] = []
    get = Index.get
    monkeypatch.setattr(Index, "get", lambda index, entry: loaded.append(entry) or get(index, entry))
    assert stored_match(store, WHO, [*system, 7, *range(500)]).n_tokens == 100
    assert 1 < len(loaded) == len(set(loaded)) <= 256
    assert stored_match(store, WHO, [*system, 1399, *range(100)]).n_tokens == 201


def test_rows_of_which_nothing_is_known_are_not_stored(store: KVStore) -> None:
    with pytest.raises(ValueError, match="its row at position 0 is doubted, and only those of an evaluation"):
        store.put(identity(), make_block(list(range(3, 67)), validity=UNVERIFIED))
