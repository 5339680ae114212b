"""Writes logprobs in the forms of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

from mixedkv.engine import Job, TokenLogprob
from mixedkv_server.packing import Long

_LOWEST = -9999.0  # JSON has no infinity


class TokenTexts(Protocol):
    """The bytes of tokens, as an engine's `detokenizer` has them."""

    def __getitem__(self, token: int) -> bytes:
        """Return a token's bytes, b"" for control tokens."""

    def name(self, token: int) -> bytes:
        """Return a token's bytes, with control tokens written out."""


def chat_logprobs(
    token_texts: TokenTexts, logprobs: Sequence[TokenLogprob], *, ids: bool = False
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat; with `ids` also the tokens' ids, like llama-server."""
    content = (
        {
            **_entry(token_texts, lp.token, lp.logprob, ids),
            "top_logprobs": [_entry(token_texts, token, logprob, ids) for token, logprob in lp.top.tolist()],
        }
        for lp in logprobs
    )
    return {"content": Long(content), "refusal": None}


class CompletionLogprobs:
    """Writes `choices[].logprobs` of one completion, event by event.

    Args:
        offset: number of characters before the first token.
    """

    def __init__(self, token_texts: TokenTexts, offset: int) -> None:
        self._token_texts, self._offset = token_texts, offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log probabilities of the next tokens."""
        return {
            "tokens": [_text(self._token_texts, lp.token) for lp in logprobs],
            "token_logprobs": [max(lp.logprob, _LOWEST) for lp in logprobs],
            "top_logprobs": Long(map(self._top, logprobs)),
            "text_offset": [self._take(lp.token) for lp in logprobs],
        }

    def of_prompt(self, tokens: Sequence[int], found: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the same of a prompt that is echoed, whose first token has none."""
        first = {
            "tokens": [_text(self._token_texts, token) for token in tokens[:1]],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._take(token) for token in tokens[:1]],
        }
        return joined(first, self.of(found))

    def _take(self, token: int) -> int:
        """Return how many characters end before a token. Control tokens are no text."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._token_texts[token]))
        return offset

    def _top(self, lp: TokenLogprob) -> dict[str, float]:
        """Return the likeliest tokens by their texts; of those with one text the likeliest has it."""
        top: dict[str, float] = {}
        for token, logprob in lp.top.tolist():
            text = _text(self._token_texts, token)
            top[f"token_id:{token}" if text in top else text] = max(logprob, _LOWEST)
        return top


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the log probabilities of two texts, one after the other."""
    return {name: Long(chain(one[name], other[name])) for name in one}


def prompt_logprobs(token_texts: TokenTexts, job: Job) -> dict[str, Any]:
    """Return vLLM's field of that name, to be merged in: for each token after the first the likeliest ones
    and itself, by id. Empty if they were not asked for.
    """
    requested = job.answer.prompt_logprobs
    if requested is None:
        return {}
    tokens = (_places(token_texts, logprob, rank) for logprob, rank in requested.found)
    return {"prompt_logprobs": Long(chain([None], tokens))}


def _places(token_texts: TokenTexts, lp: TokenLogprob, rank: int) -> dict[str, Any]:
    places = [(token, p, i + 1) for i, (token, p) in enumerate(lp.top.tolist())]
    return {
        str(token): {"logprob": max(p, _LOWEST), "rank": place, "decoded_token": _name(token_texts, token)}
        for token, p, place in [*places, (lp.token, lp.logprob, rank)]
    }


def _entry(token_texts: TokenTexts, token: int, logprob: float, ids: bool) -> dict[str, Any]:
    return {
        **({"id": token} if ids else {}),
        "token": _name(token_texts, token),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(token_texts.name(token)),
    }


def _text(token_texts: TokenTexts, token: int) -> str:
    """Return a token's text, or its bytes as OpenAI writes them where they are a part of a character."""
    name = token_texts.name(token)
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


def _name(token_texts: TokenTexts, token: int) -> str:
    return token_texts.name(token).decode("utf-8", "replace")
