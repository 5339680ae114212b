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
from mixedkv.config import parse_kv
from mixedkv.ids import check_tenant
from mixedkv.kv.row_setting import window_of
from mixedkv.kv.row_source import RowSource
from mixedkv.model.fingerprint import FileKey, fingerprint, model_parts
from mixedkv.model.gguf_file import file_stamp

FORMAT_VERSION = 1
_PARTS: WeakKeyDictionary[RowSource, tuple[FileKey, ...]] = WeakKeyDictionary()  # as they were at first


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

        It is made of the setting that each row has with it (`KVCache.row_setting`): the model file (all
        parts), metadata overrides, adapters and their scales, RoPE, flash attention, the window as it is now,
        and the types, scales and attention of each layer. Besides, it has which rows the cache keeps, and the
        version of the format. Threads, batch sizes and where layers run change rounding only and are left
        out.

        Args:
            tenant: whose KV it is; another tenant's is never found.
            full_hash: read the whole model file instead of samples of every tensor.
            extra: anything else that entries are to be kept apart by.

        Raises:
            OSError: the model's file cannot be read.
            ValueError: the tenant's name is refused, or a file is not the one that was loaded.
        """
        facts = {
            "format": FORMAT_VERSION,
            "setting": llm.kv.row_setting,
            "sliding_window": llm.kv.sliding_window,
            **({"swa_full": True} if llm.kv.sliding_window and llm.context_params.swa_full else {}),
            **({} if llm.kv.can_cut else {"recurrent": True}),
            **({"whole_file": fingerprint(llm.model_path, full_hash=True)} if full_hash else {}),
            "extra": extra,
        }
        _check_files(llm)
        return cls.from_facts(facts, tenant=tenant, label=f"{Path(llm.model_path).name} {llm.kv.config}")

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], *, tenant: str = "", label: str = "") -> Identity:
        """Return an identity from any facts that JSON can hold; `setting`, or else `kv`, a cache's spec, says
        which rows are F16 besides.
        """
        named = {"facts": dict(facts), "tenant": check_tenant(tenant)}
        text = json.dumps(named, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(b"mixedkv identity\n" + text.encode()).digest()
        return cls(digest, dict(facts), tenant, label)

    @property
    def setting(self) -> str:
        """The setting that all rows were computed under; "" if the facts do not say."""
        return str(self.facts.get("setting", ""))

    @property
    def window(self) -> _core.HotWindow:
        """The rule that says which rows are F16 besides."""
        return window_of(self.setting) if self.setting else parse_kv(self.facts.get("kv", "f16")).window

    @property
    def recurrent(self) -> bool:
        """True if layers keep a recurrent state, so that stored KV can only be continued at a checkpoint."""
        return bool(self.facts.get("recurrent", False))

    @property
    def sliding_window(self) -> int:
        """Number of tokens that sliding-window layers see; 0 if all layers see everything."""
        return _positive_or_zero(self.facts.get("sliding_window", 0))


def _check_files(llm: RowSource) -> None:
    """Check that the model's files are still those that were loaded; called after they were hashed."""
    parts = model_parts(llm.model_path)
    path, stamp = llm.model_path, llm._model_stamp
    if stamp is not None and file_stamp(path) != stamp:
        raise ValueError(f"{path} is not the file that was loaded: it was replaced; make the Llama again")
    if _PARTS.setdefault(llm, parts) != parts:
        raise ValueError(f"a part of {path} was replaced after it was loaded; make the Llama again")


def _positive_or_zero(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
