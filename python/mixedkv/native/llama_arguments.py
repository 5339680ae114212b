"""Arguments of `Llama` that llama_cpp would ignore, or fail on with a message of something else."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import LlamaGrammar

from mixedkv.limits import INT32_MAX, MAX_SEQUENCES, check_int, real
from mixedkv.nearest_word import did_you_mean
from mixedkv.tokens import as_tokens, check_tokens

_WHOLE = {
    **dict.fromkeys(("n_ctx", "n_threads", "n_threads_batch", "n_gpu_layers"), (-INT32_MAX, INT32_MAX)),
    **dict.fromkeys(("main_gpu", "last_n_tokens_size", "yarn_orig_ctx"), (-INT32_MAX, INT32_MAX)),
    **dict.fromkeys(("n_batch", "n_ubatch"), (1, INT32_MAX)),
    "seed": (-sys.maxsize, sys.maxsize),  # llama_cpp takes it modulo 2**32
    "split_mode": (llama_cpp.LLAMA_SPLIT_MODE_NONE, llama_cpp.LLAMA_SPLIT_MODE_TENSOR),
    "rope_scaling_type": (-1, llama_cpp.LLAMA_ROPE_SCALING_TYPE_MAX_VALUE),
    "pooling_type": (-1, llama_cpp.LLAMA_POOLING_TYPE_RANK),
    "attention_type": (-1, llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL),
}
_REAL = ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast")
_REAL_MORE = ("yarn_beta_slow", "lora_scale")
_NEEDED = ("n_ctx", "n_batch", "n_ubatch")
_BASE = frozenset(inspect.signature(llama_cpp.Llama.__init__).parameters) - {"kwargs"}  # whoever replaces it
_ROPE = ("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_orig_ctx")


def check_names(given: Iterable[str], function: Callable[..., object]) -> None:
    """Check the keywords that `function` passes on to llama_cpp.Llama, which ignores those it does not know.

    Raises:
        TypeError: there is no such argument; the message names the nearest one.
    """
    for name in given:
        if name in _BASE:
            continue
        known = sorted((_BASE | set(inspect.signature(function).parameters)) - {"self", "kwargs"})
        hint = did_you_mean(name, known) or ": see help(mixedkv.Llama) and help(llama_cpp.Llama)"
        raise TypeError(f"Llama has no argument {name!r}{hint}")


def check_numbers(given: Mapping[str, Any]) -> None:
    """Check that the numbers among the arguments are numbers, and within llama.cpp's ranges.

    Raises:
        TypeError: an argument is no number, or no whole one.
        ValueError: it is too small or too large.
    """
    for name, (low, high) in _WHOLE.items():
        value = given.get(name)
        if value is None and (name not in _NEEDED or name not in given):
            continue
        if check_int(name, value, low, high) < 0 and name == "n_ctx":
            raise ValueError(f"n_ctx={value}: use 1 or more, or 0 for what the model was trained with")
    for name in (*_REAL, *_REAL_MORE):
        real(name, given.get(name, 0.0))


def check_sequences(n_seq_max: int, n_batch: int) -> int:
    n_seq_max = check_int("n_seq_max", n_seq_max, 1, MAX_SEQUENCES)
    if n_batch < n_seq_max:
        raise ValueError(
            f"n_batch={n_batch} is less than n_seq_max={n_seq_max}: a batch must have room for a token of "
            f"each sequence. Use n_batch={n_seq_max} or more"
        )
    return n_seq_max


def completion_options(given: Mapping[str, Any], n_vocab: int) -> dict[str, Any]:
    """Return the arguments of `create_completion` as llama_cpp takes them, which reads some kinds of them as
    none and forgets the processors of an answer that has a logit_bias as well.

    Raises:
        TypeError, ValueError: an argument is of a kind that it does not take; the message names it.
    """
    options = checked_kinds(given)
    if not isinstance(prompt := options["prompt"], str):  # which an image may be part of: of no vocabulary
        options["prompt"] = as_tokens(prompt, "prompt").tolist()
    if bias := options.pop("logit_bias", None):
        own = options.get("logits_processor") or ()
        options["logits_processor"] = llama_cpp.LogitsProcessorList([*own, _biased(bias, n_vocab)])
    return options


def checked_kinds(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a completion or a chat, a list of `stop` as one.

    Raises:
        TypeError, ValueError: as `completion_options`.
    """
    options = dict(given)
    if options.get("max_tokens") is not None:
        options["max_tokens"] = check_int("max_tokens", options["max_tokens"])
    for name, kind, expected in (
        ("suffix", str, "a text"),
        ("tools", list, "a list of tools"),
        ("response_format", Mapping, "a dictionary with a type"),
        ("grammar", LlamaGrammar, "LlamaGrammar.from_string"),
        ("logits_processor", list, "LogitsProcessorList([...])"),
    ):
        if options.get(name) is not None and not isinstance(options[name], kind):
            raise TypeError(f"{name}={options[name]!r:.80}: use {expected}")
    if not isinstance(options.get("stop"), str | None):
        options["stop"] = texts("stop", options["stop"])
    return options


def texts(name: str, given: Any) -> list[str]:
    """Return one text or several as a list.

    Raises:
        TypeError: they are of another kind.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise TypeError(f"{name}={given!r:.80}: use a text or a list of texts")
    return list(given)


def _biased(bias: Mapping[Any, Any], n_vocab: int) -> Callable[[Any, Any], Any]:
    """Return a processor that adds to the logits of some tokens."""
    try:
        ids, by = [int(token) for token in bias], np.array([*bias.values()], np.float32)
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"logit_bias={bias!r:.80}: use a dictionary of token ids and numbers") from None
    if any(isinstance(value, bool) for value in bias.values()):
        raise TypeError("logit_bias: true and false are no numbers to add: float('-inf') is never")
    if np.isnan(by).any():
        raise ValueError("logit_bias: nan is not a number to add to a logit")
    ids = check_tokens("logit_bias", ids, n_vocab)

    def biased(tokens: Any, scores: Any) -> Any:
        scores[ids] += by
        return scores

    return biased


def check_messages(messages: Any) -> None:
    """Check that the messages of a chat are what its template can read.

    Raises:
        ValueError: they are not; the message names the first that is not.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError("messages: give a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}]: give a dictionary with a role and a content")
        if not isinstance(message.get("content"), str | list | None):
            raise ValueError(f"messages[{i}].content: give a text")


def beyond_training(n_ctx: int, n_ctx_train: int, given: Mapping[str, Any]) -> str:
    """Say that a context is longer than what the model has learned to read, "" if it is not.

    Args:
        n_ctx: tokens that a sequence may have.
        n_ctx_train: tokens in training, 0 if the file does not tell.
        given: arguments of `Llama`. With a RoPE scaling of the user's own nothing is said.
    """
    if not 0 < n_ctx_train < n_ctx or any(given.get(name) for name in _ROPE):
        return ""
    return (
        f"n_ctx={n_ctx} is more than the n_ctx_train={n_ctx_train} tokens that the model was trained with: "
        f"what it writes beyond them is likely to be nonsense. Use n_ctx={n_ctx_train} or less (0 takes "
        f"n_ctx_train), or scale its positions with rope_freq_scale={n_ctx_train / n_ctx:.3g}"
    )
