"""Measures how much a long prompt holds up the answers that are being generated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv_bench.harness.chat_client import ChatAnswer, ClientSampling, Message, ask, watch
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.http_connection import connect

_IDLE_SECONDS = 2.0
_POLL_SECONDS = 0.02
_MAX_SECONDS = 120.0

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stall:
    """Seconds between tokens of the streams without and with a prompt being evaluated, and that one's own
    time to the first token.
    """

    idle: Times
    busy: Times
    ttft: float
    n_prompt: int


def stall(url: str, streams: Sequence[str], prompt: str, n_room: int, sampling: ClientSampling) -> Stall:
    """Watch answers alone for a while, then while a long prompt is evaluated.

    Args:
        streams: what the answers are to.
        n_room: tokens that each of them may take.

    Raises:
        CannotRunError: the server failed, or the streams brought too few tokens to tell.
    """
    return asyncio.run(_stall(url, streams, prompt, n_room, sampling))


async def _stall(url: str, texts: Sequence[str], prompt: str, n_room: int, sampling: ClientSampling) -> Stall:
    gaps: list[tuple[float, float]] = []  # when a token came, and seconds since the one before
    endless = ClientSampling(n_room, sampling.banned)
    streams = [asyncio.ensure_future(_stream(url, endless.body(_user(text)), gaps)) for text in texts]
    try:
        await _until(lambda: len(gaps) >= 4 * len(texts), streams)
        idle_from = time.perf_counter()
        await asyncio.sleep(_IDLE_SECONDS)
        async with connect(url) as connection:
            busy_from = time.perf_counter()
            answer = await ask(connection, ClientSampling(1, sampling.banned).body(_user(prompt)))
        busy_to = busy_from + answer.ttft
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    idle = np.array([gap for at, gap in gaps if idle_from <= at < busy_from])
    busy = np.array([gap for at, gap in gaps if busy_from <= at <= busy_to])
    if not len(idle) or not len(busy):
        raise CannotRunError(
            f"too few tokens to measure: {len(idle)} came without a long prompt and {len(busy)} with one"
        )
    return Stall(idle, busy, answer.ttft, answer.n_prompt or 0)


def _user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


async def _stream(url: str, body: dict[str, object], gaps: list[tuple[float, float]]) -> None:
    """Generate without end, and note the time between tokens of the same answer."""
    async with connect(url) as connection:
        while True:
            last = None
            async for now in watch(connection, body, ChatAnswer()):
                if last is not None:
                    gaps.append((now, now - last))
                last = now


async def _until(done: Callable[[], bool], streams: Sequence[asyncio.Future[None]]) -> None:
    end = time.monotonic() + _MAX_SECONDS
    while not done():
        for stream in streams:
            if stream.done():
                stream.result()
        if time.monotonic() > end:
            raise CannotRunError("the streams brought no tokens")
        await asyncio.sleep(_POLL_SECONDS)
