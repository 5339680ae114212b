"""Makes jobs from the body of a request, and what OpenAI's two endpoints have in common of their answers."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from mixedkv.chunks.chunk_reuse import ChunkChoice
from mixedkv.engine import Chat, Constraint, Delta, Done, Job, RenderedChat, Request, Sampling
from mixedkv.errors import ContextLengthError
from mixedkv.ids import new_id
from mixedkv.images.picture import PromptImage
from mixedkv.server.api.llama_settings import about_answer, prompt_text
from mixedkv.server.api.schemas import GenerationFields
from mixedkv.server.api.sse import DONE, PING, SentAnswer, Template, long_sse, sse
from mixedkv.server.api_error import ApiError, bad_request, from_engine
from mixedkv.server.state import ServerState
from mixedkv.sessions import CacheSessionMetadata

_SAMPLING = {each.name for each in fields(Sampling)} & GenerationFields.model_fields.keys() - {
    "seed",
    "logit_bias",
    "dry_sequence_breakers",
    "samplers",
}
MAX_ANSWER_BYTES = 64_000_000  # of the answer to one request, as it may become
_LOGPROB_BYTES = 100  # of JSON, at most for most tokens


def context_tokens(server: ServerState, session: Any, *, long: bool = False) -> list[int]:
    """Return the tokens of a session's prompt, for messages up to the answer. If `long`, they need not fit
    the context.
    """
    if session.prompt is not None:
        return server.engine.tokenizer.prompt(session.prompt, long=long)
    messages = [message.model_dump(exclude_none=True) for message in session.messages]
    return server.engine.tokenizer.render(Chat(messages=messages), long=long)[0]


def slides(server: ServerState, body: GenerationFields) -> bool:
    """Return whether the middle of a prompt that does not fit the context is dropped."""
    return (body.overflow or server.settings.overflow) == "slide"


def sampling(server: ServerState, body: GenerationFields, constraint: Constraint | None) -> Sampling:
    """Return the sampling settings of a request.

    Raises:
        ApiError: 400, a value is out of its range.
    """
    seed = body.seed if body.seed is not None else server.sampling.get("seed")
    seed = secrets.randbits(32) if seed is None else seed
    bias = tuple(_biases(server, body.logit_bias or {}))
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.dry_sequence_breakers is not None:
        given["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if body.samplers is not None:
        given["samplers"] = tuple(body.samplers)
    given = {**server.sampling, **given, "seed": seed % 2**32, "logit_bias": bias}
    try:
        return Sampling(**given, constraint=constraint)
    except ValueError as error:
        raise _bad_field(error) from None


def make_jobs(
    server: ServerState,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    *,
    owner: str,
    max_tokens: int | None,
    constraint: Constraint | None = None,
    n_logprobs: int | None = None,
    post_sampling: bool = False,
    session: CacheSessionMetadata | None = None,
    param: str = "prompt",
    chat: RenderedChat | None = None,
    budget: int | None = None,
    prediction: str = "",
    images: Sequence[PromptImage] = (),
    message_ends: Sequence[tuple[str, int]] = (),
) -> list[Job]:
    """Return `body.n` jobs for each prompt. Not for the event loop, since constraints take time to compile.

    Args:
        chat: the rendered chat, if the prompt is one.
        budget: maximum number of tokens of a thought.
        prediction: text that an answer may contain.
        images: the images in the prompts.
        message_ends: ids of messages in the prompt, and the position where each ends.

    Raises:
        ApiError: 400.
    """
    n, engine = body.n or 1, server.engine
    max_tokens = engine.n_ctx if max_tokens is None else max_tokens
    long = slides(server, body) and not images
    most_tokens = max_tokens if long else min(max_tokens, engine.n_ctx)
    _check_tokens(server, body, max_tokens)
    _check_logprobs(n * len(prompts), most_tokens, engine.n_ctx, n_logprobs)
    _check_prompt_logprobs(server, body, prompts)
    _check_reuse(server, body)
    if images:
        _check_images(body, prediction)
    if n * len(prompts) > engine.most_jobs(owner):
        raise bad_request(f"n={n} for {len(prompts)} prompts is more than this server queues", "n")
    reuse = body.use_kv_cache is not False
    try:
        requests = [
            Request(
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=sampling(server, body, constraint),
                tenant=owner,
                session=session.kv_cache_ref if session is not None else None,
                stop=[*body.stops, *(chat.stops if chat is not None else ())],
                stop_tokens=body.stop_token_ids or (),
                min_tokens=body.min_tokens or 0,
                ignore_end=bool(body.ignore_eos),
                n_indent=body.n_indent or 0,
                max_seconds=_seconds(body.t_max_predict_ms),
                stream=bool(body.stream),
                n_logprobs=n_logprobs,
                post_sampling=post_sampling,
                prompt_logprobs=body.prompt_logprobs,
                reuse=(body.reuse or True) if reuse else False,
                chunks=None if body.chunks is None else ChunkChoice(**body.chunks.model_dump()),
                store=reuse,
                overflow="slide" if long else "refuse",
                speculation=body.speculation,
                prediction=prediction,
                pictures=[picture for image in images for picture in image.pictures],
                thought_budget=budget,
                message_ends=message_ends,
                **(engine.tokenizer.answer_fields(chat, len(prompt)) if chat is not None else {}),
            )
            for prompt in prompts
        ]
        return engine.prepare(requests, n)
    except ContextLengthError as error:
        raise from_engine(error, param) from error
    except ValueError as error:
        raise _bad_field(error) from None


def _seconds(milliseconds: int | None) -> float | None:
    return milliseconds / 1000 if milliseconds is not None and milliseconds > 0 else None


def _bad_field(error: ValueError) -> ApiError:
    """Return the error for a message that begins with the field."""
    return bad_request(str(error), str(error).partition(":")[0].partition("=")[0])


class PromptProgress:
    """Makes llama-server's field about a prompt in a stream: as time goes by, and before the answer begins. A
    prompt that took no time is told with what was cached, and then as done.

    Args:
        wanted: whether it is asked for.
    """

    def __init__(self, job: Job, wanted: bool | None) -> None:
        self._job, self._wanted = job, bool(wanted)
        self._told = -1  # tokens

    def now(self) -> dict[str, Any] | None:
        """Return the tokens of the prompt, the cached and the evaluated ones. None when it is done."""
        seq = self._job.seq  # the engine's thread sets it
        if self._job.evaluated or not self._wanted:
            return None
        return self._tell(min(len(seq.tokens) if seq is not None else 0, self._job.n_prompt))

    def done(self) -> list[dict[str, Any]]:
        """Return what is to be told before the first event of an answer."""
        wanted, self._wanted = self._wanted, False
        if not wanted:
            return []
        job = self._job
        first = [self._tell(job.n_cached or 0)] if self._told < 0 else []
        return [*first, self._tell(job.n_prompt)] if self._told < job.n_prompt else first

    def _tell(self, n: int) -> dict[str, Any]:
        job, self._told = self._job, n
        at = job.t_first if job.t_first is not None else time.perf_counter()
        times = round(1000 * (at - job.t_submit))
        return {"total": job.n_prompt, "cache": job.n_cached or 0, "processed": n, "time_ms": times}


def timings(job: Job) -> dict[str, Any]:
    """Return llama-server's field about speed: the evaluated and generated tokens, milliseconds, and tokens
    per second. The first token comes from the prompt's last step, so only those after it took one.
    """
    at = job.t_end if job.t_end is not None else time.perf_counter()
    first = job.t_first if job.t_first is not None else at
    n_cached, n_steps = job.n_cached or 0, max(0, job.n_answer - 1)
    drafter = job.answer.drafter
    drafts = {} if drafter is None else {"draft_n": drafter.n_drafted, "draft_n_accepted": drafter.n_accepted}
    return {
        "cache_n": n_cached,
        **_rate("prompt", job.n_prompt - n_cached, job.n_prompt - n_cached, first - job.t_submit),
        **_rate("predicted", job.n_answer, n_steps, at - first),
        **drafts,
    }


def _rate(name: str, n: int, n_steps: int, seconds: float) -> dict[str, Any]:
    milliseconds = round(1e3 * seconds, 3)
    return {
        f"{name}_n": n,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / n_steps if n_steps else 0.0,
        f"{name}_per_second": 1e3 * n_steps / max(milliseconds, 1e-3),
    }


def usage(jobs: Sequence[Job], n: int) -> dict[str, Any]:
    """Return OpenAI's usage. Each prompt counts once, however many choices it has."""
    firsts = jobs[::n]
    prompt_tokens = sum(job.n_given for job in firsts)
    dropped = sum(job.n_dropped for job in jobs)
    answer_tokens = sum(job.n_answer for job in jobs)
    details = {}
    if thoughts := [job.n_thought for job in jobs if job.answer.thought is not None]:
        details["reasoning_tokens"] = sum(thoughts)
    if drafters := [job.answer.drafter for job in jobs if job.answer.drafter is not None]:
        accepted = sum(drafter.n_accepted for drafter in drafters)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = sum(each.n_drafted for each in drafters) - accepted
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": cached_details(jobs, n),
        **({"completion_tokens_details": details} if details else {}),
        **({"dropped_tokens": dropped} if dropped else {}),
    }


