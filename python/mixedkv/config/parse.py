"""Reads the setting of a cache from its written form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixedkv.config.mixed import MixedKVConfig
from mixedkv.config.row_types import UNIFORM_TYPES, replacement
from mixedkv.config.spec import did_you_mean, fields_of, in_words_of_spec, parse_options
from mixedkv.config.uniform import UniformKV

KVSetting = MixedKVConfig | UniformKV

# Chosen from docs/benchmarks.md, with the reasons. Plain "mixed" is compact: the bits of q4_0.
PRESETS: dict[str, dict[str, Any]] = {
    "compact": {},
    "balanced": {"cold_type_k": "q8_0", "quantization_threshold": 128, "group_size": 32},
    "quality": {
        "cold_type_k": "q8_0",
        "cold_type_v": "q8_0",
        "quantization_threshold": 256,
        "group_size": 32,
    },
}
HELP = (
    "KV cache (default: mixed, which is mixed:compact: 4 bits but for recent tokens). mixed:balanced has K "
    "in 8 bits, mixed:quality K and V, both with more recent tokens in F16; mixed:bits=3.5 or "
    "mixed:budget=2GiB choose types by size; mixed:cold=q8_0,threshold=256 sets each. f16, q8_0 and others "
    "are llama.cpp's caches"
)
_KNOWN_NAMES = "mixed, " + ", ".join(UNIFORM_TYPES)


def parse_kv(kv: str | KVSetting) -> KVSetting:
    """Read the setting of a cache: a spec or a setting itself.

    Specs: "mixed" (the defaults of `MixedKVConfig`), and with other values
    "mixed:cold_k=q8_0,cold_v=q4_0,threshold=256,group=32,sinks=4,draft=16,equalize=false,
    hot_budget=2048,rounding=8,v_skip=1e-6,shrink=true,
    sparse=eps:0.05"; "cold=q8_0" sets both cold types,
    "layers=0-3:q8_0/q8_0,9-:q5_1" those of single layers; "bits=3.5" and "budget=2GiB" have them chosen.
    A type such as "f16" or "q8_0" is llama.cpp's uniform cache of it, "q8_0/q4_0" one with another
    type for V. Each takes "attention=" too. "mixed:compact", "mixed:balanced" and "mixed:quality" are presets
    to start from, as in "mixed:quality,sinks=8". Case does not matter. `str()` of the result reads back
    as the same setting.

    Raises:
        ValueError: the spec has an unknown name, key or value; the message lists the known ones.
        TypeError: `kv` is neither a spec nor a setting.
    """
    if isinstance(kv, MixedKVConfig):
        return kv if kv.enable_quantization else kv.without_quantization()
    if isinstance(kv, UniformKV):
        return kv
    if not isinstance(kv, str):
        raise TypeError(f"kv={kv!r}: use a spec such as 'mixed' or 'q8_0', or a MixedKVConfig")
    name, colon, rest = kv.lower().replace(" ", "").partition(":")
    preset, _, more = rest.partition(",")
    if name == "mixed" and preset in PRESETS:
        return _mixed(kv, PRESETS[preset], more)
    if name == "mixed" and colon and "=" not in preset:
        near, known = did_you_mean(preset, PRESETS), ", ".join(PRESETS)
        raise ValueError(f"kv={kv!r}: {preset!r} is neither a preset ({known}) nor key=value{near}")
    if name == "mixed":
        return _mixed(kv, {}, rest)
    options = parse_options(kv, rest) if colon else {}
    type_k, slash, type_v = name.partition("/")
    if not slash:
        type_v = type_k
    if not {type_k, type_v} <= set(UNIFORM_TYPES):
        gone = replacement(type_k) or replacement(type_v)
        near = did_you_mean(name, ("mixed", *UNIFORM_TYPES))
        raise ValueError(f"kv={kv!r} names no cache{near}: use one of {_KNOWN_NAMES}{gone}")
    if unknown := options.keys() - {"attention"}:
        raise ValueError(f"kv={kv!r}: a uniform cache takes attention only, not {', '.join(sorted(unknown))}")
    return UniformKV(type_k=type_k, type_v=type_v, **options)


def _mixed(kv: str, preset: Mapping[str, Any], text: str) -> MixedKVConfig:
    options = parse_options(kv, text) if text else {}
    fields = {**preset, **fields_of(kv, options)}
    try:
        return MixedKVConfig(**fields)
    except ValueError as error:
        raise ValueError(f"kv={kv!r}: {in_words_of_spec(options, str(error))}") from None
