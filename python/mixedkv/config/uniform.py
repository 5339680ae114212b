"""The setting of one of llama.cpp's own caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mixedkv.config.checks import normalise
from mixedkv.config.hot_window import HotWindow
from mixedkv.config.row_types import UNIFORM_TYPES, type_bits
from mixedkv.config.spec import spec_of

if TYPE_CHECKING:
    from mixedkv import _core


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformKV:
    """One of llama.cpp's own caches: every token in the same type.

    Args:
        type_k, type_v: types of K and V, each one of `UNIFORM_TYPES`.
        attention: "auto" is llama.cpp's own attention, "fused" this package's CPU kernel.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    attention: str = "auto"

    def __post_init__(self) -> None:
        normalise(self, "type_k", UNIFORM_TYPES)
        normalise(self, "type_v", UNIFORM_TYPES)
        normalise(self, "attention", ("auto", "fused"))

    def types_of(self, il: int) -> tuple[str, str]:
        """Return the types of K and V of a layer: the same in all of them."""
        return self.type_k, self.type_v

    def check_layers(self, n_layer: int) -> None:
        """Accept any model: a uniform cache fits all."""

    @property
    def hot_budget(self) -> None:
        """No row has an F16 copy."""

    @property
    def window(self) -> HotWindow:
        """No token has a row of another type."""
        return HotWindow()

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
        if self.attention == "auto":
            return None
        from mixedkv import _core  # only here: settings are read beside the stock library too

        return _core.CacheConfig(mixed=False, attention=self.attention)

    def __str__(self) -> str:
        """Return the spec that `parse_kv` reads back."""
        name = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        return spec_of(name, {} if self.attention == "auto" else {"attention": self.attention})

    @property
    def full_spec(self) -> str:
        """The spec, which leaves nothing to defaults."""
        return str(self)
