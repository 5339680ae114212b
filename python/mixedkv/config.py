"""Settings of the KV cache, each validated once, and their short written form."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mixedkv.hot_window import HotWindow
from mixedkv.kv_spec import HOT_BUDGETS, KEYS, fields_of, parse_options, spec_of
from mixedkv.layer_types import LayerTypes, parse_layers, shorten
from mixedkv.limits import INT32_MAX
from mixedkv.model.budget import Room, Types, spend
from mixedkv.model.footprint import ModelShape, footprint, model_shape, ring_rows
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.layer_plan import LayerPlan, Shares
from mixedkv.row_types import (
    COLD_TYPES,
    HOT_TYPES,
    UNIFORM_TYPES,
    ggml_type,
    replacement,
    type_bits,
)
from mixedkv.sparse import normal_sparse, top_p_of

ATTENTIONS = ("auto", "fused", "merged")


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
        hot_type_k, hot_type_v: type of the recent tokens; only "f16".
        cold_type_k, cold_type_v: type of the older tokens, one of `COLD_TYPES`.
        sink_tokens: the first tokens of a sequence, which stay F16 for good.
        n_draft: tokens that can be taken back, as speculative decoding does with drafts that are
            rejected, and leave the window as if they had never come: a sequence has F16 rows for so
            many more. Of no effect without a recent window.
        attention: "fused" reads both tiers in one CPU kernel, "merged" through one F16 view of all
            rows on any backend, "auto" takes the fused kernel where the cache lies in CPU memory.
        hot_budget: F16 tokens that all sequences of a context share. "auto" takes a quarter of the bytes of
            the cold rows, but one window and the sinks of all sequences at least, and refuses what takes
            more than F16. "all" has a window for every sequence. Where a number or "all" takes more than
            F16, there is a warning only. See docs/architecture.md for what happens when it runs out.
        equalize: store K times one scale for each rotary pair, chosen from the model's weights, and
            divide Q by it. Without it keys with a few huge channels, which real models have, do not survive
            4 bits.
        layers: cold types of single layers, where they differ from `cold_type_k` and `cold_type_v`:
            "0-3:q8_0/q4_0,7-:q5_1" has K of the first four layers in Q8_0 and V in Q4_0, and both in Q5_1
            from layer 7 on.
        budget: bytes that the cache may take, 0: any. `settle` then chooses the cold types, for a model and a
            context: see `for_budget`.
        bits: of an element of the cold rows at most, scales included, 0: as the types say. `settle` chooses
            the types by layer, for a model, and spends the bits where they do most.
        shrink: while memory is short, of the machine or of a control group, the recent window is halved
            step by step and its memory given back; it grows again when there is room. Statistics and the log
            say so, and what is evaluated meanwhile is not exact.
        v_skip: while decoding with the fused kernel, values whose attention weights are below a 64th of this,
            of what the largest weight is, are neither read nor added; 0 adds all. 1e-6 is a start.
        sparse: "top_p:0.99" has decoding with the fused kernel read, from the third layer on and of more than
            1,024 tokens, only those pages of 16 older tokens that are estimated to hold 0.99 of the
            attention; "" reads all. Answers are other ones: see docs/decisions/040.

    Raises:
        ValueError: a value is out of range or unknown; the message names the field.
        TypeError: a value has another type than the field.
    """

    enable_quantization: bool = True
    quantization_threshold: int = 32
    group_size: int = 16
    hot_type_k: str = "f16"
    hot_type_v: str = "f16"
    cold_type_k: str = "q4_0"
    cold_type_v: str = "q4_0"
    sink_tokens: int = 4
    attention: str = "auto"
    n_draft: int = 16
    equalize: bool = True
    hot_budget: int | str = "auto"
    layers: str = ""
    budget: int = 0
    bits: float = 0.0
    shrink: bool = False
    v_skip: float = 0.0
    sparse: str = ""

    def __post_init__(self) -> None:
        for field in ("enable_quantization", "equalize", "shrink"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field}={getattr(self, field)!r}: use True or False")
        for field in ("hot_type_k", "hot_type_v"):
            _normalise(self, field, HOT_TYPES)
        _normalise(self, "cold_type_k", COLD_TYPES)
        _normalise(self, "cold_type_v", COLD_TYPES)
        _normalise(self, "attention", ATTENTIONS)
        check_window(self.quantization_threshold, self.group_size, self.sink_tokens)
        _check_int("n_draft", self.n_draft, at_least=0)
        if isinstance(self.hot_budget, str):
            _normalise(self, "hot_budget", HOT_BUDGETS)
        else:
            _check_int("hot_budget", self.hot_budget, at_least=1)
        if isinstance(self.v_skip, bool) or not isinstance(self.v_skip, int | float):
            raise TypeError(f"v_skip={self.v_skip!r}: use a number")
        if not 0 <= self.v_skip < 1:
            raise ValueError(f"v_skip={self.v_skip}: use a number from 0 to below 1")
        object.__setattr__(self, "v_skip", float(self.v_skip))
        object.__setattr__(self, "sparse", normal_sparse(self.sparse))
        if self.sparse and self.attention == "merged":
            raise ValueError(
                f"sparse={self.sparse} needs the fused attention: leave it or attention=merged out"
            )
        if not isinstance(self.layers, str):
            raise TypeError(f"layers={self.layers!r}: use text such as '0-3:q8_0/q4_0,4-:q5_1'")
        object.__setattr__(self, "layers", ",".join(map(str, self._ranges)))
        if isinstance(self.budget, bool) or not isinstance(self.budget, int):
            raise TypeError(f"budget={self.budget!r}: use a number of bytes")
        if self.budget < 0:
            raise ValueError(f"budget={self.budget}: use a number of bytes, or 0 for none")
        if isinstance(self.bits, bool) or not isinstance(self.bits, int | float):
            raise TypeError(f"bits={self.bits!r}: use a number such as 3.5")
        if not (self.bits == 0 or 1 <= self.bits <= 16):
            raise ValueError(f"bits={self.bits:g}: use a number such as 3.5, or 0 for the types as given")
        if self.budget and self.bits:
            raise ValueError(
                f"budget={self.budget} and bits={self.bits:g} both choose the cold types: use one"
            )
        for field in ("budget", "bits"):
            chosen = (self.cold_type_k, self.cold_type_v, self.layers) != ("q4_0", "q4_0", "")
            if (value := getattr(self, field)) and chosen:
                raise ValueError(
                    f"{field}={value} chooses the cold types: leave cold_type_k, cold_type_v and layers out"
                )

    @classmethod
    def for_budget(
        cls,
        model: str | os.PathLike[str] | ModelShape,
        n_ctx: int,
        n_bytes: int,
        *,
        n_seq: int = 1,
        shares: Shares | None = None,
        **given: Any,
    ) -> KVSetting:
        """The setting whose cache takes at most `n_bytes` and moves the next token least.

        Bits go to K and V of the layers where they do most, see `mixedkv.model.layer_plan`. What is left
        when all rows have eight widens the recent window; where F16 fits, it is llama.cpp's F16 cache. Where
        four bits with the window as given are too many, the window is halved until they fit.

        Args:
            model: a GGUF file, or its shape.
            n_ctx: tokens that the cache is made for, which `n_seq` sequences share.
            shares: what `mixedkv bench sensitivity` measured: see `model.measured_shares.read_shares`.
            given: other fields; `quantization_threshold` is the window to begin with.

        Raises:
            ValueError: nothing fits; the message says what the smallest cache takes.
            OSError, InvalidModelFileError, UnsupportedModelError: see `model_shape`.
        """
        kv = cls(**given, budget=n_bytes)
        if isinstance(model, ModelShape):
            return settle(kv, model, n_ctx, n_seq, shares)
        return settle(kv, model_shape(read_model_file(model)), n_ctx, n_seq, shares)

    @property
    def native_budget(self) -> int | None:
        """`hot_budget` as the C API has it."""
        return _NATIVE_BUDGETS.get(self.hot_budget, self.hot_budget)  # type: ignore[arg-type]

    @property
    def type_k(self) -> str:
        """The type llama.cpp's context is made with: that of the cold rows."""
        return self.cold_type_k

    @property
    def type_v(self) -> str:
        return self.cold_type_v

    @property
    def _ranges(self) -> tuple[LayerTypes, ...]:
        return parse_layers(self.layers, COLD_TYPES)

    def types_of(self, il: int) -> tuple[str, str]:
        """Types of K and V in the cold rows of a layer."""
        self._check_settled()
        types = ((each.type_k, each.type_v) for each in self._ranges if il in each)
        return next(types, (self.cold_type_k, self.cold_type_v))

    def _check_settled(self) -> None:
        if not self.is_settled:
            name = f"budget={self.budget}" if self.budget else f"bits={self.bits:g}"
            raise ValueError(f"{name}: what it comes to depends on the model and its context; see `settle`")

    @property
    def is_settled(self) -> bool:
        """False while a budget or a number of bits stands for types of layers that a model is needed for."""
        return not (self.budget or self.bits)

    def check_layers(self, n_layer: int) -> None:
        """Raise ValueError if `layers` names one that a model of `n_layer` layers lacks."""
        for each in self._ranges:
            if max(each.first, each.last or 0) >= n_layer:
                raise ValueError(f"layers {each.layers}: the model has {n_layer} layers, 0 to {n_layer - 1}")

    @property
    def window(self) -> HotWindow:
        """Which positions are F16."""
        return HotWindow(self.quantization_threshold, self.group_size, self.sink_tokens, self.n_draft)

    @property
    def needs_flash(self) -> bool:
        """Both tiers are read with flash attention only."""
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

    def native(self) -> dict[str, Any] | None:
        """Arguments of `_core.configure_next`."""
        self._check_settled()
        return {
            "mixed": True,
            "threshold": self.quantization_threshold,
            "group_size": self.group_size,
            "sink_tokens": self.sink_tokens,
            "attention": self.attention,
            "n_draft": self.n_draft,
            "equalize": self.equalize,
            "hot_budget": self.native_budget,
            "layers": [
                (
                    each.first,
                    -1 if each.last is None else each.last,
                    ggml_type(each.type_k),
                    ggml_type(each.type_v),
                )
                for each in self._ranges
            ],
            "v_skip": self.v_skip,
            "sparse_top_p": top_p_of(self.sparse),
        }

    def __str__(self) -> str:
        """The spec that `parse_kv` reads back: what differs from the defaults."""
        if not self.enable_quantization:
            return str(_without_quantization(self))
        return spec_of("mixed", _changes(self))


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
        _normalise(self, "type_k", UNIFORM_TYPES)
        _normalise(self, "type_v", UNIFORM_TYPES)
        _normalise(self, "attention", ("auto", "fused"))

    def types_of(self, il: int) -> tuple[str, str]:
        """Types of K and V of a layer: the same in all of them."""
        return self.type_k, self.type_v

    def check_layers(self, n_layer: int) -> None:
        """A uniform cache fits any model."""

    @property
    def native_budget(self) -> int | None:
        """No row has an F16 copy."""
        return None

    @property
    def window(self) -> HotWindow:
        """No token has a row of another type."""
        return HotWindow()

    @property
    def needs_flash(self) -> bool:
        """llama.cpp reads a quantised V, and this package's kernels their rows, with flash attention only."""
        return self.attention == "fused" or type_bits(self.type_v) < 16

    def check_context(self, n_ctx: int) -> None:
        """A uniform cache fits any context."""

    def native(self) -> dict[str, Any] | None:
        """Arguments of `_core.configure_next`; None leaves everything to llama.cpp."""
        if self.attention == "auto":
            return None
        window = {"threshold": 0, "group_size": 1, "sink_tokens": 0}
        return {"mixed": False, **window, "attention": self.attention}

    def __str__(self) -> str:
        """The spec that `parse_kv` reads back."""
        name = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        return spec_of(name, {} if self.attention == "auto" else {"attention": self.attention})


