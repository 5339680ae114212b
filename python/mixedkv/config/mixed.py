"""The settings of the caches, validated once, and their written form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mixedkv import _core

_UNIFORM = _core.UNIFORM_DEFAULTS


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformKV:
    """One of llama.cpp's own caches: every token in the same type.

    Args:
        type_k, type_v: types of K and V, each one of `UNIFORM_TYPES`.
        attention: "auto" is llama.cpp's own attention, "fused" this package's CPU kernel.
    """

    type_k: str = _UNIFORM["type_k"]
    type_v: str = _UNIFORM["type_v"]
    attention: str = _UNIFORM["attention"]

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


COLD_TYPES = _core.COLD_TYPES
OWN_TYPES = ("lm4", "tc3")  # that CPUs and CUDA write, and no other GPU
UNIFORM_TYPES = _core.UNIFORM_TYPES

_TYPES = _core.row_types()
_NAMES = {ggml_id: name for name, (ggml_id, *_) in _TYPES.items()}


def ggml_type(name: str) -> int:
    """Return the ggml type id of a type name, e.g. 8 for "q8_0"."""
    return _TYPES[name][0]


def type_name(ggml_id: int) -> str:
    """Return the name of a ggml type id, e.g. "q8_0" for 8, or its digits if no cache has such rows."""
    return _NAMES.get(ggml_id, str(ggml_id))


def type_block(name: str) -> tuple[int, int]:
    """Return the elements and bytes of a block of a type: 32 and 18 for "q4_0", 1 and 2 for "f16"."""
    return _TYPES[name][1:]


def type_bits(name: str) -> float:
    """Return the bits per element, scales included: 16 for "f16", 8.5 for "q8_0", 4.5 for "q4_0"."""
    elements, size = type_block(name)
    return 8 * size / elements


_KINDS = {int: "a whole number", str: "text", bool: "True or False"}


def options_of(setting: Any) -> dict[str, Any]:
    """Return the fields of a setting, a dataclass, that are options of a cache."""
    return {
        each.name: getattr(setting, each.name)
        for each in fields(setting)
        if each.name != "enable_quantization"
    }


def normalise(setting: Any, *, mixed: bool) -> None:
    """Bring the fields of a new setting, a dataclass, to their normal form.

    Raises:
        ValueError: a value is out of range or unknown; the message names the field.
        TypeError: a value has another type than the field.
    """
    for each in fields(setting):
        value, kind = getattr(setting, each.name), type(each.default)
        takes = int | float | str if each.name == "budget" else kind
        if not isinstance(value, takes) or (isinstance(value, bool) and kind is not bool):
            expected = "bytes, or text such as '2GiB'" if each.name == "budget" else _KINDS[kind]
            raise TypeError(f"{each.name}={value!r}: use {expected}")
    for name, value in _core.check_kv(mixed, options_of(setting)).items():
        object.__setattr__(setting, name, value)


_DEFAULTS = _core.DEFAULTS


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedKVConfig:
    """A cache that keeps the recent tokens of each sequence in F16 and the older ones quantised.

    Args:
        enable_quantization: False asks for llama.cpp's uniform F16 cache; of the rest only
            `attention` applies then.
        quantization_threshold: F16 tokens at most in the recent window of a sequence; 0 keeps none.
            Can be set while the cache lives, as far as its F16 rows have room.
        group_size: once more than `quantization_threshold` recent tokens are F16, the oldest
            `group_size` leave the window together. At most the threshold.
        cold_type_k, cold_type_v: type of the older tokens, one of `COLD_TYPES`.
        sink_tokens: the first tokens of a sequence, which stay F16 for good.
        attention: "fused" reads both tiers in one CPU kernel, "merged" through one F16 view of all
            rows on any backend, "auto" takes the fused kernel where the cache lies in CPU memory.
        layers: cold types of single layers, where they differ from `cold_type_k` and `cold_type_v`:
            "0-3:q8_0/q4_0,7-:q5_0" has K of the first four layers in Q8_0 and V in Q4_0, and both in Q5_0
            from layer 7 on.
        budget: bytes that the cache may take, or e.g. "2GiB"; or bits of an element of the cold rows, scales
            included, as "4.5bit". 0 uses the given types. `resolve_budget` chooses the types by layer for a
            model and a context, and spends them where they help most: see `model.resolve_budget.for_budget`.
        sparse: "eps:0.05" makes decoding with the fused kernel, beyond 1,024 tokens, read only some of the
            older tokens, four at a time: those that weigh much, and a random sample of the others. A
            query's sum of attention weights is then wrong by more than 0.05 of it with a probability of
            0.05 at most, or of 0.01 with "eps:0.05/0.01". Two more bits for each element of K are kept for
            that. "" reads all. Answers change: see docs/decisions/040.

    Raises:
        ValueError: a value is out of range or unknown; the message names the field.
        TypeError: a value has another type than the field.
    """

    enable_quantization: bool = True
    quantization_threshold: int = _DEFAULTS["quantization_threshold"]
    group_size: int = _DEFAULTS["group_size"]
    cold_type_k: str = _DEFAULTS["cold_type_k"]
    cold_type_v: str = _DEFAULTS["cold_type_v"]
    sink_tokens: int = _DEFAULTS["sink_tokens"]
    attention: str = _DEFAULTS["attention"]
    layers: str = _DEFAULTS["layers"]
    budget: int | str = _DEFAULTS["budget"]
    sparse: str = _DEFAULTS["sparse"]

    def __post_init__(self) -> None:
        normalise(self, mixed=True)

    def without_quantization(self) -> UniformKV:
        """Return llama.cpp's F16 cache with this attention."""
        return UniformKV(attention="fused" if self.attention == "fused" else "auto")

    @property
    def type_k(self) -> str:
        """The type llama.cpp's context is made with: that of the cold rows."""
        return self.cold_type_k

    @property
    def type_v(self) -> str:
        """The type of V in llama.cpp's context: that of the cold rows."""
        return self.cold_type_v

    def types_of(self, il: int) -> tuple[str, str]:
        """Return the types of K and V in the cold rows of a layer."""
        self._check_resolved()
        ranges = _core.layer_ranges(self.layers)
        types = ((k, v) for first, last, k, v in ranges if first <= il and (last < 0 or il <= last))
        return next(types, (self.cold_type_k, self.cold_type_v))

    def _check_resolved(self) -> None:
        if not self.is_resolved:
            raise ValueError(
                f"budget={self.budget}: its value depends on the model and its context: pass it through "
                f"`resolve_budget` first"
            )

    @property
    def is_resolved(self) -> bool:
        """False while a budget stands for types of layers that a model is needed for."""
        return not self.budget

    @property
    def budget_bits(self) -> float:
        """The bits of an element that the cold rows may have; 0 where the budget is in bytes."""
        return float(self.budget.removesuffix("bit")) if isinstance(self.budget, str) else 0.0

    def check_layers(self, n_layer: int) -> None:
        """Raise ValueError if `layers` names one that a model of `n_layer` layers lacks."""
        for first, last, *_ in _core.layer_ranges(self.layers):
            if max(first, last) >= n_layer:
                raise ValueError(f"layers={self.layers}: the model has {n_layer} layers, 0 to {n_layer - 1}")

    @property
    def window(self) -> _core.HotWindow:
        """The rule that says which positions are F16."""
        return _core.HotWindow(
            self.quantization_threshold, self.group_size, self.sink_tokens, _core.DRAFTS_KEPT
        )

    @property
    def needs_flash(self) -> bool:
        """True, since both tiers are read with flash attention only."""
        return True

    def check_context(self, n_ctx: int) -> None:
        """Raise ValueError unless the F16 rows fit a sequence of at most `n_ctx` tokens."""
        hot = self.quantization_threshold + self.sink_tokens
        if hot > n_ctx:
            raise ValueError(
                f"quantization_threshold={self.quantization_threshold} and sink_tokens={self.sink_tokens} "
                f"keep {hot} tokens in F16, more than a sequence's n_ctx={n_ctx}: "
                f"lower their sum or raise n_ctx"
            )

    def native(self) -> _core.CacheConfig:
        """Return the setting as the native library takes it."""
        self._check_resolved()
        return _core.CacheConfig.of(True, options_of(self))

    def __str__(self) -> str:
        """Return the spec that `parse_kv` reads back: what differs from the defaults."""
        if not self.enable_quantization:
            return str(self.without_quantization())
        return _core.format_kv(True, options_of(self))

    @property
    def full_spec(self) -> str:
        """The spec with cold types, window and sinks, also if they are the defaults.

        Entries on disk are found by it, also by a version with other defaults.
        """
        if not self.enable_quantization:
            return str(self.without_quantization())
        return _core.format_kv(True, options_of(self), full=True)


