"""The terminal of a chat: reads questions that are typed or pasted, lets Ctrl-C stop an answer, and shows its
markdown while a model writes it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import ClassVar, TextIO

from markdown_it import MarkdownIt
from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment

from mixedkv.cli.chat_commands import SeveralLines
from mixedkv.llama import Llama
from mixedkv.terminal import printable, shown_on

try:
    import termios
except ImportError:  # Windows, whose console keeps what is typed
    termios = None  # type: ignore[assignment]

_MARK_PASTES, _LEAVE_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste, on and off


def questions(former: Sequence[str]) -> Iterator[str]:
    """Yield typed or pasted questions until Ctrl-D. Lines that are pasted together are one question.

    Args:
        former: earlier questions, for the keys up and down.

    Raises:
        KeyboardInterrupt: Ctrl-C twice on an empty line; on another it clears the line.
    """
    session: PromptSession[str] = PromptSession(
        "> ", history=InMemoryHistory(former), key_bindings=_keys(), output=create_output(stdout=sys.stderr)
    )
    warned, several = False, SeveralLines()
    with _keys_wait():
        while True:
            try:
                line = session.prompt("... " if several.is_open else "> ")
                text = several.add(line if several.is_open else line.strip())
            except EOFError:
                return
            except KeyboardInterrupt:
                if several.is_open:
                    several.drop()
                    continue
                if warned:
                    raise
                warned = True
                print("Ctrl-C again ends the chat", file=sys.stderr)
                continue
            warned = False
            if text:
                print(_MARK_PASTES, end="", file=sys.stderr, flush=True)  # a prompt ends with it off
                yield text


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


@contextmanager
def _keys_wait() -> Iterator[None]:
    """Between two prompts, hold typed and pasted text for the next prompt without showing it.

    Ctrl-C is held too: as a signal it could arrive while a prompt is set up, which would then not react to
    keys.
    """
    with _local_modes(on=["NOFLSH"], off=["ECHO", "ICANON", "ISIG"]):
        try:
            yield
        finally:
            print(_LEAVE_PASTES, end="", file=sys.stderr, flush=True)


@contextmanager
def _local_modes(on: Sequence[str] = (), off: Sequence[str] = ()) -> Iterator[None]:
    """Set flags of the terminal's local modes while inside (termios(3), `c_lflag`), if it has such."""
    if termios is None:
        yield
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    now = termios.tcgetattr(stdin)
    for name in on:
        now[3] |= getattr(termios, name)
    for name in off:
        now[3] &= ~getattr(termios, name)
    termios.tcsetattr(stdin, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


class StopSignal:
    """While inside, Ctrl-C stops the running evaluation, and a second one ends the program."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm
        self._stack = ExitStack()
        self.came = False

    def __enter__(self) -> StopSignal:
        self._stack.callback(self._llm.interrupt, False)
        self._stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._on_signal))
        if sys.stdin.isatty():
            self._stack.enter_context(_local_modes(on=["ISIG", "NOFLSH"]))  # keeps typed text
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        self._llm.interrupt()


_EVERY = 0.08  # seconds between two pictures
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


@contextmanager
def markdown_shown(file: TextIO, plain: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the next part of a text: unformatted if `plain`, or if `file` is no
    terminal.
    """
    if _is_plain(console := Console(file=file), plain):
        try:
            yield lambda text: print(shown_on(file, text), end="", file=file, flush=True)
        finally:
            print(file=file, flush=True)
    else:
        with MarkdownStream(console) as stream:
            yield stream.add


def show_markdown(text: str, file: TextIO, plain: bool) -> None:
    """Show a whole text."""
    with markdown_shown(file, plain) as show:
        show(text)


def _is_plain(console: Console, requested: bool) -> bool:
    return requested or not console.is_terminal or console.is_dumb_terminal


class MarkdownStream:
    """Shows text on a terminal while it is generated, with its markdown rendered.

    Blocks that have ended, such as paragraphs, are printed once. The last one is drawn again as it grows, or
    its end if it is higher than the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._growing = ""  # text of the block that has not ended
        self._live: Live | None = None
        self._drawn = float("-inf")
        self._is_first = True

    def __enter__(self) -> MarkdownStream:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop()
        self._print(self._growing)

    def add(self, text: str) -> None:
        """Show more text."""
        self._growing += printable(text)
        if time.monotonic() < self._drawn + _EVERY:
            return
        ended, self._growing = split_blocks(self._growing)
        if ended:
            self._stop()
            self._print(ended)
        if self._growing.strip():
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(_End(rendered(self._growing)), refresh=True)
        self._drawn = time.monotonic()

    def _stop(self) -> None:
        """Erase the block that is still growing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        if text.strip():
            if not self._is_first:
                self._console.print()
            self._is_first = False
            self._console.print(rendered(text))


def rendered(text: str) -> Markdown:
    """Return markdown to print: line breaks stay, HTML is shown as text, and links with their addresses."""
    markdown = _Markdown("", code_theme="ansi_dark", hyperlinks=False)
    markdown.markup, markdown.parsed = text, _PARSER.parse(text)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return markdown


def split_blocks(text: str) -> tuple[str, str]:
    """Return the blocks that have ended, and the last one, which may still grow."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    lines = text.splitlines(keepends=True)
    last = starts[-1] if starts else 0
    return "".join(lines[:last]), "".join(lines[last:])


class _LeftHeading(Heading):
    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": _LeftHeading}


class _End:
    """Renders the end of something, as many lines as a terminal has."""

    def __init__(self, whole: Markdown) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options, pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()
