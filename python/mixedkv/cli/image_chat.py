"""Chats with images in the terminal. An engine answers them, since its prompts can have images."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from mixedkv.chat import ChatResult, ChatUsage
from mixedkv.engine import Answer, Chat, Engine, StoreConnector, Tokenizer
from mixedkv.errors import StoppedError
from mixedkv.images.projector import Projector
from mixedkv.images.prompt_image import PromptImage
from mixedkv.llama import Llama
from mixedkv.prompts.part import MARK
from mixedkv.store import KVStore

N_SEQ = 2  # an engine keeps one sequence idle


class ImageChat:
    """Answers chats whose messages may have `images`: paths of files.

    Args:
        llm: a model with N_SEQ sequences and a unified cache.
        encoder: file of its image encoder.
        chat_format: name of a chat format, "" for the model's own template.
        store: where KV is kept, None for nowhere. It is closed with this.

    Raises:
        ValueError: the encoder is of another model, or Pillow is not installed.
    """

    def __init__(
        self, llm: Llama, encoder: Path, chat_format: str = "", store: KVStore | None = None
    ) -> None:
        self._projector = Projector(llm, encoder)
        self._engine = Engine(
            llm,
            parallel=1,
            connector=None if store is None else StoreConnector(store),
            tokenizer=Tokenizer(llm, chat_format),
        )
        self._answer: ImageAnswer | None = None

    def __enter__(self) -> ImageChat:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def read(self, path: str) -> PromptImage:
        """Encode an image file.

        Raises:
            ValueError, OSError: it cannot be read, or is no image.
        """
        data = Path(path).expanduser().read_bytes()
        try:
            return self._projector.read(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def stream(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ImageAnswer:
        """Answer as `MessageCache.stream` does."""
        images = [self.read(path) for message in messages for path in message.get("images", ())]
        texts = [
            {"role": each["role"], "content": MARK * len(each.get("images", ())) + each["content"]}
            for each in messages
        ]
        if options["max_tokens"] < 0:
            options["max_tokens"] = self._engine.n_ctx
        options = {name: value for name, value in options.items() if value is not None}
        options.setdefault("repeat_last_n", self._engine.llm.last_n_tokens_size)
        chat = Chat(messages=texts, images=images)
        self._answer = ImageAnswer(self._engine.submit(chat, overflow="slide", **options))
        return self._answer

    def interrupt(self, wanted: bool = True) -> None:
        """Stop the running answer, as `Llama.interrupt` does."""
        if wanted and self._answer is not None:
            self._answer.cancel()


class ImageAnswer:
    """Chunks of an answer in OpenAI's form, and `result` at the end, as of `MessageCache.stream`."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._begin = answer, time.perf_counter()
        self.result: ChatResult | None = None
        self._chunks = self._run()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._chunks)

    def __enter__(self) -> ImageAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.close()
        self.cancel()

    def cancel(self) -> None:
        self._answer.cancel()

    def _run(self) -> Generator[dict[str, Any], None, None]:
        text, reason = "", "stop"
        try:
            for part in self._answer.parts():
                if part.content:
                    text += part.content
                    yield {"choices": [{"delta": {"content": part.content}}]}
            reason = self._answer.finish_reason
        except CancelledError:
            raise StoppedError("the answer was stopped") from None
        finally:
            self.result = self._result(text, reason)

    def _result(self, text: str, reason: str) -> ChatResult:
        job = self._answer.job
        cached = job.n_cached or 0
        first = job.t_first or time.perf_counter()
        usage = ChatUsage(
            prompt_tokens=job.n_given,
            completion_tokens=job.n_answer,
            cached_tokens=cached,
            evaluated_tokens=job.n_given - job.n_left_out - cached,
            dropped_tokens=job.n_dropped,
            stored_tokens=0,
            source="live",
            exact=job.exact,
            matched_message_id=None,
            seconds_to_first_token=first - self._begin,
        )
        return ChatResult(message={"role": "assistant", "content": text}, finish_reason=reason, usage=usage)
