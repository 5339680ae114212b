"""Shows on a terminal how far a model and a prompt are, where that takes long; nothing elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

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


def with_prompt_bar(llm: Llama, chunks: Iterable[T]) -> Iterator[T]:
    """Yield the chunks of an answer; show how far its prompt is until the first one comes."""
    chunks, came = iter(chunks), threading.Event()
    thread = threading.Thread(target=_watch, args=(llm, came), daemon=True)
    thread.start()
    try:
        begin = list(islice(chunks, 1))
    finally:
        came.set()
        thread.join()
    yield from begin
    yield from chunks


def _watch(llm: Llama, came: threading.Event) -> None:
    began = time.time()
    if came.wait(_LATE):
        return
    with _bar("prompt", delay=0.0) as bar:  # tqdm does not clear what it shows before its own delay is over
        bar.start_t = began
        while not came.wait(_EVERY):
            n, total = llm.evaluated
            if llm.streaming is not None and (layer := llm.streaming.layer):
                bar.set_postfix_str(f"layer {layer[0]} of the {layer[1]} that are read", refresh=False)
            bar.update(n / max(1, total) - bar.n)
            bar.refresh()


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
