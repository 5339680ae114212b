"""Places that are remembered are told by the text itself."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mixedkv.chunks.donors import WIDTH, TextEnds, find_fingerprints, slide
from mixedkv.llama import Llama

pytestmark = pytest.mark.core

CHUNK = 64


def text(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 5_000, n).astype(np.int32)


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**16),
    length=st.integers(CHUNK, 3 * CHUNK),
    before=st.integers(0, 200),
    after=st.integers(0, 200),
)
def test_a_common_passage_of_chunk_size_is_always_found(
    seed: int, length: int, before: int, after: int
) -> None:
    passage = text(seed, length)
    other = text(seed + 1, before + after + 100)
    here = {tuple(passage[place : place + WIDTH]) for place in find_fingerprints(passage, CHUNK)}
    moved = np.concatenate([other[:before], passage, other[before:]])
    there = {tuple(moved[place : place + WIDTH]) for place in find_fingerprints(moved, CHUNK)}
    assert here & there


def test_there_are_about_two_in_a_chunk() -> None:
    n = len(find_fingerprints(text(1, 20_000), CHUNK))
    assert 20_000 / CHUNK < n < 20_000 / CHUNK * 4


def test_short_texts_have_none_and_repeated_ones_some() -> None:
    assert len(find_fingerprints(text(1, WIDTH - 1), CHUNK)) == 0
    assert len(find_fingerprints(text(1, 0), CHUNK)) == 0
    assert find_fingerprints(text(1, WIDTH), CHUNK).tolist() == [0]
    assert len(find_fingerprints(np.full(1_000, 7, np.int32), CHUNK)) >= 10


@pytest.mark.parametrize(
    ("ends", "window", "expected"),
    [
        ("....1.....1....", 5, (5, 11)),  # inwards, to behind an end on both sides
        ("....1.....1....", 2, (2, 11)),  # too far on one side
        (".1........1..1.", 5, (2, 14)),
        ("..1.2.....2.1..", 5, (5, 11)),  # a line is better than a sentence
        ("...............", 5, (2, 13)),
    ],
)
def test_edges_slide_to_ends(ends: str, window: int, expected: tuple[int, int]) -> None:
    kinds = np.array([int(kind) if kind != "." else 0 for kind in ends], np.int8)
    begin, end = (2, 14) if expected == (2, 14) else (2, 13)
    assert slide(kinds, begin, end, window) == expected


def test_ends_are_read_from_the_vocabulary(llm: Llama) -> None:
    tokens = llm.tokenize(b"A fox slept. The rain, said Ada<|end|>", add_bos=False, special=True)
    ends = TextEnds(llm).of(np.array(tokens, np.int32))
    pieces = [llm.detokenize([token], special=True) for token in tokens]
    assert [piece for piece, end in zip(pieces, ends, strict=True) if end == 1] == [b"."]
    assert [piece for piece, end in zip(pieces, ends, strict=True) if end == 3] == [b"<|end|>"]
