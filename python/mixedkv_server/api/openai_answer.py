"""Builds what the answers of OpenAI's two endpoints have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mixedkv.engine import Delta, Done, Job
from mixedkv.ids import new_id
from mixedkv_server.api.llama_settings import about_answer, prompt_text
from mixedkv_server.api.schemas import GenerationFields
from mixedkv_server.api.sse import DONE, PING, SentAnswer, Template, long_sse, sse
from mixedkv_server.api.usage import PromptProgress, timings, usage
from mixedkv_server.state import ServerState


class OpenAIAnswer(SentAnswer):
    """The part of a stream that both of OpenAI's endpoints have.

    Args:
        prefix: of the answer's id.
        large: as in `SentAnswer`, for other reasons than log probabilities.
    """

    chunk = ""  # `object` of a part of a stream

    def __init__(
        self,
        server: ServerState,
        body: GenerationFields,
        jobs: Sequence[Job],
        prefix: str,
        *,
        large: bool = False,
    ) -> None:
        tells_much = body.n_logprobs is not None or body.prompt_logprobs is not None or bool(body.verbose)
        super().__init__(
            server,
            jobs,
            streams=body.stream is True,
            progress=bool(body.return_progress),
            large=large or tells_much,
        )
        self._body = body
        self._n, self._token_texts = body.n or 1, server.engine.detokenizer
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._progress = PromptProgress(jobs[0], body.return_progress)
        self._templates: dict[int, Template] = {}
        self._head = {
            "id": new_id(prefix),
            "object": self.chunk,
            "created": int(time.time()),
            "model": server.model_name,
            "system_fingerprint": server.fingerprint,
        }

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        raise NotImplementedError

    def _choice_of(self, i: int, text: str) -> dict[str, Any]:
        """Return a choice of a stream that has only text."""
        raise NotImplementedError

    def _template(self, i: int) -> Template:
        if i not in self._templates:
            self._templates[i] = Template(self._chunk(self._choice_of(i, Template.MARK)))
        return self._templates[i]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _of_event(self, choice: dict[str, Any], *, long: bool = False) -> bytes:
        """Return the event with a choice, with timings if each has them. A `long` one is made in chunks."""
        made = {**self._chunk(choice), **self._timings(choice["index"])}
        return long_sse(made) if long else sse(made)

    def _more(self, ends: Sequence[Done]) -> dict[str, Any]:
        """Return the fields of a whole answer that are there where they are asked for."""
        if not self._body.verbose:
            return self._timings()
        job, end = self.jobs[0], ends[0]
        told = about_answer(job, end, prompt_text(job, self._token_texts), self._body.most_tokens)
        return {**self._timings(), "__verbose": {"content": end.text, **told}}

    def _timings(self, i: int = 0) -> dict[str, Any]:
        """Return the field about speed where it is asked for."""
        return {"timings": timings(self.jobs[i])} if self._body.timings_per_token else {}

    def idle(self) -> bytes:
        progress = self._progress.now()
        return PING if progress is None else self._of_prompt_at(progress)

    def event(self, i: int, event: Delta | Done) -> bytes:
        return b"".join(map(self._of_prompt_at, self._progress.done())) + self._events(i, event)

    def _events(self, i: int, event: Delta | Done) -> bytes:
        """Return the events of a stream for one of an answer."""
        raise NotImplementedError

    def _of_prompt_at(self, progress: dict[str, Any]) -> bytes:
        chunk = self._chunk(self._choice_of(0, ""))
        return sse({**chunk, "prompt_progress": progress, **self._timings()})

    def last(self) -> bytes:
        if not self._include_usage:
            return DONE
        end = {**self._head, "choices": [], "usage": usage(self.jobs, self._n), **self._timings()}
        return sse(end) + DONE
