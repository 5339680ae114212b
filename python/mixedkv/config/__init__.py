"""Settings of the KV cache, validated once, and their written form. Reads no files, imports no model."""

from mixedkv.config.mixed import PRESETS, KVSetting, MixedKVConfig, parse_kv
from mixedkv.config.uniform import UniformKV

__all__ = ["PRESETS", "KVSetting", "MixedKVConfig", "UniformKV", "parse_kv"]
