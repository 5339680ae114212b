"""Keeps KV in memory and on disk: formats, encryption, and the store.

>>> from mixedkv import Llama
>>> from mixedkv.store import KVStore
>>> store = KVStore("kv-cache", max_kv_size_gb=4)
>>> llm = Llama("model.gguf", kv="mixed")
>>> store.restore(llm, tokens)  # the longest prefix that was computed before
>>> llm.eval(tokens[llm.n_tokens :])
>>> store.save(llm)
"""

from mixedkv.store.encryption import key_from_environment, key_from_file
from mixedkv.store.formats.packed import (
    block_from_packed,
    load_packed,
    pack_kv_cache,
    pack_kv_cache_v2,
    packed_from_block,
    rotary_of,
    unpack_kv_cache,
    unpack_kv_cache_flat,
    unpack_kv_cache_v2,
)
from mixedkv.store.identity import Identity
from mixedkv.store.rekey import rekey
from mixedkv.store.results import Restored, Saved, Share, StoreStats
from mixedkv.store.store import KVStore

__all__ = [
    "Identity",
    "KVStore",
    "Restored",
    "Saved",
    "Share",
    "StoreStats",
    "block_from_packed",
    "key_from_environment",
    "key_from_file",
    "load_packed",
    "pack_kv_cache",
    "pack_kv_cache_v2",
    "packed_from_block",
    "rekey",
    "rotary_of",
    "unpack_kv_cache",
    "unpack_kv_cache_flat",
    "unpack_kv_cache_v2",
]
