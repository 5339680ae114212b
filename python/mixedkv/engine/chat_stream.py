"""The answer to a chat, as chunks in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from typing import Any

from mixedkv.engine.answer import Answer
from mixedkv.engine.generation import Generation
from mixedkv.engine.text.answer_reader import Part, ReadAnswer
from mixedkv.errors import StoppedError

End = Callable[[dict[str, Any], str, bool], Generation]


class ChatStream:
    """Chunks of an answer in OpenAI's form, and the `result` after the last of them.

    Args:
        model: the model's name in the chunks.
        end: ends the answer; gets its message, OpenAI's finish_reason, and whether it has ended by itself.
    """

    def __init__(self, answer: Answer, message_id: str, model: str, end: End) -> None:
        self.message_id = message_id
        self.result: Generation | None = None
        self._answer, self._report = answer, end
        self._head = {
            "id": f"chatcmpl-{message_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._chunks = self._run()

    @property
    def evaluated(self) -> tuple[int, int]:
        """The number of tokens of the prompt that have rows, and of all of them. Any thread may ask."""
        job = self._answer.job
        return min(job.n_rows, job.n_prompt), job.n_prompt

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._chunks)

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop here. What was computed is kept."""
        self._chunks.close()
        if self.result is None:  # not begun
            self._end(ReadAnswer(), "", ended=False)

    def _run(self) -> Generator[dict[str, Any], None, None]:
        said, reason, ended, first = ReadAnswer(), "", False, True
        try:
            for part in self._answer.parts():
                _add(said, part)
                if first:
                    yield self._chunk({"role": "assistant", "message_id": self.message_id})
                first = False
                yield self._chunk(_delta(part))
            said, reason, ended = self._answer.message, self._answer.finish_reason, True
            if first:
                yield self._chunk({"role": "assistant", "message_id": self.message_id})
            yield self._chunk({}, reason)
        except CancelledError:
            raise StoppedError("the answer was stopped") from None
        finally:
            self._end(said, reason, ended)

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
        }

    def _end(self, said: ReadAnswer, reason: str, ended: bool) -> None:
        message = {**_message(said), "message_id": self.message_id}
        self.result = self._report(message, reason, ended)


def _add(said: ReadAnswer, part: Part) -> None:
    """Add a part to what was said so far; calls that have not ended are nobody's to run."""
    said.content += part.content
    said.reasoning += part.reasoning


def _delta(part: Part) -> dict[str, Any]:
    if part.index >= 0:
        function = {"name": part.name or None, "arguments": part.arguments}
        return {
            "tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": function}]
        }
    return {"content": part.content} if part.content else {"reasoning_content": part.reasoning}


def _message(said: ReadAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.complete_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.complete_calls
        ]
    return message
