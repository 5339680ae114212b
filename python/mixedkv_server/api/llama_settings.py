"""Fields that llama-server has in an answer, about it and the settings that it was made with."""

from __future__ import annotations

import math
from typing import Any

from mixedkv.engine import Done, Job
from mixedkv.limits import SAMPLERS
from mixedkv_server.api.logprobs import TokenTexts

_SAME = (
    *("seed", "temperature", "dynatemp_range", "dynatemp_exponent", "top_k", "top_p", "min_p", "typical_p"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "repeat_penalty", "repeat_last_n"),
    *(
        "presence_penalty",
        "frequency_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
    ),
    *("mirostat", "mirostat_tau", "mirostat_eta", "adaptive_target", "adaptive_decay"),
)


def generation_settings(job: Job, most: int | None) -> dict[str, Any]:
    """Return llama-server's `generation_settings`, of what there is here.

    Args:
        most: tokens of the answer; None for as many as fit.
    """
    request, sampling = job.request, job.request.sampling
    assert sampling is not None
    constraint = sampling.constraint
    return {
        **{name: getattr(sampling, name) for name in _SAME},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "samplers": list(SAMPLERS if sampling.samplers is None else sampling.samplers),
        "logit_bias": [
            {"token": token, "bias": False if bias == -math.inf else bias}
            for token, bias in sampling.logit_bias
        ],
        "grammar": constraint.text if constraint is not None and constraint.kind == "gbnf" else "",
        "stop": list(request.stop),
        "ignore_eos": request.ignore_end,
        "max_tokens": -1 if most is None else most,
        "n_predict": -1 if most is None else most,
        "n_indent": request.n_indent,
        "n_probs": request.n_logprobs or 0,
        "stream": request.stream,
    }


def about_answer(job: Job, end: Done, prompt: str, most: int | None) -> dict[str, Any]:
    """Return llama-server's fields about an answer that has ended.

    Args:
        prompt: its text.
        most: tokens of the answer; None for as many as fit.
    """
    stopped_by = job.answer.text.stopped_by
    return {
        "stop_type": "limit" if end.reason == "length" else "word" if stopped_by else "eos",
        "stopping_word": stopped_by,
        "tokens_predicted": job.n_answer,
        "tokens_evaluated": job.n_prompt,
        "tokens_cached": job.n_cached or 0,
        "generation_settings": generation_settings(job, most),
        "prompt": prompt,
        "has_new_line": job.answer.has_new_line,
        "truncated": _is_truncated(job, end),
    }


def prompt_text(job: Job, token_texts: TokenTexts) -> str:
    """Return the text of a prompt, with control tokens and without images. Not for the event loop."""
    tokens = (token for token in job.prompt.tolist() if token >= 0)
    return b"".join(map(token_texts.name, tokens)).decode("utf-8", "replace")


def _is_truncated(job: Job, end: Done) -> bool:
    """Return whether the context's end cut something: a part was dropped, or the answer ended there."""
    answer = job.answer
    by_itself = answer.text.outdented or answer.late or job.n_answer >= job.request.max_tokens
    return job.n_dropped > 0 or (end.reason == "length" and not by_itself)
