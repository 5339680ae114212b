"""A program on a terminal: what it shows is read, keys are pressed."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

from support import TESTS
from support.patience import PATIENCE

_NOTHING = re.compile(r"(?!)")
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process whose stdin, stdout and stderr are one terminal, of which it is the foreground.

    `raw` is all that it wrote. `python` is the interpreter whose mixedkv it runs, and `size` is in lines and
    columns.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: dict[str, str] | None = None,
        *,
        python: str = sys.executable,
        size: tuple[int, int] = (40, 200),
    ) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **(environ or {})}
        self.process = subprocess.Popen(
            [python, "-m", "support.children.controlling_terminal", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            cwd=TESTS,
            start_new_session=True,
        )
        os.close(slave)
        self.raw = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE)
        os.close(self._master)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def paste(self, text: str) -> None:
        """As a terminal does it when a program has asked for marks around what is pasted."""
        assert "\x1b[?2004h" in self.raw
        self.press("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def read(self) -> bool:
        """Read what is there; False when the process has ended."""
        has_ended = self.process.poll() is not None  # asked first: then all that it wrote is there
        if not select.select([self._master], [], [], 0.05)[0]:
            return not has_ended
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # Linux says so at the end
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def expect(self, pattern: str, n: int = 1) -> None:
        """Read until the pattern has come n times, colours and movements aside."""
        self.expect_raw(pattern, n, _SEQUENCE)

    def expect_raw(self, pattern: str, n: int = 1, aside: re.Pattern[str] = _NOTHING) -> None:
        """Read until the pattern has come n times."""
        end = time.monotonic() + PATIENCE
        while len(re.findall(pattern, aside.sub("", self.raw))) < n:
            assert self.read(), self.raw
            assert time.monotonic() < end, self.raw

    def end(self) -> int:
        """Read to the end, and return the exit code."""
        end = time.monotonic() + PATIENCE
        while self.read():
            assert time.monotonic() < end, self.raw
        return self.process.wait(PATIENCE)


def shown(raw: str) -> list[str]:
    """The lines that stand on a terminal after these bytes, of which none moves the cursor up."""
    lines = []
    for line in raw.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        at = 0
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x1b]", line):
            if part == "\r":
                at = 0
            elif part == "\x1b[A":
                raise ValueError("the cursor moves up")
            elif part[0] != "\x1b":
                cells[at : at + 1] = [part]
                at += 1
        lines.append("".join(cells).rstrip())
    return lines
