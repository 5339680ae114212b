"""`mixedkv chat` on a terminal: pasting, editing, Ctrl-C in each place, and nothing that is left standing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.clients.terminal import Terminal, shown
from support.models.endless import write_endless_model
from support.patience import wait_for

pytestmark = [pytest.mark.full, pytest.mark.needs("terminal")]

OPTIONS = ["chat", "--n-ctx", "4096", "--threads", "1", "--seed", "1"]
ANSWER = r"(?s)\x1b\[\?2004l\x1b\[\?2004h.{20}"  # what comes after a question
CTRL_C, CTRL_D = "\x03", "\x04"
LONG = 60_000  # tokens, of at least a character each


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless_model(tmp_path_factory.mktemp("endless") / "endless.gguf")


def chat(*options: str | Path) -> Terminal:
    return Terminal([*OPTIONS, *map(str, options)])


def endless_chat(model: Path, *options: str | Path) -> Terminal:
    """One whose answers take a quarter of a minute and more: the likeliest token never ends them."""
    return chat("-n", str(LONG), "-m", model, "--n-ctx", "65536", "--temp", "0", *options)


def messages(folder: Path) -> list[dict[str, str]]:
    path = folder / "messages.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_lines_that_are_pasted_are_one_question(tmp_path: Path) -> None:
    pasted = "The code of the mill is 7.\n\nls /\nWhat is the code of the mill?"
    with chat("-n", "8", "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.paste(pasted)
        terminal.press("\r")
        terminal.expect("first token after")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    (question, _) = messages(tmp_path)
    assert question["content"] == pasted


def test_what_is_pasted_beside_an_answer_is_the_next_question(tmp_path: Path, endless: Path) -> None:
    with endless_chat(endless, "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.press("Tell me of the mill.\r")
        terminal.expect_raw(ANSWER)
        terminal.paste("And\nof the barn?")
        terminal.press("\r" + CTRL_C)
        terminal.expect_raw(ANSWER, 2)
        terminal.press(CTRL_C)
        terminal.expect("first token after", 2)
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    assert [m["content"] for m in messages(tmp_path) if m["role"] == "user"] == [
        "Tell me of the mill.",
        "And\nof the barn?",
    ]


def test_lines_between_marks_are_typed_one_by_one(tmp_path: Path) -> None:
    with chat("-n", "4", "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.press('"""Given up\r')
        terminal.expect("\\.\\.\\.")
        terminal.press(CTRL_C)
        terminal.press('"""The code of the mill is 7.\r\r  What is it?\r"""\r')
        terminal.expect("first token after")
        terminal.press("exit\r")
        assert terminal.end() == 0
    (question, _) = messages(tmp_path)
    assert question["content"] == "The code of the mill is 7.\n\n  What is it?"


