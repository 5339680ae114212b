"""Shows on a terminal how far a model and a prompt are, where that takes long; nothing elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from mixedkv.llama import Llama

T = TypeVar("T")

_EVERY = 0.5  # seconds
_LATE = 2.0


class LoadingBar:
    """Shows how much of a model is loaded, as `progress` of `Llama`."""

    def __init__(self) -> None:
        self._bar = _bar("loading")

    def __call__(self, share: float) -> None:
        self._bar.update(share - self._bar.n)

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def with_prompt_bar(
    llm: Llama, chunks: Iterable[T], evaluated: Callable[[], tuple[int, int]] | None = None
) -> Iterator[T]:
    """Yield the chunks of an answer; show how far its prompt is until the first one comes.

    Args:
        evaluated: returns how many tokens of the prompt are evaluated, and of how many; None asks the
            `Llama`.
    """
    chunks, came = iter(chunks), threading.Event()
    thread = threading.Thread(target=_watch, args=(llm, came, evaluated), daemon=True)
    thread.start()
    try:
        begin = list(islice(chunks, 1))
    finally:
        came.set()
        thread.join()
    yield from begin
    yield from chunks


def _watch(llm: Llama, came: threading.Event, evaluated: Callable[[], tuple[int, int]] | None) -> None:
    began = time.time()
    if came.wait(_LATE):
        return
    with _bar("prompt", delay=0.0) as bar:  # tqdm does not clear what it shows before its own delay is over
        bar.start_t = began
        while not came.wait(_EVERY):
            n, total = llm.evaluated if evaluated is None else evaluated()
            if llm.streaming is not None and (layer := llm.streaming.layer):
                bar.set_postfix_str(f"layer {layer[0]} of the {layer[1]} that are read", refresh=False)
            bar.update(n / max(1, total) - bar.n)
            bar.refresh()


# controls as the pictures that Unicode has of them; a carriage return would write over the line
_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    ord("\r"): None,
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


def printable(text: str) -> str:
    """Return text whose control characters are shown instead of obeyed, but for line breaks and tabs: what a
    model or a file says must not set the title of a terminal, or its clipboard.
    """
    return text.translate(_PICTURES)


def shown_on(file: TextIO, text: str) -> str:
    """Return text to write to a file: as it is, where that is no terminal."""
    return printable(text) if file.isatty() else text


def _bar(what: str, delay: float = _LATE) -> Any:
    return tqdm(
        total=1.0,
        desc=what,
        delay=delay,
        disable=not sys.stderr.isatty(),
        file=sys.stderr,
        leave=False,
        bar_format="{desc}: {percentage:3.0f}% {bar:24} {elapsed}{postfix}",
    )
