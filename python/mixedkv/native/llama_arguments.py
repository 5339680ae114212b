"""Arguments of `Llama` that llama_cpp would ignore, or fail on with a message of something else."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import llama_cpp

from mixedkv.limits import INT32_MAX, MAX_SEQUENCES, MAX_SNAPSHOTS

_WHOLE = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_gpu_layers", "main_gpu", "seed")
_WHOLE_MORE = ("last_n_tokens_size", "yarn_orig_ctx", "rope_scaling_type", "pooling_type", "attention_type")
_AT_LEAST_1 = ("n_batch", "n_ubatch")
_NEEDED = ("n_ctx", *_AT_LEAST_1)
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
        near = difflib.get_close_matches(name, known, 1)
        hint = f": did you mean {near[0]}?" if near else ": see help(mixedkv.Llama) and help(llama_cpp.Llama)"
        raise TypeError(f"Llama has no argument {name!r}{hint}")


def check_numbers(given: Mapping[str, Any]) -> None:
    """Check that the numbers among the arguments are whole, large enough, and fit llama.cpp's integers.

    Raises:
        TypeError: an argument is no whole number.
        ValueError: it is too small or too large.
    """
    for name in (*_WHOLE, *_WHOLE_MORE):
        value = given.get(name)
        if value is None and (name not in _NEEDED or name not in given):
            continue
        try:
            if value is None or isinstance(value, bool):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}={value!r}: use a whole number") from None
        if name == "n_ctx" and number < 0:
            raise ValueError(f"n_ctx={number}: use 1 or more, or 0 for what the model was trained with")
        if name in _AT_LEAST_1 and number < 1:
            raise ValueError(f"{name}={number}: use 1 or more")
        if name != "seed" and number > INT32_MAX:  # llama_cpp takes a seed modulo 2**32
            raise ValueError(f"{name}={number}: use at most {INT32_MAX}")


def check_sequences(n_seq_max: int, n_batch: int) -> int:
    if isinstance(n_seq_max, bool) or not isinstance(n_seq_max, int):
        raise TypeError(f"n_seq_max={n_seq_max!r}: use a whole number")
    if not 1 <= n_seq_max <= MAX_SEQUENCES:
        raise ValueError(f"n_seq_max={n_seq_max}: use a number from 1 to {MAX_SEQUENCES}")
    if n_batch < n_seq_max:
        raise ValueError(
            f"n_batch={n_batch} is less than n_seq_max={n_seq_max}: a batch must have room for a token of "
            f"each sequence. Use n_batch={n_seq_max} or more"
        )
    return n_seq_max


def check_snapshots(n_rs_seq: int) -> int:
    return _check_range("n_rs_seq", n_rs_seq, MAX_SNAPSHOTS)


def check_windows(n_windows: int) -> int:
    return _check_range("n_windows", n_windows, MAX_SEQUENCES)


def _check_range(name: str, value: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: use a whole number")
    if not 0 <= value <= most:
        raise ValueError(f"{name}={value}: use a number from 0 to {most}")
    return value


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