KVSetting = MixedKVConfig | UniformKV

_NATIVE_BUDGETS = {"auto": 0, "all": 2**32 - 1}  # MIXEDKV_HOT_BUDGET_*

# Chosen from docs/benchmarks.md, with the reasons. Plain "mixed" is compact: the bits of q4_0.
PRESETS: dict[str, dict[str, Any]] = {
    "compact": {},
    "balanced": {"cold_type_k": "q8_0", "quantization_threshold": 128, "group_size": 32},
    "quality": {
        "cold_type_k": "q8_0",
        "cold_type_v": "q8_0",
        "quantization_threshold": 256,
        "group_size": 32,
    },
}
_KNOWN_NAMES = "mixed, " + ", ".join(UNIFORM_TYPES)


def parse_kv(kv: str | KVSetting) -> KVSetting:
    """Read the setting of a cache: a spec or a setting itself.

    Specs: "mixed" (the defaults of `MixedKVConfig`), and with other values
    "mixed:cold_k=q8_0,cold_v=q4_0,threshold=256,group=32,sinks=4,draft=16,equalize=false,
    hot_budget=2048,v_skip=1e-6,shrink=true,
    sparse=top_p:0.99"; "cold=q8_0" sets both cold types,
    "layers=0-3:q8_0/q8_0,9-:q5_1" those of single layers; "bits=3.5" and "budget=2GiB" have them chosen.
    A type such as "f16" or "q8_0" is llama.cpp's uniform cache of it, "q8_0/q4_0" one with another
    type for V. Each takes "attention=" too. "mixed:compact", "mixed:balanced" and "mixed:quality" are presets
    to start from, as in "mixed:quality,sinks=8". Case does not matter. `str()` of the result reads back
    as the same setting.

    Raises:
        ValueError: the spec has an unknown name, key or value; the message lists the known ones.
        TypeError: `kv` is neither a spec nor a setting.
    """
    if isinstance(kv, MixedKVConfig):
        return kv if kv.enable_quantization else _without_quantization(kv)
    if isinstance(kv, UniformKV):
        return kv
    if not isinstance(kv, str):
        raise TypeError(f"kv={kv!r}: use a spec such as 'mixed' or 'q8_0', or a MixedKVConfig")
    name, colon, rest = kv.lower().replace(" ", "").partition(":")
    preset, _, more = rest.partition(",")
    if name == "mixed" and preset in PRESETS:
        options = parse_options(kv, more) if more else {}
        return MixedKVConfig(**{**PRESETS[preset], **fields_of(kv, options)})
    options = parse_options(kv, rest) if colon else {}
    if name == "mixed":
        return MixedKVConfig(**fields_of(kv, options))
    type_k, slash, type_v = name.partition("/")
    if not slash:
        type_v = type_k
    if not {type_k, type_v} <= set(UNIFORM_TYPES):
        gone = replacement(type_k) or replacement(type_v)
        raise ValueError(f"kv={kv!r} names no cache: use one of {_KNOWN_NAMES}{gone}")
    if unknown := options.keys() - {"attention"}:
        raise ValueError(f"kv={kv!r}: a uniform cache takes attention only, not {', '.join(sorted(unknown))}")
    return UniformKV(type_k=type_k, type_v=type_v, **options)


