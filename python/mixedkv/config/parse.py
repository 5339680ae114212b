"""Reads the setting of a cache from its written form."""

from __future__ import annotations

from mixedkv import _core
from mixedkv.config.mixed import MixedKVConfig
from mixedkv.config.uniform import UniformKV

KVSetting = MixedKVConfig | UniformKV

PRESETS = _core.PRESETS  # to start from, as in "mixed:quality"
HELP = (
    "KV cache (default: mixed, which is mixed:compact: 4 bits but for recent tokens). mixed:balanced has K "
    "in 8 bits, mixed:quality K and V, both with more recent tokens in F16; mixed:budget=3.5bit or "
    "mixed:budget=2GiB choose types by size; mixed:cold=q8_0,threshold=256 sets each. f16, q8_0 and others "
    "are llama.cpp's caches"
)


def parse_kv(kv: str | KVSetting) -> KVSetting:
    """Read the setting of a cache: a spec or a setting itself.

    Specs: "mixed" (the defaults of `MixedKVConfig`), and with other values
    "mixed:cold_k=q8_0,cold_v=q4_0,threshold=256,group=32,sinks=4,sparse=eps:0.05"; "cold=q8_0" sets both cold
    types, "layers=0-3:q8_0/q8_0,9-:q5_0" those of single layers; "budget=2GiB" and "budget=3.5bit" have them
    chosen. A type such as "f16" or "q8_0" is llama.cpp's uniform cache of it, "q8_0/q4_0" one with another
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
    try:
        mixed, given = _core.parse_kv(kv.encode(errors="backslashreplace").decode())
    except ValueError as error:
        said, value = str(error), repr(kv)
        raise ValueError(f"kv={said}" if said.startswith(value) else f"kv={value}: {said}") from None
    return MixedKVConfig(**given) if mixed else UniformKV(**given)
