"""Settings of the KV cache, validated once, and their written form. Reads no files, imports no model."""

from mixedkv.config.mixed import PRESETS, KVSetting, MixedKVConfig, UniformKV, parse_kv

__all__ = ["PRESETS", "KVSetting", "MixedKVConfig", "UniformKV", "parse_kv"]
