"""Defaults of sampling: those that the model's file recommends, otherwise llama-server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixedkv.engine.sample.sampling import Sampling

# llama.cpp's common_params_sampling; penalties and the other samplers are off in it
_LLAMA_SERVER: dict[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_KEYS = {  # of GGUF files (llama.cpp's LLM_KV_GENERAL_SAMPLING_*), by names of `Sampling`
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "penalty_repeat",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `Sampling` for a model: llama-server's defaults, overridden by the file's metadata.

    A recommended value that is not a number or is out of range is ignored.
    """
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in _KEYS.items()}
    return {**_LLAMA_SERVER, **{name: value for name, value in found.items() if _is_good(name, value)}}


def _is_good(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        Sampling(**dict[str, Any]({name: value}))
    except ValueError:
        return False
    return True
