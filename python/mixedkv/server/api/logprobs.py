"""Writes logprobs in the forms of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mixedkv.engine.sample.prompt_logprobs import PromptLogprobs
from mixedkv.engine.sample.sampler import TokenLogprob
from mixedkv.engine.text.detokenizer import Detokenizer

_LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(
    pieces: Detokenizer, logprobs: Sequence[TokenLogprob], *, ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat; with `ids` also the tokens' ids, like llama-server."""
    content = [
        {
            **_entry(pieces, lp.token, lp.logprob, ids),
            "top_logprobs": [_entry(pieces, token, logprob, ids) for token, logprob in lp.top.tolist()],
        }
        for lp in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(pieces: Detokenizer, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; `offset` is the number of characters before the first
    token.
    """
    tokens = [_name(pieces, lp.token) for lp in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [max(lp.logprob, _LOWEST) for lp in logprobs],
        "top_logprobs": [{_name(pieces, t): max(p, _LOWEST) for t, p in lp.top.tolist()} for lp in logprobs],
        "text_offset": offsets,
    }


def prompt_logprobs(pieces: Detokenizer, asked: PromptLogprobs | None) -> dict[str, Any]:
    """Return vLLM's field of that name, to be merged in: for each token after the first the likeliest ones
    and itself, by id. Empty if they were not asked for.
    """
    if asked is None:
        return {}
    tokens = [_places(pieces, logprob, rank) for logprob, rank in asked.found]
    return {"prompt_logprobs": [None, *tokens]}


def _places(pieces: Detokenizer, lp: TokenLogprob, rank: int) -> dict[str, Any]:
    places = [(token, p, i + 1) for i, (token, p) in enumerate(lp.top.tolist())]
    return {
        str(token): {"logprob": max(p, _LOWEST), "rank": place, "decoded_token": _name(pieces, token)}
        for token, p, place in [*places, (lp.token, lp.logprob, rank)]
    }


def _entry(pieces: Detokenizer, token: int, logprob: float, ids: bool) -> dict[str, Any]:
    return {
        **({"id": token} if ids else {}),
        "token": _name(pieces, token),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(pieces.name(token)),
    }


def _name(pieces: Detokenizer, token: int) -> str:
    return pieces.name(token).decode("utf-8", "replace")
