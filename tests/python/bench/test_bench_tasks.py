"""Questions about long documents: what is asked has one right answer, and rows say what stayed right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mixedkv.cli import main
from mixedkv_bench.catalog import Document
from mixedkv_bench.harness.task_items import TASKS, TaskItem, make_piles
from mixedkv_bench.tasks import TasksRow

pytestmark = pytest.mark.nightly


def count(text: str) -> int:
    return len(text) // 4


@pytest.fixture(scope="module", autouse=True)
def _texts(real_model_q4_1: Path) -> None:
    """Dialogue comes with the same extra."""


@pytest.mark.parametrize("n_tokens", [2000, 6000])
def test_documents_are_as_long_as_asked_and_hold_the_answers(n_tokens: int) -> None:
    facts, dialogue = make_piles(1, n_tokens, count)
    assert 0.9 * n_tokens < count(facts.text) <= 1.05 * n_tokens
    assert count(dialogue.text) <= n_tokens
    assert {item.task for pile in (facts, dialogue) for item in pile.items} == set(TASKS)
    for item in facts.items:
        if item.task == "lookup":
            place = item.prompt.split()[-2]
            assert f"The access code of the {place} is {item.answer}." in facts.text
        if item.task == "quote":
            start = item.prompt.rpartition('"')[2]
            assert f"{start} {item.answer}" in facts.text
        if item.task == "json":
            known = json.loads(f"{item.prompt.splitlines()[-1]} {item.answer}}}")
            about = rf"{known.pop('name')} is (\d+) years old, lives in (\w+) and works as a (\w+)\."
            [(age, city, job)] = re.findall(about, facts.text)
            assert known.items() <= {"age": int(age), "city": city, "job": job}.items()
        if item.task == "sums":
            last = item.prompt.splitlines()[-1]
            if terms := re.findall(r"(\d+) \+ (\d+) =$", last):
                assert sum(map(int, terms[0])) == int(item.answer)
            else:
                assert f"{last.split()[-2]} is {item.answer} old" in facts.text


def test_documents_differ_by_seed_and_nothing_else() -> None:
    assert make_piles(1, 2000, count) == make_piles(1, 2000, count)
    assert make_piles(1, 2000, count)[0].text != make_piles(2, 2000, count)[0].text


@pytest.mark.parametrize(
    ("said", "right"),
    [(" 4817.\n\nQuestion", True), ("4817", True), (" 481", False), (" 4871.", False)],
)
def test_an_answer_is_right_by_how_it_begins(said: str, right: bool) -> None:
    assert TaskItem("lookup", "", "4817", 8).is_right(said) == right


def test_rows_say_what_stays_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tasks.json"
    kinds = ["--kv", "f16", "--kv", "mixed:quality"]
    asked = ["bench", "tasks", "--depths", "1500", "--repeats", "1", "--threads", "1"]
    assert main([*asked, *kinds, "--flash-attn", "off", "--json", str(path)]) == 0
    rows = Document.model_validate_json(path.read_bytes()).rows
    reference, other = rows
    assert isinstance(reference, TasksRow)
    assert isinstance(other, TasksRow)
    assert (reference.control, other.control) == (True, False)
    assert reference.same_texts == 1
    assert [part.task for part in reference.tasks or ()] == list(TASKS)
    for part, theirs in zip(other.tasks or (), reference.tasks or (), strict=True):
        assert part.n_reference == theirs.correct == theirs.n_kept
        assert part.low <= part.n_kept / max(part.n_reference, 1) <= part.high
        assert part.n == theirs.n == theirs.n_same
    assert "Answers that stay right, 1500 tokens deep" in capsys.readouterr().out
