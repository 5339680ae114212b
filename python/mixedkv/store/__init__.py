"""Keeps KV in memory and on disk: formats, encryption, and the store.

>>> from mixedkv import Llama
>>> from mixedkv.store import KVStore
>>> store = KVStore("kv-cache", max_kv_size_gb=4)
>>> llm = Llama("model.gguf", kv="mixed")
>>> store.restore(llm, tokens)  # the longest prefix that was computed before
>>> llm.eval(tokens[llm.n_tokens :])
>>> store.save(llm)
"""

from mixedkv.ids import check_session_id, check_tenant
from mixedkv.store.encrypt_plain import encrypt_plain
from mixedkv.store.encryption import KeySource, key_from_environment, key_from_file, parse_key_source
from mixedkv.store.entry_error import REASONS, Reason
from mixedkv.store.formats.packed import (
    pack_kv_cache,
    pack_kv_cache_v2,
    unpack_kv_cache,
    unpack_kv_cache_flat,
    unpack_kv_cache_v2,
)
from mixedkv.store.formats.packed_block import Rotary, block_from_packed, packed_from_block, rotary_of
from mixedkv.store.identity import FORMAT_VERSION, Identity
from mixedkv.store.packed_session import load_packed
from mixedkv.store.rekey import rekey
from mixedkv.store.results import (
    EntryInfo,
    GCResult,
    Link,
    Match,
    MessageInfo,
    Restored,
    Saved,
    Share,
    StoreStats,
    Verified,
)
from mixedkv.store.store import KVStore

__all__ = [
    "FORMAT_VERSION",
    "REASONS",
    "EntryInfo",
    "GCResult",
    "Identity",
    "KVStore",
    "KeySource",
    "Link",
    "Match",
    "MessageInfo",
    "Reason",
    "Restored",
    "Rotary",
    "Saved",
    "Share",
    "StoreStats",
    "Verified",
    "block_from_packed",
    "check_session_id",
    "check_tenant",
    "encrypt_plain",
    "key_from_environment",
    "key_from_file",
    "load_packed",
    "pack_kv_cache",
    "pack_kv_cache_v2",
    "packed_from_block",
    "parse_key_source",
    "rekey",
    "rotary_of",
    "unpack_kv_cache",
    "unpack_kv_cache_flat",
    "unpack_kv_cache_v2",
]