KVSetting = MixedKVConfig | UniformKV

PRESETS = _core.PRESETS  # to start from, as in "mixed:quality"
HELP = (
    "KV cache (default: mixed, which is mixed:compact: 4 bits but for recent tokens). mixed:balanced has K "
    "in 8 bits, mixed:quality K and V, both with more recent tokens in F16; mixed:budget=3.5bit or "
    "mixed:budget=2GiB choose types by size; mixed:cold=q8_0,threshold=256 sets each. f16, q8_0 and others "
    "are llama.cpp's caches"
)


def parse_kv(kv: str | KVSetting) -> KVSetting:
    """Read the setting of a cache: a spec or a setting itself.

    Specs: "mixed" (the defaults of `MixedKVConfig`), and with other values
    "mixed:cold_k=q8_0,cold_v=q4_0,threshold=256,group=32,sinks=4,sparse=eps:0.05"; "cold=q8_0" sets both cold
    types, "layers=0-3:q8_0/q8_0,9-:q5_0" those of single layers; "budget=2GiB" and "budget=3.5bit" have them
    chosen. A type such as "f16" or "q8_0" is llama.cpp's uniform cache of it, "q8_0/q4_0" one with another
    type for V. Each takes "attention=" too. "mixed:compact", "mixed:balanced" and "mixed:quality" are presets
    to start from, as in "mixed:quality,sinks=8". Case does not matter. `str()` of the result reads back
    as the same setting.

    Raises:
        ValueError: the spec has an unknown name, key or value; the message lists the known ones.
        TypeError: `kv` is neither a spec nor a setting.
    """
    if isinstance(kv, MixedKVConfig):
        return kv if kv.enable_quantization else kv.without_quantization()
    if isinstance(kv, UniformKV):
        return kv
    if not isinstance(kv, str):
        raise TypeError(f"kv={kv!r}: use a spec such as 'mixed' or 'q8_0', or a MixedKVConfig")
    try:
        mixed, given = _core.parse_kv(kv.encode(errors="backslashreplace").decode())
    except ValueError as error:
        said, value = str(error), repr(kv)
        raise ValueError(f"kv={said}" if said.startswith(value) else f"kv={value}: {said}") from None
    return MixedKVConfig(**given) if mixed else UniformKV(**given)
