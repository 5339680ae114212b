"""`mixedkv chat`: a conversation that goes on in the next process, without evaluating it again."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import PATIENCE
from support.servers import prefork

pytestmark = pytest.mark.full

MIXEDKV = [sys.executable, "-m", "mixedkv"]
OPTIONS = ["--n-ctx", "1024", "--threads", "1", "--temp", "0", "-n", "12"]


def chat(stdin: str, *options: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = prefork.run(["chat", *OPTIONS, *map(str, options)], stdin)
    assert done.returncode == code, done.stderr
    return done


def took(done: subprocess.CompletedProcess[str]) -> list[tuple[int, int, str]]:
    """Of each turn: tokens that were not evaluated again, those that were, and where from."""
    found = re.findall(r"tokens: (\d+) from cache( \(from \w+\))?, (\d+) evaluated", done.stderr)
    return [(int(cached), int(evaluated), where) for cached, where, evaluated in found]


def test_each_line_is_answered() -> None:
    done = chat("What is the code of the mill?\nAnd of the barn?\n")
    assert len(done.stdout.splitlines()) == 2
    (_, first, _), (cached, second, _) = took(done)
    assert cached >= first
    assert second < first + 12 + 10


@pytest.mark.core
def test_a_chat_goes_on_in_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    chat("What is the code of the mill?\nAnd of the barn?\n", "--history", folder)
    done = chat("And of the shed?\n", "--history", folder)
    assert "4 messages so far" in done.stderr
    ((cached, evaluated, where),) = took(done)
    assert where == " (from disk)"
    assert cached > evaluated
    assert stat.S_IMODE((folder / "messages.jsonl").stat().st_mode) == 0o600
    assert len((folder / "messages.jsonl").read_text().splitlines()) == 6


def test_a_chat_can_begin_anew(tmp_path: Path) -> None:
    chat("Hello\n", "--history", tmp_path)
    done = chat("Hello\n", "--history", tmp_path, "--new", "--system", "Be brief.")
    assert "so far" not in done.stderr
    assert len((tmp_path / "messages.jsonl").read_text().splitlines()) == 3


def test_commands_are_not_for_the_model(tmp_path: Path) -> None:
    done = chat("/help\n/stats\n/nonsense\n/kv now\n/save notes.txt\n/system\n/undo\n")
    assert done.stdout == ""
    for said in (
        "/undo          take back",
        "nothing was answered yet",
        "there is no command /nonsense: /bye, /clear, /help, /image, /kv, /regenerate, /save, /set, /stats",
        "/kv takes nothing behind it",
        "ends in .md or .json",
        "there is no system message",
        "no question to take back",
    ):
        assert said in done.stderr
    assert len(chat("/etc/hosts is empty, why?\n").stdout.splitlines()) >= 1


def test_lines_between_marks_are_one_question(tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    chat('"""\nThe code of the mill is 7.\n\n  ls /\nWhat is it?"""\n"""Again?"""\n', "--history", folder)
    lines = [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]
    asked = [each["content"] for each in lines if each["role"] == "user"]
    assert asked == ["The code of the mill is 7.\n\n  ls /\nWhat is it?", "Again?"]
    assert "end it with" in chat('"""\nNo end\n', code=2).stderr


@pytest.mark.parametrize("word", ["exit", "quit", "/bye", "/exit"])
def test_a_word_ends_a_chat(word: str) -> None:
    done = chat(f"{word}\nWhat is the code of the mill?\n")
    assert (done.stdout, done.stderr.count("first token")) == ("", 0)


def test_options_are_set_between_answers() -> None:
    talk = "/set parameter temperature 0\n/set n_predict 3\n/set top-k\n/set\nHello\n/set topk 5\n"
    talk += '/set temperature hot\n/set repeat_last_n 3\n/set system "Be brief."\n/system\n'
    done = chat(talk)
    for said in (
        "temperature is 0.0",
        "max_tokens is 3",
        "top_k is 40: /set top_k VALUE changes it",
        "\nmax_tokens 3\n",
        "there is no topk (did you mean top_k?)",
        "not set: 'hot'",
        "repeat_last_n is fixed when the chat begins",
        "system message: Be brief.",
    ):
        assert said in done.stderr, said
    assert len(done.stdout.split()) <= 3  # of 12 tokens