def settle(
    kv: KVSetting,
    shape: ModelShape,
    n_ctx: int,
    n_seq: int = 1,
    shares: Shares | None = None,
    *,
    n_stream: int = 1,
    on_cpu: bool = True,
) -> KVSetting:
    """The setting that a budget comes to for a model and a context, see `MixedKVConfig.for_budget`, or `bits`
    for a model; a setting without them stays as it is. `n_stream` equal parts of the context have sequences
    of their own; `on_cpu`: the cache lies in CPU memory.

    Raises:
        ValueError: nothing fits the budget, or the bits.
    """
    if not isinstance(kv, MixedKVConfig) or kv.is_settled:
        return kv
    f16, plan = _without_quantization(kv), LayerPlan(shape, shares, on_cpu=on_cpu)
    if kv.bits:
        if kv.bits < plan.bits(0):
            raise ValueError(f"bits={kv.bits:g}: the coarsest types take {plan.bits(0):g} in this model")
        type_k, type_v, layers = shorten(plan.types(plan.most(kv.bits)))
        return replace(kv, bits=0.0, cold_type_k=type_k, cold_type_v=type_v, layers=layers)

    def size(setting: KVSetting) -> int:
        return n_stream * footprint(shape, setting, n_ctx // n_stream, n_seq // n_stream).bytes

    def make(types: Types, threshold: int, hot_budget: Room) -> MixedKVConfig:
        type_k, type_v, layers = shorten(types)
        group_size = min(kv.group_size, threshold or kv.group_size)
        kept = replace(kv, budget=0, quantization_threshold=threshold, group_size=group_size)
        kept = replace(kept, hot_budget=hot_budget)
        return replace(kept, cold_type_k=type_k, cold_type_v=type_v, layers=layers)

    def rooms(threshold: int) -> Sequence[Room]:
        """A quarter of the cold rows is more than what several sequences need at least."""
        if kv.hot_budget != "auto" or n_seq == n_stream:
            return [kv.hot_budget]
        n_rows, least = ring_rows(shape, make(plan.types(0), threshold, "auto"), n_ctx, n_seq)
        return [*range(max(least, 1), n_rows, 16), "auto"]

    if size(f16) <= kv.budget:
        return f16
    least, most = kv.quantization_threshold, n_ctx // n_seq - kv.sink_tokens
    windows = range(least, max(most, least) + 1, kv.group_size)
    return spend(kv.budget, plan, windows, rooms, make, size)


def check_window(quantization_threshold: int, group_size: int, sink_tokens: int) -> None:
    """Raise ValueError or TypeError unless the three can stand together."""
    _check_int("quantization_threshold", quantization_threshold, at_least=0)
    _check_int("group_size", group_size, at_least=1)
    _check_int("sink_tokens", sink_tokens, at_least=0)
    if 0 < quantization_threshold < group_size:
        raise ValueError(
            f"quantization_threshold={quantization_threshold} is smaller than group_size={group_size} "
            f"(16 unless given): a window cannot let go of more than it holds. Use "
            f"group_size={quantization_threshold} or less, or quantization_threshold={group_size} or more "
            f"(0: no recent window)"
        )


def _check_int(field: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field}={value!r}: use a whole number")
    if not at_least <= value <= INT32_MAX:
        raise ValueError(f"{field}={value}: use a number from {at_least} to {INT32_MAX}")


def _normalise(setting: KVSetting, field: str, known: tuple[str, ...]) -> None:
    value = getattr(setting, field)
    if not isinstance(value, str):
        raise TypeError(f"{field}={value!r}: use one of {', '.join(known)}")
    if value.lower() not in known:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(known)}{replacement(value.lower())}")
    object.__setattr__(setting, field, value.lower())


def _without_quantization(config: MixedKVConfig) -> UniformKV:
    return UniformKV(attention="fused" if config.attention == "fused" else "auto")


def _changes(config: MixedKVConfig) -> dict[str, object]:
    """What differs from the defaults, by key of the spec; equal cold types together."""
    default = {field.name: field.default for field in fields(config)}
    changes = {
        key: getattr(config, field) for key, field in KEYS.items() if getattr(config, field) != default[field]
    }
    if changes.get("cold_k") is not None and changes.get("cold_k") == changes.get("cold_v"):
        cold = changes.pop("cold_k")
        del changes["cold_v"]
        return {"cold": cold, **changes}
    return changes