def cached_details(jobs: Sequence[Job], n: int = 1) -> dict[str, Any]:
    """Return what the answers to prompts, `n` to each, started from, and whether they are exact."""
    firsts = jobs[::n]
    approximate = sum(job.n_approximate for job in firsts)
    repair = next((job.method for job in firsts if job.n_approximate and job.method), None)
    return {
        "cached_tokens": sum(job.n_cached_exact for job in firsts),
        "cached_tier": next((job.cached_tier for job in firsts if job.n_cached_exact), None),
        "cached_exact": all(job.exact for job in jobs),
        **({"approximate_cached_tokens": approximate, "cached_repair": repair} if approximate else {}),
    }


class OpenAIAnswer(SentAnswer):
    """The part of a stream that both of OpenAI's endpoints have.

    Args:
        prefix: of the answer's id.
    """

    chunk = ""  # `object` of a part of a stream

    def __init__(self, server: ServerState, body: GenerationFields, jobs: Sequence[Job], prefix: str) -> None:
        self._server, self._body, self._jobs = server, body, jobs
        self._n, self._pieces = body.n or 1, server.engine.detokenizer
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
        """Return the event with a choice, with timings if each has them. A `long` one is made in pieces."""
        made = {**self._chunk(choice), **self._timings(choice["index"])}
        return long_sse(made) if long else sse(made)

    def _more(self, ends: Sequence[Done]) -> dict[str, Any]:
        """Return the fields of a whole answer that are there where they are asked for."""
        if not self._body.verbose:
            return self._timings()
        job, end = self._jobs[0], ends[0]
        told = about_answer(job, end, prompt_text(job, self._pieces), self._body.most_tokens())
        return {**self._timings(), "__verbose": {"content": end.text, **told}}

    def _timings(self, i: int = 0) -> dict[str, Any]:
        """Return the field about speed where it is asked for."""
        return {"timings": timings(self._jobs[i])} if self._body.timings_per_token else {}

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
        end = {**self._head, "choices": [], "usage": usage(self._jobs, self._n), **self._timings()}
        return sse(end) + DONE


