"""`mixedkv chat`: a conversation that goes on in the next process, without evaluating it again."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

from support.patience import PATIENCE

OPTIONS = ["--n-ctx", "1024", "--threads", "1", "--temp", "0", "-n", "12"]


def chat(stdin: str, *options: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "mixedkv", "chat", *OPTIONS, *map(str, options)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def took(done: subprocess.CompletedProcess[str]) -> list[tuple[int, int, str]]:
    """Of each turn: tokens that were not evaluated again, those that were, and where from."""
    found = re.findall(r"tokens: (\d+) not evaluated again( from \w+)?, (\d+) evaluated", done.stderr)
    return [(int(cached), int(evaluated), where) for cached, where, evaluated in found]


def test_each_line_is_answered() -> None:
    done = chat("What is the code of the mill?\nAnd of the barn?\n")
    assert len(done.stdout.splitlines()) == 2
    (_, first, _), (cached, second, _) = took(done)
    assert cached >= first
    assert second < first + 12 + 10


def test_a_chat_goes_on_in_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "talk"
    chat("What is the code of the mill?\nAnd of the barn?\n", "--history", folder)
    done = chat("And of the shed?\n", "--history", folder)
    assert "4 messages so far" in done.stderr
    ((cached, evaluated, where),) = took(done)
    assert where == " from disk"
    assert cached > evaluated
    assert stat.S_IMODE((folder / "messages.jsonl").stat().st_mode) == 0o600
    assert len((folder / "messages.jsonl").read_text().splitlines()) == 6


def test_a_chat_can_begin_anew(tmp_path: Path) -> None:
    chat("Hello\n", "--history", tmp_path)
    done = chat("Hello\n", "--history", tmp_path, "--new", "--system", "Be brief.")
    assert "so far" not in done.stderr
    assert len((tmp_path / "messages.jsonl").read_text().splitlines()) == 3


def test_a_history_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "messages.jsonl").write_text('{"role": "user"}\n')
    done = chat("Hello\n", "--history", tmp_path, code=2)
    assert "--new" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "--history" in chat("", "--new", code=2).stderr


def test_the_server_has_a_module_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mixedkv.server", "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert "--parallel" in done.stdout
