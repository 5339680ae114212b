"""One digest of everything that shapes KV. KV that was computed under one identity is never used under
another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mixedkv import _core
from mixedkv.config import KVSetting, parse_kv
from mixedkv.config.mixed import COLD_TYPES
from mixedkv.ids import check_tenant
from mixedkv.kv.row_source import RowSource
from mixedkv.model.fingerprint import FileKey, adapter_fingerprint, fingerprint, model_header, model_parts
from mixedkv.model.gguf_file import ModelFile, file_stamp

FORMAT_VERSION = 1
_PARTS: WeakKeyDictionary[RowSource, tuple[FileKey, ...]] = WeakKeyDictionary()  # as they were at first
_ROPE = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
)


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies what KV was computed under. Two are equal if their digests are.

    Args:
        digest: SHA-256 over the facts and the tenant, 32 bytes.
        facts: the hashed facts besides the tenant, as JSON can hold them.
        tenant: the owner of the KV.
        label: text for people, e.g. "model.gguf mixed"; not part of the digest.
    """

    digest: bytes
    facts: Mapping[str, Any] = field(compare=False, repr=False)
    tenant: str = field(default="", compare=False)
    label: str = field(default="", compare=False)

    @classmethod
    def of(cls, llm: RowSource, *, tenant: str = "", full_hash: bool = False, extra: str = "") -> Identity:
        """Return the identity of the KV that a `Llama` computes now.

        It covers the model file (all parts), metadata overrides, the adapter and its scale, RoPE settings,
        the cache setting with the window as it is now, the scales of K, flash attention, the
        kind of attention, the llama.cpp that computes, and the version of the format. Threads, batch sizes
        and where layers run change rounding only and are left out.

        Args:
            tenant: whose KV it is; another tenant's is never found.
            full_hash: read the whole model file instead of samples of every tensor.
            extra: anything else that shapes KV, such as adapters set by llama.cpp's own functions.

        Raises:
            OSError: the model or adapter file cannot be read.
            ValueError: the tenant's name is refused, or a file is not the one that was loaded.
        """
        file = model_header(llm.model_path)
        facts = {
            "format": FORMAT_VERSION,
            "llama_cpp": _core.version()["llama_commit"],
            "model": fingerprint(llm.model_path, full_hash=full_hash),
            "overrides": _overrides(llm),
            "adapters": _adapters(llm, full_hash),
            "kv": llm.kv.config.full_spec,  # does not depend on the defaults
            **_equalization(llm),
            **_rotation(llm),
            "context": _context(llm, file),
            "sliding_window": llm.kv.sliding_window,
            **({} if llm.kv.can_cut else {"recurrent": True}),
            "extra": extra,
        }
        _check_files(llm)
        return cls.from_facts(facts, tenant=tenant, label=f"{Path(llm.model_path).name} {llm.kv.config}")

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], *, tenant: str = "", label: str = "") -> Identity:
        """Return an identity from any facts that JSON can hold; `kv` is the cache's spec, as in `of`."""
        named = {"facts": dict(facts), "tenant": check_tenant(tenant)}
        text = json.dumps(named, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(b"mixedkv identity\n" + text.encode()).digest()
        return cls(digest, dict(facts), tenant, label)

    @property
    def kv(self) -> KVSetting:
        """The setting of the cache."""
        return parse_kv(self.facts.get("kv", "f16"))

    @property
    def recurrent(self) -> bool:
        """True if layers keep a recurrent state, so that stored KV can only be continued at a checkpoint."""
        return bool(self.facts.get("recurrent", False))

    @property
    def sliding_window(self) -> int:
        """Number of tokens that sliding-window layers see; 0 if all layers see everything."""
        return _whole(self.facts.get("sliding_window", 0))


def _context(llm: RowSource, file: ModelFile) -> dict[str, Any]:
    params = llm.context_params
    facts = {
        name: getattr(params, name) for name in (*_ROPE, "flash_attn_type", "attention_type", "swa_full")
    }
    # Models with two sets of RoPE factors use the long one in contexts beyond their training.
    trained = params.yarn_orig_ctx or _whole(
        file.get("rope.scaling.original_context_length", 0) or file.get("context_length", 0)
    )
    n_ctx = llm.n_ctx() if params.kv_unified else llm.n_ctx() // max(1, params.n_seq_max)
    return {**facts, "beyond_training": bool(trained) and n_ctx > trained}


def _equalization(llm: RowSource) -> dict[str, Any]:
    """Return the scales of K. Machines that round them differently cannot use each other's rows."""
    scales = [layer.equalization for layer in llm.kv.layers]
    return {"equalization": scales} if any(scales) else {}


def _rotation(llm: RowSource) -> dict[str, Any]:
    """Return whether llama.cpp was told not to rotate quantised rows: then other values are rounded."""
    quantised = any(kind in COLD_TYPES for layer in llm.kv.layers for kind in (layer.type_k, layer.type_v))
    return {"unrotated": True} if quantised and llm.rotation_disabled else {}


def _overrides(llm: RowSource) -> list[list[str]]:
    return sorted([key, type(value).__name__, repr(value)] for key, value in (llm.kv_overrides or {}).items())


def _adapters(llm: RowSource, full_hash: bool) -> list[list[Any]]:
    if not llm.lora_path:
        return []
    return [[adapter_fingerprint(llm.lora_path, full_hash=full_hash), float(llm.lora_scale)]]


def _check_files(llm: RowSource) -> None:
    """Check that the model's files are still those that were loaded; called after they were hashed."""
    parts = model_parts(llm.model_path)
    stamps = [(llm.model_path, llm._model_stamp), (llm.lora_path, llm._lora_stamp)]
    for path, stamp in stamps:
        if path is not None and stamp is not None and file_stamp(path) != stamp:
            raise ValueError(f"{path} is not the file that was loaded: it was replaced; make the Llama again")
    if _PARTS.setdefault(llm, parts) != parts:
        raise ValueError(f"a part of {llm.model_path} was replaced after it was loaded; make the Llama again")


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