def constraint_of(body: GenerationFields, schema: Constraint | None = None) -> Constraint | None:
    """Return the constraint of an answer: `schema`, or the body's `grammar` or `regex`.

    Raises:
        ApiError: 400, there is more than one.
    """
    given = [schema] if schema is not None else []
    if body.grammar is not None:
        given.append(Constraint("gbnf", body.grammar, "grammar"))
    if body.regex is not None:
        given.append(Constraint("regex", body.regex, "regex"))
    if len(given) > 1:
        one, other = given[-1].name, given[0].name
        raise bad_request(f"{one} and {other} both say what the answer looks like: give one", one)
    return given[0] if given else None


def _check_reuse(server: ServerState, body: GenerationFields) -> None:
    if body.reuse == "chunks" and not server.settings.reuses_chunks:
        raise bad_request(
            "this server reuses no chunks: start it with --reuse chunks, or ask for exact or prefix", "reuse"
        )
    if body.chunks is not None and not server.settings.reuses_chunks:
        raise bad_request("this server reuses no chunks: start it with --reuse chunks", "chunks")
    if body.reuse is not None and body.use_kv_cache is False:
        raise bad_request(f"reuse={body.reuse} and use_kv_cache=false exclude each other: give one", "reuse")


def _check_tokens(server: ServerState, body: GenerationFields, max_tokens: int) -> None:
    if (body.min_tokens or 0) > max_tokens:
        raise bad_request(f"min_tokens={body.min_tokens} is more than max_tokens={max_tokens}", "min_tokens")
    n_vocab = server.engine.tokenizer.n_vocab
    if bad := next((token for token in body.stop_token_ids or () if token >= n_vocab), None):
        raise bad_request(
            f"stop_token_ids: token {bad} is not one of this model's {n_vocab}", "stop_token_ids"
        )


