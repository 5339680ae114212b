"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mixedkv.engine import Delta, Done, Job
from mixedkv.sessions import CacheSessionMetadata
from mixedkv_server.api.engine_request import TokenizedPrompt, context_tokens, make_jobs
from mixedkv_server.api.growing import Turn, check_version, respond_in
from mixedkv_server.api.logprobs import CompletionLogprobs, joined, prompt_logprobs
from mixedkv_server.api.openai_answer import OpenAIAnswer
from mixedkv_server.api.request_limits import check_echo
from mixedkv_server.api.schemas import CompletionRequest
from mixedkv_server.api.usage import usage
from mixedkv_server.api_error import prompt_error
from mixedkv_server.http.json_body import JSONRoute
from mixedkv_server.state import ServerState, adapter_of, find_session, read_prompt, tenant

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue prompts, whole or as server-sent events."""
    owner = tenant(request)
    server = adapter_of(request, body.model, body.lora)
    requested = body.prompt_logprobs
    if body.echo and body.logprobs is not None and requested is None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
    session = await find_session(server, body.session_id, owner) if body.session_id else None
    if session is not None:
        check_version(body, session)
    turn = Turn.of_prompt(server, body, session)
    jobs = await read_prompt(request, completion_jobs, server, body, owner, session, session=session)
    answer = CompletionAnswer(server, body, jobs, tells_prompt=requested is not None)
    return await respond_in(turn, request, answer)


def completion_jobs(
    server: ServerState, body: CompletionRequest, owner: str, session: CacheSessionMetadata | None = None
) -> list[Job]:
    """Return `body.n` jobs for each prompt.

    Raises:
        ApiError: 400.
    """
    try:
        tokenizer, long = server.engine.tokenizer, body.slides(server.settings.overflow)
        prefix = context_tokens(server, session, long=long) if session is not None else []
        if body.suffix:
            prompts = [tokenizer.infill(str(body.prompt), body.suffix)]
        else:
            prompts = [
                prefix + tokenizer.prompt(prompt, start=not prefix, long=long) for prompt in body.prompts
            ]
    except ValueError as error:
        raise prompt_error(error, "suffix" if body.suffix else "prompt") from None
    if body.echo:
        check_echo(server, body.prompts, body.n or 1)
    return make_jobs(server, body, [TokenizedPrompt(tokens=prompt) for prompt in prompts], owner, session)


class CompletionAnswer(OpenAIAnswer):
    """Builds OpenAI's objects for the answers to prompts.

    Args:
        tells_prompt: `prompt_logprobs` were asked for.
    """

    chunk = "text_completion"
    _body: CompletionRequest

    def __init__(
        self, server: ServerState, body: CompletionRequest, jobs: list[Job], *, tells_prompt: bool = False
    ) -> None:
        super().__init__(server, body, jobs, "cmpl")
        self._tells_prompt = tells_prompt
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self._echoed: set[int] = set()  # choices whose prompt was told, with its log probabilities
        self._logprobs = [CompletionLogprobs(self._token_texts, 0) for _ in jobs]

    def whole(self, ends: list[Done]) -> dict[str, Any]:
        choices = [
            {**self._choice(i, end, self._echo(i) + end.text, end.reason), **self._of_prompt(i)}
            for i, end in enumerate(ends)
        ]
        return {
            **self._head,
            "choices": choices,
            "usage": usage(self.jobs, self._n),
            **self._more(ends),
        }

    def _of_prompt(self, i: int) -> dict[str, Any]:
        """Return the log probabilities of the prompt of a choice, which its first choice has."""
        if not self._tells_prompt:
            return {}
        first = self.jobs[i - i % self._n]
        return prompt_logprobs(self._token_texts, first)

    def first(self) -> bytes:
        """Return the events with the echoed prompts. Their log probabilities come later, and they with
        them.
        """
        if self._echoes_logprobs:
            return b""
        texts = enumerate(map(self._echo, range(len(self.jobs))))
        return b"".join(self._template(i)(text) for i, text in texts if text)

    def _events(self, i: int, event: Delta | Done) -> bytes:
        text, long = event.text, self.takes_long(i)
        if long:
            text = self._echo(i) + text
        elif isinstance(event, Delta) and not (event.logprobs or self._body.timings_per_token):
            return self._template(i)(event.text)
        return self._of_event(self._choice(i, event, text, getattr(event, "reason", None)), long=long)

    def takes_long(self, i: int) -> bool:
        return self._echoes_logprobs and i not in self._echoed

    def _choice_of(self, i: int, text: str) -> dict[str, Any]:
        return {"index": i, "text": text, "logprobs": None, "finish_reason": None}

    def _choice(self, i: int, event: Delta | Done, text: str, reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            before = self._of_echo(i)
            logprobs = self._logprobs[i].of(event.logprobs)
            logprobs = logprobs if before is None else joined(before, logprobs)
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _of_echo(self, i: int) -> dict[str, Any] | None:
        """Return the log probabilities of the echoed prompt of a choice, the first time."""
        if not self._echoes_logprobs or i in self._echoed:
            return None
        self._echoed.add(i)
        first = self.jobs[i - i % self._n]
        found = first.answer.prompt_logprobs.found if first.answer.prompt_logprobs is not None else []
        return self._logprobs[i].of_prompt(first.prompt.tolist(), [each for each, _ in found])

    def _echo(self, i: int) -> str:
        if not self._body.echo:
            return ""
        prompt = self._body.prompts[i // self._n]
        if isinstance(prompt, str):
            return prompt
        return b"".join(self._token_texts[token] for token in prompt).decode("utf-8", "replace")
