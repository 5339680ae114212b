"""What tests/lint/check_language.py finds, and what it lets pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests/lint"))
from check_language import OLD_NAMES, OLD_WORDS, about_docstring, old_names, old_words, undocumented

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "text",
    [
        "evict the oldest entry.",
        "Evict the oldest entry",
        "Raises:\n    ValueError: n is negative.",
        "Args:\n    n: 1 or more.",
        "Evict an entry.\n\nRaises:\n    ValueError:",
        "Evict an entry.\n\nRaises:\n    ValueError",
    ],
)
def test_a_fragment_is_found(text: str) -> None:
    assert about_docstring(text)


@pytest.mark.parametrize(
    "text",
    [
        "Return what the cache holds.",
        "`n` entries that were evicted.",
        "Evict the oldest entry, and all that builds\non it.",
        "Evict an entry.\n\nRaises:\n    ValueError, KeyError: there is none,\n        or two.\n\nMore.",
    ],
)
def test_a_sentence_passes(text: str) -> None:
    assert not about_docstring(text)


def test_a_word_that_was_replaced_is_found() -> None:
    word = next(iter(OLD_WORDS))
    assert old_words(f"One.\nThe {word} and a_{word}_of.\n") == [(2, word), (2, word)]
    assert not old_words(f"Less{word}ness.\n")


def test_what_other_programs_call_a_piece_stays() -> None:
    assert old_words("One piece.\n") == [(1, "piece")]
    assert not old_words('n = llama_token_to_piece(a)\nbody = {"piece": 1, "with_pieces": 2}\n')


def test_a_name_with_a_word_that_was_replaced_is_found() -> None:
    word = next(iter(OLD_NAMES))
    assert old_names(f"def _{word}_of({word}):\n    return 1\n") == [(1, word), (1, word)]
    assert not old_names(f'"""What was {word}."""  # {word}\nx = "{word}"\n')


def test_a_name_of_the_reference_without_docstring_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python/a.py").write_text(
        'class A:\n    """One."""\n\n    def b(self): ...\n\n    def _c(self): ...\n\nclass D: ...\n'
    )
    monkeypatch.chdir(tmp_path)
    assert list(undocumented("::: a.A\n")) == ["a.A: b"]
    assert list(undocumented("::: a\n")) == ["a: b", "a: D"]