def _check_logprobs(n: int, n_tokens: int, n_ctx: int, n_logprobs: int | None) -> None:
    """Refuse too many logprobs, which take a hundred times the memory of the text. One answer may have those
    of a whole context.
    """
    if n_logprobs is None:
        return
    each = (n_logprobs + 1) * _LOGPROB_BYTES
    if n * n_tokens * each > max(MAX_ANSWER_BYTES, n_ctx * each):
        raise bad_request(
            f"{n} answers of up to {n_tokens} tokens with {n_logprobs} logprobs each may have "
            f"{n * n_tokens * each} bytes, and this server gives {MAX_ANSWER_BYTES} at a time: lower "
            "max_tokens, n or the number of logprobs",
            "max_tokens",
        )


def check_echo(server: ServerState, prompts: Sequence[str | Sequence[int]], n: int) -> None:
    """Refuse to send prompts back that make the answer too large."""
    pieces = server.engine.detokenizer
    sizes = (
        len(prompt) if isinstance(prompt, str) else sum(len(pieces[token]) for token in prompt)
        for prompt in prompts
    )
    if (size := n * sum(sizes)) > MAX_ANSWER_BYTES:
        raise bad_request(
            f"echo: with n={n} the prompts have {size} characters in the answer, and this server gives "
            f"{MAX_ANSWER_BYTES} at a time: send fewer, or lower n",
            "echo",
        )


def _check_prompt_logprobs(
    server: ServerState, body: GenerationFields, prompts: Sequence[Sequence[int]]
) -> None:
    if body.prompt_logprobs is None:
        return
    n_ctx = server.engine.n_ctx
    if longest := max((n for n in map(len, prompts) if n >= n_ctx), default=0):
        raise bad_request(
            f"prompt_logprobs: the prompt has {longest} tokens, and what does not fit the context of {n_ctx} "
            "is not evaluated: shorten it",
            "prompt_logprobs",
            "context_length_exceeded",
        )
    n = sum(map(len, prompts)) * (body.prompt_logprobs + 1)
    if n * _LOGPROB_BYTES > MAX_ANSWER_BYTES:
        raise bad_request(
            f"prompt_logprobs: {n} may have {n * _LOGPROB_BYTES} bytes, and this server gives "
            f"{MAX_ANSWER_BYTES} at a time: ask for fewer, or send fewer prompts",
            "prompt_logprobs",
        )


def _check_images(body: GenerationFields, prediction: str) -> None:
    """Refuse fields that do not go with images. The server's defaults for them are not used either."""
    asked = {
        "prompt_logprobs": body.prompt_logprobs is not None,
        "overflow": body.overflow == "slide",
        "speculation": body.speculation not in (None, "off"),
        "prediction": bool(prediction),
        "reuse": body.reuse == "chunks",
        "chunks": body.chunks is not None,
    }
    if name := next((name for name, is_asked in asked.items() if is_asked), None):
        raise bad_request(f"{name} does not go with images: leave one out", name)


def _biases(server: ServerState, given: Mapping[str, float | Literal[False]]) -> Iterator[tuple[int, float]]:
    """Yield tokens and what to add to their logits. A text stands for each of its tokens, as in llama-server.

    Raises:
        ApiError: 400, a text has no tokens.
    """
    for key, value in given.items():
        bias = -math.inf if value is False else value
        if key.isascii() and key.removeprefix("-").isdigit():
            yield int(key), bias
            continue
        try:
            tokens = server.engine.tokenizer.tokenize(key, start=False, special=False)
        except ValueError as error:
            raise bad_request(f"logit_bias: {key!r:.80}: {error}", "logit_bias") from None
        yield from ((token, bias) for token in tokens)
