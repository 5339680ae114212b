"""The answer to a submitted prompt, read chunk by chunk while it is generated, or as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import CancelledError
from typing import Protocol

from mixedkv.engine.chat.chat_template import RenderedChat
from mixedkv.engine.jobs.job import Done, Event, Failed, Job
from mixedkv.engine.sample.sampler import TokenLogprob
from mixedkv.engine.text.answer_reader import Part, ReadAnswer


class _Engine(Protocol):
    def cancel(self, job: Job) -> None: ...

    def drive(self, until: Callable[[], object]) -> None: ...


class Answer:
    """An answer. Iterate over it (`for` or `async for`) for chunks of text; `text`, `result` and `await` give
    all of it.

    Leaving an iteration early cancels the answer. Each chunk is yielded once, and stays part of `text`.

    Attributes:
        job: the numbers: n_prompt, n_cached, n_answer, exact, t_first - t_submit.
    """

    def __init__(self, engine: _Engine, job: Job, chat: RenderedChat | None = None) -> None:
        self.job = job
        self._engine, self._chat = engine, chat or RenderedChat(text="")
        self._chunks: deque[str] = deque()  # nobody has taken
        self._taken: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._end: Done | Failed | None = None
        self._changed = threading.Condition()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        job.deliver = self._receive

    def cancel(self, error: Exception | None = None) -> None:
        """Stop generating. Whoever waits for the rest gets `error`, or a CancelledError if it is None."""
        with self._changed:
            if self._end is not None:
                return
            self._end = Failed(error or CancelledError("the answer was cancelled"))
            self._wake()
        self._engine.cancel(self.job)

    @property
    def text(self) -> str:
        """The whole answer, once it has ended."""
        return self.result().text

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish_reason, once the answer has ended."""
        return self.message.finish_reason(self.result().reason)

    @property
    def message(self) -> ReadAnswer:
        """Return the answer to a `Chat` as text, thoughts and calls; waits for its end."""
        reader = self._chat.reader()
        reader.feed(self.text, last=True)
        return reader.answer

    def parts(self) -> Iterator[Part]:
        """Iterate over the answer to a `Chat` while it is generated: chunks of text, thoughts and calls.

        Leaving the iteration early cancels the answer.
        """
        reader = self._chat.reader()
        for chunk in self:
            yield from reader.feed(chunk)
        yield from reader.feed("", last=True)

    async def aparts(self) -> AsyncIterator[Part]:
        """Iterate as `parts` does, in asyncio."""
        reader = self._chat.reader()
        async with contextlib.aclosing(self.__aiter__()) as chunks:
            async for chunk in chunks:
                for part in reader.feed(chunk):
                    yield part
        for part in reader.feed("", last=True):
            yield part

    def result(self, timeout: float | None = None) -> Done:
        """Wait for the end; return the whole answer and why it ended: "stop", or "length" at max_tokens or
        the context's end.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds.
            Exception: what made it fail: EngineError, ClosedError, CancelledError, ...
        """
        late = None if timeout is None else time.monotonic() + timeout
        self._engine.drive(lambda: self._has_ended() or (late is not None and time.monotonic() > late))
        with self._changed:
            if not self._changed.wait_for(self._has_ended, timeout):
                raise TimeoutError(f"the answer has not ended after {timeout} seconds")
            return self._whole()

    def __iter__(self) -> Iterator[str]:
        try:
            while True:
                self._engine.drive(self._has_chunk)
                with self._changed:
                    self._changed.wait_for(self._has_chunk)
                    chunk = self._next_chunk()
                if chunk is None:
                    return
                yield chunk
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        try:
            while True:
                await self._arrival(chunks=True)
                with self._changed:
                    chunk = self._next_chunk()
                if chunk is None:
                    return
                yield chunk
        finally:
            self.cancel()

    def __await__(self) -> Generator[None, None, Done]:
        try:
            yield from self._arrival(chunks=False).__await__()
        finally:
            self.cancel()
        with self._changed:
            return self._whole()

    # --- the engine's thread ---

    def _receive(self, event: Event) -> None:
        with self._changed:
            if self._end is not None:  # cancelled meanwhile
                return
            if isinstance(event, Failed):
                self._end = event
            else:
                if event.text:
                    self._chunks.append(event.text)
                self._logprobs += event.logprobs
                if isinstance(event, Done):
                    self._end = event
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        for loop, future in sleepers:
            with contextlib.suppress(RuntimeError):  # a loop that was closed: nobody waits
                loop.call_soon_threadsafe(_finish, future)

    # --- who waits ---

    async def _arrival(self, chunks: bool) -> None:
        """Wait for a chunk, or for the end."""
        self._engine.drive(self._has_chunk if chunks else self._has_ended)
        while True:
            with self._changed:
                if self._end is not None or (chunks and self._chunks):
                    return
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._sleepers.append((loop, future))
            await future

    def _has_ended(self) -> bool:
        return self._end is not None

    def _has_chunk(self) -> bool:
        return self._end is not None or bool(self._chunks)

    def _next_chunk(self) -> str | None:
        """Return the next chunk of text, None at the end."""
        if self._chunks:
            self._taken.append(self._chunks.popleft())
            return self._taken[-1]
        if isinstance(self._end, Failed):
            raise self._end.error
        return None

    def _whole(self) -> Done:
        if isinstance(self._end, Failed):
            raise self._end.error
        assert self._end is not None
        text = "".join([*self._taken, *self._chunks])
        return Done(self._end.reason, text, tuple(self._logprobs))


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
