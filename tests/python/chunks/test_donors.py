"""Donors are ranges of what a store has, found by content. No model here: rows are random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mixedkv.chunks.donors import SHORTEST_QUESTION, Donor, DonorIndex, covered, find_segments
from mixedkv.store import Identity, KVStore
from support.stores.blocks import identity, make_block, put_chain

pytestmark = pytest.mark.full

WHO = identity()


def passage(seed: int, n: int = 60) -> list[int]:
    """A message of its own."""
    return [*np.random.default_rng(seed).integers(1, 900, n - 1).tolist(), 0]


def index(store: KVStore, who: Identity = WHO, **options: Any) -> DonorIndex:
    made = DonorIndex(store, who, **{"chunk_size": 40, "max_donors": 4, **options})
    made.refresh()
    return made


def put(store: KVStore, *passages: list[int], who: Identity = WHO) -> str:
    tokens = [token for each in passages for token in each]
    return store.put(who, make_block(tokens))


def segments(made: DonorIndex, *passages: list[int], low: int = 0) -> list[tuple[int, ...]]:
    """Token 0 ends a message."""
    tokens = np.array([token for each in passages for token in each], np.int32)
    ends = np.where(tokens == 0, 3, 0).astype(np.int8)
    found = find_segments(made, tokens, ends, low=low, window=8)
    for each in found:
        assert np.array_equal(
            each.source.tokens[each.at : each.at + len(each)], tokens[each.begin : each.end]
        )
    return [(each.begin, each.end, each.at) for each in found]


A, B, C, QUESTION = passage(1), passage(2), passage(3), passage(4, 40)


def test_passages_are_found_at_another_place(store: KVStore) -> None:
    put(store, A, B, C)
    assert segments(index(store), C, A, QUESTION) == [(0, 60, 120), (60, 120, 0)]


def test_what_others_branch_off_from_is_still_a_donor(store: KVStore) -> None:
    put(store, A, B)
    store.put(WHO, make_block(C, p0=20), store.find(WHO, np.array(A), max_tokens=20))
    assert segments(index(store), C, B, QUESTION) == [(0, 60, 20), (60, 120, 60)]


def test_passages_that_follow_each_other_are_one_segment(store: KVStore) -> None:
    put(store, A, B, C)
    assert segments(index(store), QUESTION, B, C, QUESTION) == [(40, 160, 60)]


def test_a_segment_grows_as_far_as_its_tokens_agree(store: KVStore) -> None:
    put(store, A, B)
    begun, rest = A[30:], B[:-10]
    assert segments(index(store), QUESTION, begun, B, C, QUESTION) == [(40, 130, 30)]
    assert segments(index(store), QUESTION, A, rest, C, QUESTION) == [(40, 150, 0)]


def test_edges_slide_to_where_something_ends(store: KVStore) -> None:
    """Five tokens of the message before agree as well: they are left out."""
    put(store, A, B)
    assert segments(index(store), QUESTION[:-1], A[-5:], B, C, QUESTION) == [(44, 104, 60)]


def test_the_beginning_and_the_question_are_never_taken_from_elsewhere(store: KVStore) -> None:
    put(store, A, B)
    made = index(store)
    assert segments(made, A, B, low=60) == [(60, 120 - SHORTEST_QUESTION, 60)]
    assert segments(made, A, B, low=80) == []  # what is left is too short


def donors_of(made: DonorIndex, passage: list[int], before: list[int]) -> list[Donor]:
    """Of the first place of a passage behind others."""
    tokens = np.array(before + passage, np.int32)
    return made.find(tokens, next(place for place in made.places(tokens) if place >= len(before)))


def test_the_longest_common_left_context_is_best(store: KVStore) -> None:
    put(store, B)
    put(store, C, B)
    put(store, A, C, B)
    made = index(store)
    assert [donor.at >= 120 for donor in donors_of(made, B, A + C)] == [True, False, False]
    assert donors_of(made, B, passage(9) + C)[0].at >= 60
    assert donors_of(made, B, A + C)[0].common_left(np.array(A + C + B, np.int32)[:120]) <= 120


def test_a_conversation_is_better_than_a_passage_alone(store: KVStore) -> None:
    """Also where the passage alone agrees longer: rows that a sequence begins with are sinks."""
    put(store, A, B)
    put(store, passage(9)[:-1], A, C)
    assert segments(index(store), QUESTION, A, B, QUESTION) == [(40, 100, 59), (100, 160, 60)]


def test_too_short_a_part_of_a_conversation_is_no_better(store: KVStore) -> None:
    put(store, A, B)
    put(store, passage(9)[:-1], A[:38], C)
    assert segments(index(store), QUESTION, A, B, QUESTION) == [(40, 160, 0)]


def test_the_same_rows_are_one_donor(store: KVStore) -> None:
    """A conversation that went on is stored in several entries, of which each has what came before."""
    put_chain(store, WHO, A + B, [60, 120])
    made = index(store)
    put_chain(store, WHO, A + B + C, [60, 120, 180])
    made.refresh()
    assert len(donors_of(made, B, [])) == 1


def test_there_are_max_donors_at_most_and_alone_goes_first(store: KVStore) -> None:
    put(store, B)
    for seed in range(10, 15):
        put(store, passage(seed), B)
    found = donors_of(index(store, max_donors=3), B, [])
    assert len(found) == 3
    assert all(donor.at >= 60 for donor in found)


def test_rows_are_read_where_they_stand_in_several_entries(store: KVStore) -> None:
    put_chain(store, WHO, A + B + C, [60, 120, 180])
    made = index(store)
    (donor, *_) = donors_of(made, B, [])
    blocks = made.read(donor.source, 50, 130)
    assert blocks is not None
    assert [(block.p0, block.p1) for block in blocks] == [(50, 60), (60, 120), (120, 130)]
    assert np.concatenate([block.tokens for block in blocks]).tolist() == (A + B + C)[50:130]


def test_f16_copies_stay_behind() -> None:
    block = make_block(A, kind="q4_0", hot=[3, 4])
    cold = block.without_hot()
    assert len(block.groups[0].hot) == 2
    assert len(cold.groups[0].hot) == len(cold.groups[0].layers[0].k_hot) == 0
    assert cold.tokens is block.tokens


def test_removed_entries_are_forgotten(store: KVStore) -> None:
    entry = put(store, A, B)
    made = index(store)
    assert len(made) >= 2
    store.remove(entry)
    (donor, *_) = donors_of(made, B, [])
    assert made.read(donor.source, 60, 120) is None
    assert donors_of(made, B, []) == []


@pytest.mark.parametrize("other", [identity(tenant="b"), identity("q8_0"), identity(model="b")])
def test_nothing_of_another_identity_is_found(store: KVStore, other: Identity) -> None:
    put(store, A, B, who=other)
    assert len(index(store)) == 0
    assert segments(index(store, other), QUESTION, A, B, QUESTION) == [(40, 160, 0)]


def test_what_is_covered() -> None:
    assert covered([], 3).tolist() == [False] * 3
