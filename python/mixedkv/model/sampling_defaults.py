"""Reads what a model's file recommends for sampling."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mixedkv.limits import RANGES, WHOLE, check_sampling

log = logging.getLogger("mixedkv")

# llama.cpp's common_params_sampling; penalties and the other samplers are off in it
_LLAMA_SERVER: dict[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_KEYS = {  # of GGUF files (llama.cpp's LLM_KV_GENERAL_SAMPLING_*), by names of `Sampling`
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalty_repeat",
    "repeat_last_n": "penalty_last_n",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `Sampling` for a model: llama-server's defaults, overridden by the file's metadata.

    As llama.cpp does, it takes a number however the file writes it: 20 as 20.0 or as a text. A recommended
    value that is no number or out of range is left out, with a warning.
    """
    found = {}
    for name, key in _KEYS.items():
        if (value := metadata.get(f"general.sampling.{key}")) is None:
            continue
        try:
            found[name] = _number(name, value)
            check_sampling(name, found[name])
        except (TypeError, ValueError):
            found.pop(name, None)
            low, high = RANGES[name]
            kind = "a whole number" if name in WHOLE else "a number"
            log.warning(
                "the model's file has general.sampling.%s=%r, which is not used: give %s from %g to %g",
                *(key, value, kind, low, high),
            )
    return {**_LLAMA_SERVER, **found}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError
    number = float(value)
    return int(number) if name in WHOLE and number.is_integer() else number