def test_the_last_question_is_answered_again(tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    talk = "/regenerate\nWhat is the code of the mill?\n/set n_predict 2\n/regenerate\n"
    done = chat(talk, "--history", folder)
    assert "there is no question to answer again" in done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(second)
    assert len(second) < len(first)
    question, answer = (json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines())
    assert (question["role"], answer["role"]) == ("user", "assistant")
    assert answer["content"] == second
    (_, evaluated, _), (cached, again, _) = took(done)
    assert cached > again  # nothing of the question but its end is evaluated again
    assert evaluated > again


def test_commands_of_a_chat(tmp_path: Path) -> None:
    talk = "/system Be brief.\nWhat is the code of the mill?\n/kv\n/stats\n"
    talk += f"/save {tmp_path}/talk.md\n/save {tmp_path}/talk.json\n/save {tmp_path}/talk.json\n"
    done = chat(talk, "--history", tmp_path / "talk")
    assert "hot +" in done.stderr
    assert done.stderr.count("first token after") == 2  # told, and told again
    assert "exists: give another name" in done.stderr
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [each["role"] for each in messages] == ["system", "user", "assistant"]
    assert f"## user\n\n{messages[1]['content']}\n" in (tmp_path / "talk.md").read_text()


def test_what_is_taken_back_leaves_no_trace(tmp_path: Path) -> None:
    """The next answer is that of a chat without the question, and reuses what is stored of the first."""
    first, other, third = "What is the code of the mill?\n", "And of the barn?\n", "And of the shed?\n"
    plain = chat(first + third, "--history", tmp_path / "plain")
    undone = chat(first + other + "/undo\n" + third, "--history", tmp_path / "undone")
    assert undone.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]
    assert "taken back: And of the barn?" in undone.stderr
    (_, all_of_first, _), _, (cached, evaluated, _) = took(undone)
    assert cached >= all_of_first
    assert evaluated < all_of_first
    kept = [(tmp_path / name / "messages.jsonl").read_text().splitlines() for name in ("plain", "undone")]
    contents = [[json.loads(line)["content"] for line in lines] for lines in kept]
    assert contents[0] == contents[1]


@pytest.mark.nightly
def test_a_history_can_be_encrypted(tmp_path: Path) -> None:
    folder, key, other = tmp_path / "talk", tmp_path / "key", tmp_path / "other"
    for path in (key, other):
        path.write_bytes(os.urandom(32))
        path.chmod(0o600)
    chat("What is the code of the mill?\n", "--history", folder)
    done = chat("And of the barn?\n", "--history", folder, "--key", f"file:{key}")
    assert "they are encrypted now" in done.stderr  # the messages
    assert "mixedkv cache rm" in done.stderr  # their KV
    assert "2 messages so far" in done.stderr
    subprocess.run([*MIXEDKV, "cache", "rm", "--all", "--store", folder / "kv"], check=True)
    chat("And of the dam?\n", "--history", folder, "--key", f"file:{key}")
    done = chat("And of the shed?\n", "--history", folder, "--key", f"file:{key}")
    assert "6 messages so far" in done.stderr
    assert "plain text" not in done.stderr
    ((cached, evaluated, where),) = took(done)
    assert (where, cached > evaluated) == (" (from disk)", True)
    for path in filter(Path.is_file, folder.rglob("*")):
        assert b"the mill" not in path.read_bytes(), path
    assert "give the key with --key" in chat("Hello\n", "--history", folder, code=2).stderr
    done = chat("Hello\n", "--history", folder, "--key", f"file:{other}", code=2)
    assert "line 1: its data key is not of this master key" in done.stderr
    lines = (folder / "messages.jsonl").read_text().splitlines(keepends=True)
    (folder / "messages.jsonl").write_text("".join([lines[2], *lines[1:]]))
    assert "line 1" in chat("Hello\n", "--history", folder, "--key", f"file:{key}", code=2).stderr
    assert "no --history" in chat("Hello\n", "--key", f"file:{key}", code=2).stderr


def test_a_history_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "messages.jsonl").write_text('{"role": "user"}\n')
    done = chat("Hello\n", "--history", tmp_path, code=2)
    assert "--new" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "--history" in chat("", "--new", code=2).stderr


def test_the_server_has_a_module_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mixedkv_server", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "--parallel" in done.stdout
