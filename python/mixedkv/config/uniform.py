"""The setting of one of llama.cpp's own caches."""

from __future__ import annotations

from dataclasses import dataclass

from mixedkv import _core
from mixedkv.config.checks import normalise, options_of
from mixedkv.config.row_types import type_bits

_DEFAULTS = _core.UNIFORM_DEFAULTS


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformKV:
    """One of llama.cpp's own caches: every token in the same type.

    Args:
        type_k, type_v: types of K and V, each one of `UNIFORM_TYPES`.
        attention: "auto" is llama.cpp's own attention, "fused" this package's CPU kernel.
    """

    type_k: str = _DEFAULTS["type_k"]
    type_v: str = _DEFAULTS["type_v"]
    attention: str = _DEFAULTS["attention"]

    def __post_init__(self) -> None:
        normalise(self, mixed=False)

    def types_of(self, il: int) -> tuple[str, str]:
        """Return the types of K and V of a layer: the same in all of them."""
        return self.type_k, self.type_v

    def check_layers(self, n_layer: int) -> None:
        """Accept any model: a uniform cache fits all."""

    @property
    def window(self) -> _core.HotWindow:
        """No token has a row of another type."""
        return _core.HotWindow()

    @property
    def needs_flash(self) -> bool:
        """True where flash attention is needed: llama.cpp reads a quantised V, and this package's kernels
        their rows, with it only.
        """
        return self.attention == "fused" or type_bits(self.type_v) < 16

    def check_context(self, n_ctx: int) -> None:
        """Accept any context: a uniform cache fits all."""

    def native(self) -> _core.CacheConfig | None:
        """Return the setting as the native library takes it; None leaves everything to llama.cpp."""
        return None if self.attention == "auto" else _core.CacheConfig.of(False, options_of(self))

    def __str__(self) -> str:
        """Return the spec that `parse_kv` reads back."""
        return _core.format_kv(False, options_of(self))

    @property
    def full_spec(self) -> str:
        """The spec, which leaves nothing to defaults."""
        return str(self)
