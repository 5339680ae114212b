"""The terminal of a chat: reads questions that are typed or pasted, and lets Ctrl-C stop an answer."""

from __future__ import annotations

import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

_MARK_PASTES, _LEAVE_PASTES = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste, on and off


class Stoppable(Protocol):
    """A `Llama`, or what else evaluates until it is interrupted."""

    def interrupt(self, wanted: bool = True) -> None: ...


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
    asked = False
    with _keys_wait():
        while True:
            try:
                text = session.prompt().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if asked:
                    raise
                asked = True
                print("Ctrl-C again ends the chat", file=sys.stderr)
                continue
            asked = False
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
    with _local_modes(on=termios.NOFLSH, off=termios.ECHO | termios.ICANON | termios.ISIG):
        try:
            yield
        finally:
            print(_LEAVE_PASTES, end="", file=sys.stderr, flush=True)


@contextmanager
def _local_modes(on: int = 0, off: int = 0) -> Iterator[None]:
    """Set flags of the terminal's local modes while inside (termios(3), `c_lflag`)."""
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    now = termios.tcgetattr(stdin)
    now[3] = (now[3] | on) & ~off
    termios.tcsetattr(stdin, termios.TCSADRAIN, now)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


class StopSignal:
    """While inside, Ctrl-C stops the running evaluation, and a second one ends the program."""

    def __init__(self, llm: Stoppable) -> None:
        self._llm = llm
        self._stack = ExitStack()
        self.came = False

    def __enter__(self) -> StopSignal:
        self._stack.callback(self._llm.interrupt, False)
        self._stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._on_signal))
        if sys.stdin.isatty():
            self._stack.enter_context(_local_modes(on=termios.ISIG | termios.NOFLSH))  # keeps typed text
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
        self._llm.interrupt()
