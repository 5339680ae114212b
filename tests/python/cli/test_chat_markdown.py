"""Markdown of an answer on a terminal: what stands there while it comes and afterwards."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from mixedkv.cli import chat_terminal
from mixedkv.cli.chat_terminal import MarkdownStream, markdown_shown, split_blocks

pyte = pytest.importorskip("pyte")

pytestmark = pytest.mark.full

WIDTH, HEIGHT = 60, 12
CODE = "\n".join(f"line {i}" for i in range(30))
ANSWER = f"""# The mill

It has **two** `stones`:
the [upper](https://example.org/u) and the <b>lower</b>.

1. First
   - inner
2. Second

```text
{CODE}
```

| stone | weight |
|-------|--------|
| upper | 700 kg |

The last line."""


class Screen(io.TextIOBase):
    """A terminal: what was written to it stands in `lines`."""

    def __init__(self) -> None:
        self._screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=1000)
        self._stream = pyte.Stream(self._screen)

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    @property
    def lines(self) -> list[str]:
        above = ["".join(line[x].data for x in range(WIDTH)) for line in self._screen.history.top]
        lines = [line.rstrip() for line in [*above, *self._screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def console(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(chat_terminal, "_EVERY", 0.0)  # every part is drawn
    return Console(file=screen, force_terminal=True, width=WIDTH, height=HEIGHT)  # type: ignore[arg-type]


def parts(text: str, seed: int) -> list[str]:
    rng, found = random.Random(seed), []
    while text:
        n = rng.randint(1, 9)
        found.append(text[:n])
        text = text[n:]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_stands_there_at_the_end_is_the_whole_answer_once(
    screen: Screen, console: Console, seed: int
) -> None:
    with MarkdownStream(console) as stream:
        for part in parts(ANSWER, seed):
            stream.add(part)
    lines = screen.lines
    assert lines[0] == "The mill"
    assert "It has two stones:" in lines
    assert "the upper (https://example.org/u) and the <b>lower</b>." in lines
    assert [line.strip() for line in lines if line.strip().startswith("line ")] == CODE.split("\n")
    assert [line.split() for line in lines if "kg" in line] == [["upper", "700", "kg"]]
    assert lines[-1] == "The last line."
    assert "**" not in "".join(lines)


def test_the_end_of_a_block_higher_than_the_terminal_is_seen(screen: Screen, console: Console) -> None:
    with MarkdownStream(console) as stream:
        for i in range(30):
            stream.add(("" if i else "```\n") + f"line {i}\n")
            assert any(f"line {i}" in line for line in screen.lines[-3:])


def test_blocks_are_never_lost() -> None:
    for n in range(len(ANSWER)):
        assert "".join(split_blocks(ANSWER[:n])) == ANSWER[:n]
    assert split_blocks("One.\n\nTwo") == ("One.\n\n", "Two")


def test_an_answer_does_not_command_the_terminal(screen: Screen, console: Console) -> None:
    with MarkdownStream(console) as stream:
        stream.add("before\x1b[2J\x1b]0;title\x07 \x9b31m after")
    assert screen.lines == ["before␛[2J␛]0;title␇ \N{REPLACEMENT CHARACTER}31m after"]


def test_an_answer_that_is_piped_or_asked_for_plain_is_as_it_was_written(screen: Screen) -> None:
    pipe = io.StringIO()
    with markdown_shown(pipe, plain=False) as show:
        show("**bold**\n")
        show("end")
    assert pipe.getvalue() == "**bold**\nend\n"
    with markdown_shown(screen, plain=True) as show:  # type: ignore[arg-type]
        show("**bold**")
    assert screen.lines == ["**bold**"]
