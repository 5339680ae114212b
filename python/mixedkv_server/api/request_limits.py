"""Refuses requests for too much: of one answer, of this model, or for what does not go together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mixedkv.engine import Request
from mixedkv_server.api.schemas import GenerationFields
from mixedkv_server.api_error import bad_request
from mixedkv_server.http.tenant_bytes import MAX_ANSWER_BYTES
from mixedkv_server.state import ServerState

_LOGPROB_BYTES = 100  # of JSON, at most for most tokens


def check_request(
    server: ServerState,
    body: GenerationFields,
    owner: str,
    prompts: Sequence[Sequence[int]],
    *,
    shows_images: bool,
) -> None:
    """Refuse what is too much, or does not go together, before any of it is made.

    Raises:
        ApiError: 400.
    """
    n, engine = body.n or 1, server.engine
    most = engine.n_ctx if body.most_tokens is None else body.most_tokens
    slides = body.slides(server.settings.overflow) and not shows_images
    _check_tokens(server, body, most)
    _check_logprobs(
        n * len(prompts), most if slides else min(most, engine.n_ctx), engine.n_ctx, body.n_logprobs
    )
    _check_prompt_logprobs(server, body, prompts)
    _check_reuse(server, body)
    if shows_images:
        _check_images(body)
    if n * len(prompts) > engine.most_jobs(owner):
        raise bad_request(f"n={n} for {len(prompts)} prompts is more than this server queues", "n")


def answer_bytes(requests: Iterable[Request], n_ctx: int) -> int:
    """Return how many bytes the logprobs of answers may have; texts are small beside them."""
    n = 0
    for request in requests:
        if request.n_logprobs is not None:
            most = request.max_tokens if request.slides else min(request.max_tokens, n_ctx)
            n += most * (request.n_logprobs + 1)
        if request.prompt_logprobs is not None:
            n += len(request.prompt) * (request.prompt_logprobs + 1)
    return n * _LOGPROB_BYTES


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
    token_texts = server.engine.detokenizer
    sizes = (
        len(prompt) if isinstance(prompt, str) else sum(len(token_texts[token]) for token in prompt)
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


def _check_images(body: GenerationFields) -> None:
    """Refuse fields that do not go with images. The server's defaults for them are not used either."""
    requested = {
        "prompt_logprobs": body.prompt_logprobs is not None,
        "overflow": body.overflow == "slide",
        "speculation": body.speculation not in (None, "off"),
        "prediction": bool(body.predicted_text),
        "reuse": body.reuse == "chunks",
        "chunks": body.chunks is not None,
    }
    if name := next((name for name, is_requested in requested.items() if is_requested), None):
        raise bad_request(f"{name} does not go with images: leave one out", name)
