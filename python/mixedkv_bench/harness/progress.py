"""A progress bar on a terminal; elsewhere only the lines of those that ask for them."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm


class Bar:
    """One bar over all that a run does; its length grows as parts are added."""

    def __init__(self) -> None:
        self._bar = tqdm(
            total=0,
            disable=not sys.stderr.isatty(),
            file=sys.stderr,
            leave=False,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}% {bar:24} {elapsed} < {remaining}  {desc}",
        )

    def add(self, n: int) -> None:
        self._bar.total += n
        self._bar.refresh()

    def step(self, n: int = 1) -> None:
        self._bar.update(n)

    def say(self, line: str) -> None:
        """Write a line to stderr, above the bar."""
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, file=sys.stderr, flush=True)

    def show(self, what: str) -> None:
        self._bar.set_description_str(what, refresh=False)
        self._bar.update(0)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bar.close()