def test_an_empty_line_asks_nothing(tmp_path: Path) -> None:
    with chat("-n", "4", "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.press("\r\rHello\r")
        terminal.expect("first token after")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    assert len(messages(tmp_path)) == 2


def test_ctrl_c_stops_the_answer_and_keeps_the_turn(tmp_path: Path, endless: Path) -> None:
    with endless_chat(endless, "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.press("Tell me of the mill.\r")
        terminal.expect_raw(ANSWER)
        terminal.press(CTRL_C)
        terminal.expect(r"\[stopped; ")
        terminal.press("And of the barn?\r")
        terminal.expect_raw(ANSWER, 2)
        terminal.press(CTRL_C)
        terminal.expect(r"\[stopped; ", 2)
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    kept = messages(tmp_path)
    assert [message["role"] for message in kept] == ["user", "assistant"] * 2
    assert all(0 < len(message["content"]) < LONG for message in kept)


def test_ctrl_c_in_a_prompt_stops_it_at_once(tmp_path: Path, endless: Path) -> None:
    with chat("-n", "4", "-m", endless, "--n-ctx", "65536", "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.paste("a line of a long text\n" * 1500)
        terminal.press("\r")
        terminal.expect_raw(r"\x1b\[\?2004l\x1b\[\?2004h")
        begun = cpu_seconds(terminal.process.pid)
        wait_for(lambda: cpu_seconds(terminal.process.pid) > begun + 0.1)  # it is at work on it
        began = cpu_seconds(terminal.process.pid)
        terminal.press(CTRL_C)
        terminal.expect(r"\[stopped before the answer began")
        assert cpu_seconds(terminal.process.pid) - began < 5  # it is one, whatever else runs
        terminal.press("Hello\r")
        terminal.expect("first token after")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    assert messages(tmp_path)[0]["content"] == "Hello"


def cpu_seconds(pid: int) -> float:
    """What a process has had of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_clears_the_line_and_ends_the_chat_when_it_is_repeated(tmp_path: Path) -> None:
    with chat("-n", "4", "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.press("wrong")
        terminal.expect("wrong")
        terminal.press(CTRL_C)
        terminal.press("right\r")
        terminal.expect("first token after")
        terminal.press(CTRL_C)
        terminal.expect("Ctrl-C again ends the chat")
        terminal.press(CTRL_C)
        assert terminal.end() == 130
    assert messages(tmp_path)[0]["content"] == "right"


def test_a_chat_begins_with_a_line_and_ends_with_a_word() -> None:
    with chat("-n", "4") as terminal:
        terminal.expect(r"\[recall-5m.q8_0.gguf, 4,096 tokens, mixed; /\? lists commands, Ctrl-D ends\]")
        terminal.expect(">")
        terminal.press("/?\r")
        terminal.expect("/bye")
        terminal.press("Hello\r")
        terminal.expect("first token after")
        terminal.press("/clear\r")
        terminal.expect("2 messages are forgotten")
        terminal.press("/exit\r")
        assert terminal.end() == 0


def test_the_keys_bring_back_former_questions(tmp_path: Path) -> None:
    for _ in range(2):
        with chat("-n", "4", "--history", tmp_path) as terminal:
            terminal.expect(">")
            terminal.press("\x1b[A" if messages(tmp_path) else "Hello there")
            terminal.expect("Hello there")
            terminal.press("\r")
            terminal.expect("first token after")
            terminal.press(CTRL_D)
            assert terminal.end() == 0
    assert [m["content"] for m in messages(tmp_path) if m["role"] == "user"] == ["Hello there"] * 2


SLOW_PROMPT = """
import fcntl, struct, sys, termios, threading, time
from mixedkv import terminal
fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
terminal._LATE, terminal._EVERY = float(sys.argv[1]), 0.02
asked, shown = threading.Event(), threading.Event()
class Model:
    streaming = None
    @property
    def evaluated(self):
        (shown if asked.is_set() else asked).set()  # the second time the bar has been drawn
        return 300, 1000
def chunks():
    shown.wait(300) if terminal._LATE < 1 else time.sleep(0.4)
    yield "The answer"
for chunk in terminal.with_prompt_bar(Model(), chunks()):
    print(chunk, flush=True)
"""


@pytest.mark.parametrize("late", [0.05, 0.2, 300.0])
def test_the_bar_leaves_nothing_before_an_answer(late: float) -> None:
    raw = on_terminal(["-c", SLOW_PROMPT, str(late)])
    assert ("prompt:" in raw) == (late < 1)
    assert shown(raw)[0] == "The answer"


def on_terminal(arguments: Sequence[str]) -> str:
    """What Python writes with these arguments when its output is a terminal."""
    code = "import pty, sys; pty.spawn([sys.executable, *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    )
    return re.sub("\r+\n", "\n", done.stdout.decode())


def test_a_long_paste_is_shown_by_its_beginning_on_another_day(tmp_path: Path) -> None:
    pasted = "".join(f"line {i}\n" for i in range(40))
    with chat("-n", "4", "--history", tmp_path) as terminal:
        terminal.expect(">")
        terminal.paste(pasted)
        terminal.press("\r")
        terminal.expect("first token after")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    with chat("-n", "4", "--history", tmp_path) as terminal:
        terminal.expect(r"more lines\)(?s:.*)>[\s\b]*$")
        terminal.press(CTRL_D)
        assert terminal.end() == 0
    assert "line 5\r\n... (34 more lines)" in terminal.raw
    assert "line 6" not in terminal.raw
