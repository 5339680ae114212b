"""Thoughts are followed token by token, whatever a token holds of a tag."""

from __future__ import annotations

import pytest

from mixedkv.engine.text.thought import Thought, ThoughtTags

pytestmark = pytest.mark.core

CLOSE = [7, 8]


def thought(*, open: bool = False, budget: int | None = None, opening: int = -1) -> Thought:
    tags = ThoughtTags(start="<think>", ends=("</think>", "<eot>"), open=open)
    return Thought(tags, close=CLOSE, opening=opening, budget=budget)


def written(text: str, size: int) -> Thought:
    it = thought()
    for at in range(0, len(text), size):
        it.take(text[at : at + size].encode())
    return it


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("", False),
        ("A <thin king", False),
        ("<think>", True),
        ("So. <think>Hm. </thin", True),
        ("<think>Hm.</think>", False),
        ("<think>Hm.<eot>Yes.", False),
        ("<think>a</think>b<think>c", True),
        ("</think>", False),
    ],
)
def test_tags_are_found(text: str, is_open: bool, size: int) -> None:
    assert written(text, size).open == is_open


def test_tokens_of_thoughts_are_counted() -> None:
    it = thought()
    for piece in (b"Well.", b"<think>", b"a", b"b", b"</think>", b"c", b"d"):
        it.take(piece)
    assert it.n_tokens == 4


def test_a_budget_closes_a_thought_once() -> None:
    it, tokens = thought(budget=2), []
    for piece in (b"no", b"<think>", b"a", b"b"):
        tokens.append(it.forced())
        it.take(piece)
    assert tokens == [None, None, None, CLOSE[0]]
    assert it.forced() == CLOSE[1]
    it.take(b"</think>")
    assert it.forced() is None


def test_no_budget_at_all_closes_what_the_prompt_began() -> None:
    assert thought(open=True, budget=0).forced() == CLOSE[0]


def test_a_thought_may_begin_where_nothing_was_written() -> None:
    it = thought(opening=5)
    assert it.may_begin == 5
    it.take(b"{")
    assert it.may_begin == -1
    assert thought(open=True, opening=5).may_begin == -1


def test_an_end_within_a_token_is_seen() -> None:
    it = thought(open=True)
    it.take(b"a</thin")
    assert it.ends_within(b"k>{")
    assert not it.ends_within(b"k>\n")
    assert not it.ends_within(b"ner")
    it.take(b"k>")
    assert not it.ends_within(b"</think>{")
