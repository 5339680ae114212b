"""Entries that a former version stored do not say what their rows are: they are found, and nobody vouches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv.kv.rows import COMPUTED, DOUBTED
from mixedkv.store import KVStore
from mixedkv.store.lookup import worth_building_on
from support.store_support import identity, make_block, stored_match

pytestmark = pytest.mark.core

FOLDER = Path(__file__).parents[1] / "golden" / "store-v1"
TOKENS = list(range(3, 67))  # of its one entry


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    shutil.copytree(FOLDER, tmp_path / "kv")
    with KVStore(tmp_path / "kv") as store:
        yield store


def test_they_are_found_and_not_exact(store: KVStore) -> None:
    match = stored_match(store, identity(), TOKENS)
    assert (match.n_tokens, match.exact, match.computed) == (64, False, False)
    assert store.find(identity(), TOKENS, exact_only=True) is None
    assert store.stats().misses == {"inexact": 1}


def test_their_rows_are_doubted(store: KVStore) -> None:
    (block,) = store.read(store.find(identity(), TOKENS))  # type: ignore[arg-type,misc]
    assert np.array_equal(block.tokens, TOKENS)
    assert (block.validity == DOUBTED).all()
    assert block.n_exact == 0


def test_what_is_stored_anew_takes_their_place(store: KVStore) -> None:
    assert worth_building_on(store.find(identity(), TOKENS), 64) is None
    store.put(identity(), make_block(TOKENS))
    match = stored_match(store, identity(), TOKENS, exact_only=True)
    assert match.exact
    (block,) = store.read(match)  # type: ignore[misc]
    assert (block.validity == COMPUTED).all()
    assert len(store.entries()) == 1


def test_what_builds_on_them_is_not_exact(store: KVStore) -> None:
    store.put(identity(), make_block([7, 8], 64), store.find(identity(), TOKENS))
    match = stored_match(store, identity(), [*TOKENS, 7, 8])
    assert (match.n_tokens, match.exact) == (66, False)
    assert [link.computed for link in match.links] == [False, True]


def test_rows_that_say_nothing_are_not_stored(store: KVStore) -> None:
    with pytest.raises(ValueError, match="its row at position 0 is doubted, and only those of an evaluation"):
        store.put(identity(), make_block(TOKENS, validity=DOUBTED))
