"""Settings that are compared: a cache, and with or without flash attention where both are possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mixedkv.config import KVSetting, MixedKVConfig, UniformKV, parse_kv
from mixedkv.model.footprint import ModelShape
from mixedkv.model.resolve_budget import resolve_budget

DEFAULT_SPECS = ("f16", "q8_0", "q4_0", "mixed:compact", "mixed:balanced", "mixed:quality")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One line of a table. `spec` is the cache as the user wrote it."""

    spec: str
    kv: KVSetting
    flash_attn: bool

    @property
    def name(self) -> str:
        """The spec, and whether flash attention is on where that is a choice."""
        if self.kv.needs_flash:
            return self.spec
        return f"{self.spec} {'flash' if self.flash_attn else 'no flash'}"

    @property
    def is_f16(self) -> bool:
        """True for llama.cpp's own F16 cache, which the others are compared with."""
        return self.kv == UniformKV()

    @property
    def is_peer(self) -> bool:
        """True if llama.cpp itself can run it."""
        return isinstance(self.kv, UniformKV) and self.kv.attention == "auto"

    @property
    def window(self) -> int | None:
        """Tokens whose rows a mixed cache keeps in F16; None for a cache that is not mixed."""
        return self.kv.quantization_threshold if isinstance(self.kv, MixedKVConfig) else None

    def resolved(self, shape: ModelShape, n_ctx: int) -> Setting:
        """Return the setting whose `bits` are what they come to for a model of this shape and a context.

        Raises:
            ValueError: the model has no types so coarse.
        """
        if not isinstance(self.kv, MixedKVConfig) or self.kv.is_resolved:
            return self
        kv = resolve_budget(self.kv, shape, n_ctx)
        return replace(self, spec=str(kv), kv=kv)

    def head(self, threads: int) -> dict[str, Any]:
        """Return the fields of `Row` that say what was measured."""
        return {"kv": self.spec, "flash_attn": self.flash_attn, "threads": threads}


REFERENCE = Setting(spec="f32", kv=UniformKV(type_k="f32", type_v="f32"), flash_attn=False)


def make_settings(specs: Sequence[str], flash: str = "both") -> list[Setting]:
    """Return the settings that `specs` stand for, one of each.

    `flash` says what to do where flash attention is a choice: run "both" ways, or with it "on" or "off".

    Raises:
        ValueError: a spec is unknown.
    """
    settings: dict[tuple[KVSetting, bool], Setting] = {}
    for spec in specs:
        kv = parse_kv(spec)
        if isinstance(kv, MixedKVConfig) and kv.budget and not kv.budget_bits:
            raise ValueError(
                f"--kv {spec}: a budget depends on the context: give the setting that `mixedkv info` shows"
            )
        choices = (
            (True,) if kv.needs_flash else {"both": (False, True), "on": (True,), "off": (False,)}[flash]
        )
        for flash_attn in choices:
            settings.setdefault((kv, flash_attn), Setting(spec=spec, kv=kv, flash_attn=flash_attn))
    return list(settings.values())
