"""Standard streams: what a model writes controls no terminal, and one that is closed is no traceback."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from mixedkv.cli.chat_terminal import markdown_shown
from mixedkv.cli.main import main
from mixedkv.terminal import printable, shown_on
from support.models.not_finite import write_model
from support.patience import PATIENCE

pytestmark = pytest.mark.full

TITLE = "\x1b]0;owned\x07 a\tb\nc\r\x9b31m\x7f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_on_a_terminal_and_pass_elsewhere() -> None:
    assert printable(TITLE) == "\u241b]0;owned\u2407 a\tb\nc\ufffd31m\u2421"
    assert shown_on(io.StringIO(), TITLE) == TITLE
    for file, shown in ((Terminal(), printable(TITLE)), (io.StringIO(), TITLE)):
        with markdown_shown(file, plain=True) as show:
            for letter in TITLE:
                show(letter)
        assert file.getvalue() == shown + "\n"


def run(redirect: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = f'exec "$0" -m mixedkv "$@" {redirect}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirect", "args", "code", "says"),
    [
        (">&-", ["run", "-n", "2", "--raw", "-p", "a"], 2, "the standard output is closed"),
        (">&-", ["info"], 2, "the standard output is closed"),
        ("<&-", ["chat", "-n", "2"], 0, ""),
        ("2>&-", ["run", "-n", "2", "--raw", "-p", "a"], 0, ""),
        ("<&- >&- 2>&-", ["run", "-n", "2", "--raw", "-p", "a"], 2, ""),
    ],
)
def test_a_closed_stream_is_no_traceback(redirect: str, args: list[str], code: int, says: str) -> None:
    done = run(redirect, *args)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert says in done.stderr


def test_a_model_that_gives_no_numbers_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(tmp_path / "m.gguf")
    assert main(["run", "-m", str(path), "-p", "Hi", "-n", "2", "--threads", "1", "-c", "256"]) == 1
    err = capsys.readouterr().err
    assert "not numbers (NaN or infinite)" in err
    assert "Traceback" not in err


def test_the_title_of_a_terminal_stays() -> None:
    master, slave = pty.openpty()
    code = (
        "from mixedkv.terminal import shown_on; import sys;"
        f"print(shown_on(sys.stdout, {TITLE!r}), end='', flush=True)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=slave, timeout=PATIENCE, check=True)
    os.close(slave)
    written = os.read(master, 4096)
    os.close(master)
    assert b"\x1b" not in written
    assert "\u241b]0;owned".encode() in written
