"""Questions about long documents: what is asked has one right answer, and rows say what stayed right."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from mixedkv_bench import tasks
from mixedkv_bench.harness import sample_text
from mixedkv_bench.harness.task_items import RECALL, TASKS, TaskItem, make_piles
from support.bench import run

pytestmark = [pytest.mark.nightly, pytest.mark.needs("real model")]


def count(text: str) -> int:
    return len(text) // 4


@pytest.fixture(scope="module", autouse=True)
def _texts(real_model_q4_1: Path) -> None:
    """Dialogue comes with the same extra."""


@pytest.mark.parametrize("n_tokens", [2000, 6000])
def test_documents_are_as_long_as_asked_and_hold_the_answers(n_tokens: int) -> None:
    facts, dialogue, code, chat = make_piles(TASKS, 1, n_tokens, count)
    assert 0.9 * n_tokens < count(facts.text) <= 1.05 * n_tokens
    assert count(dialogue.text) <= n_tokens
    assert 0.9 * n_tokens < count(code.text) <= n_tokens
    assert 0.85 * n_tokens < count(chat.text) <= 1.05 * n_tokens
    assert chat.text.count("User: ") == 9
    assert {item.task for pile in (facts, dialogue, code, chat) for item in pile.items} == set(TASKS)
    for item in code.items:
        if item.task == "code":
            _, _, given = item.prompt.partition("word for word:\n")
            assert f"{given} {item.answer}\n" in code.text
        else:
            head, *lines = item.prompt.partition("next function:\n")[2].split("\n")
            assert head.lstrip().startswith("def ")
            assert len(lines) <= 8
    for item in chat.items:
        name = re.findall(r"\b[A-Z]\w+\b", item.prompt.splitlines()[-1])[-1]
        [fact] = re.findall(rf"{name} is \d+ years old, lives in \w+ and works as a \w+\.", chat.text)
        assert item.answer in fact
        assert chat.text.index(fact) < 1000, "a fact of the first turn"
    for item in facts.items:
        if item.task == "lookup":
            place = item.prompt.rpartition("code of the ")[2].removesuffix(" is")
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
    first, again, other = (list(make_piles(TASKS, seed, 2000, count)) for seed in (1, 1, 2))
    assert first == again
    assert first[0].text != other[0].text


def test_only_what_was_asked_for_is_asked() -> None:
    (facts,) = make_piles(("lookup",), 1, 2000, count)
    assert {item.task for item in facts.items} == {"lookup"}
    (journal,) = make_piles((RECALL,), 1, 2000, count)
    assert {item.task for item in journal.items} == {f"recall at {n}%" for n in (5, 30, 55, 80)}
    for item in journal.items:
        assert item.answer.endswith(sample_text.END)


@pytest.mark.parametrize(
    ("said", "right"), [(" 4817.\n\nQuestion", True), ("4817", True), (" 481", False), (" 4871.", False)]
)
def test_an_answer_is_right_by_how_it_begins(said: str, right: bool) -> None:
    assert TaskItem("lookup", "", "4817", 8).is_right(said) == right


def test_rows_say_what_stays_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["--kv", "f16", "--kv", "mixed:quality", "--flash-attn", "off"]
    asked = [word for task in TASKS for word in ("--task", task)]
    reference, other = run(
        tmp_path / "t.json", "quality", *asked, "--n-ctx", "1660", "--repeats", "1", *kinds
    )
    assert (reference["control"], other["control"]) == (True, False)
    assert reference["same_texts"] == 1
    assert [part["task"] for part in reference["tasks"]] == list(TASKS)
    for part, theirs in zip(other["tasks"], reference["tasks"], strict=True):
        assert part["n_reference"] == theirs["correct"] == theirs["n_kept"]
        assert part["n_kept"] <= min(part["n_reference"], part["correct"])
        assert part["n"] == theirs["n"] == theirs["n_same"]
    assert "Answers that stay right, 1500 tokens deep" in capsys.readouterr().out


def test_recall_of_the_bundled_model(tmp_path: Path) -> None:
    found = run(
        tmp_path / "r.json",
        "quality",
        "--task",
        "recall",
        "--kv",
        "mixed",
        "--n-ctx",
        "1024",
        "--repeats",
        "1",
    )
    for row in found:
        assert sum(part["n"] for part in row["tasks"]) == 32
        assert sum(part["correct"] for part in row["tasks"]) >= 28, "the model does not know its facts"


def test_digits_of_a_code_are_given_one_after_the_other() -> None:
    tokens = {"The code is 4817": [1, 2, 3, 4, 8, 1, 7], "The code is 48|17": [1, 2, 3, 48, 17]}
    pieces = {1: "1", 2: "is", 3: " ", 4: "4", 8: "8", 7: "7", 48: " 48", 17: "17"}

    def text(said: Sequence[int]) -> str:
        return "".join(pieces[token] for token in said)

    item = TaskItem("lookup", "The code is", "4817", 0)
    single = tasks.make_prompt(item, tokens.__getitem__, text)
    assert (single.tokens, single.n_read) == ([1, 2, 3, 4, 8, 1], 4)
    pairs = tasks.make_prompt(item, lambda prompt: tokens[f"{prompt[:-2]}|17"], text)
    assert (pairs.tokens, pairs.n_read) == ([1, 2, 3, 48], 2)
    assert not single.goes_on([4, 8, 1, 7], text)
