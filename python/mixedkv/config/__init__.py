"""Settings of the KV cache, validated once, and their written form. Reads no files, imports no model."""

from mixedkv.config.checks import check_window
from mixedkv.config.mixed import ATTENTIONS, MixedKVConfig
from mixedkv.config.parse import PRESETS, KVSetting, parse_kv
from mixedkv.config.uniform import UniformKV

__all__ = ["ATTENTIONS", "PRESETS", "KVSetting", "MixedKVConfig", "UniformKV", "check_window", "parse_kv"]
