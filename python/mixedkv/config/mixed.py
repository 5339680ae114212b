"""The settings of the mixed cache, validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mixedkv.config.checks import check_int, check_window, normalise
from mixedkv.config.hot_window import HotWindow
from mixedkv.config.layers import LayerTypes, parse_layers
from mixedkv.config.row_types import COLD_TYPES, ggml_type
from mixedkv.config.sparse import normal_sparse, standard_error
from mixedkv.config.spec import HOT_BUDGETS, KEYS, spec_of
from mixedkv.config.uniform import UniformKV
from mixedkv.sizes import size_of

if TYPE_CHECKING:
    from mixedkv import _core
    from mixedkv.model.footprint import ModelShape
    from mixedkv.model.layer_plan import Shares

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
        cold_type_k, cold_type_v: type of the older tokens, one of `COLD_TYPES`.
        sink_tokens: the first tokens of a sequence, which stay F16 for good.
        n_draft: tokens that can be removed without a trace in the window, as rejected drafts are: a sequence
            has F16 rows for so many more. No effect without a recent window.
        attention: "fused" reads both tiers in one CPU kernel, "merged" through one F16 view of all
            rows on any backend, "auto" takes the fused kernel where the cache lies in CPU memory.
        hot_budget: F16 tokens that all sequences of a context share. "auto" has windows for half of the
            sequences, in a quarter to a half of the bytes of the cold rows, but one window and the sinks of
            all at least, and refuses what takes more than F16. "all" has a window for every sequence.
            Where a number or "all" takes more than F16, there is a warning only. See
            docs/architecture.md for what happens when it runs out.
        equalize: store K times one scale for each rotary pair, chosen from the model's weights, and
            divide Q by it. Without it keys with a few huge channels, which real models have, do not survive
            4 bits.
        layers: cold types of single layers, where they differ from `cold_type_k` and `cold_type_v`:
            "0-3:q8_0/q4_0,7-:q5_1" has K of the first four layers in Q8_0 and V in Q4_0, and both in Q5_1
            from layer 7 on.
        budget: bytes that the cache may take, or e.g. "2GiB"; 0 for no limit. `settle` then chooses the cold
            types for a model and a context: see `for_budget`.
        bits: maximum bits per element of the cold rows, scales included; 0 uses the given types. `settle`
            chooses the types by layer for a model, and spends the bits where they help most.
        shrink: halve the recent window step by step while the machine or a control group is short of memory,
            and extend it again later. Statistics and the log report it; tokens evaluated meanwhile are not
            exact.
        rounding: bits of Q and of attention weights where the fused kernel multiplies them with the integers
            of older tokens: 16, or 8, which takes less time where that kernel is "avx512" or "amx": on
            processors with AVX-512 VNNI. Other kernels always use 16. "auto" is 8 in layers whose K
            and V have 4 bits at most, which are coarser themselves. See docs/decisions/066.
        v_skip: while decoding with the fused kernel, skip values whose attention weight is below a 64th of
            this share of the largest weight; 0 skips none. 1e-6 is a good start.
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
    quantization_threshold: int = 64
    group_size: int = 16
    cold_type_k: str = "q4_0"
    cold_type_v: str = "q4_0"
    sink_tokens: int = 4
    attention: str = "auto"
    n_draft: int = 16
    equalize: bool = True
    hot_budget: int | str = "auto"
    layers: str = ""
    budget: int | str = 0
    bits: float = 0.0
    shrink: bool = False
    rounding: int | str = "auto"
    v_skip: float = 0.0
    sparse: str = ""

    def __post_init__(self) -> None:
        for field in ("enable_quantization", "equalize", "shrink"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field}={getattr(self, field)!r}: use True or False")
        normalise(self, "cold_type_k", COLD_TYPES)
        normalise(self, "cold_type_v", COLD_TYPES)
        normalise(self, "attention", ATTENTIONS)
        check_window(self.quantization_threshold, self.group_size, self.sink_tokens)
        check_int("n_draft", self.n_draft, at_least=0)
        if isinstance(self.hot_budget, str):
            normalise(self, "hot_budget", HOT_BUDGETS)
        else:
            check_int("hot_budget", self.hot_budget, at_least=1)
        if isinstance(self.rounding, bool) or not isinstance(self.rounding, int | str):
            raise TypeError(f"rounding={self.rounding!r}: use 8, 16 or 'auto'")
        if self.rounding not in (8, 16, "auto"):
            raise ValueError(f"rounding={self.rounding}: use 8, 16 or auto")
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
        object.__setattr__(self, "budget", size_of("budget", self.budget))
        if isinstance(self.bits, bool) or not isinstance(self.bits, int | float):
            raise TypeError(f"bits={self.bits!r}: use a number such as 3.5")
        if not (self.bits == 0 or 1 <= self.bits <= 16):
            raise ValueError(f"bits={self.bits:g}: use a number such as 3.5, or 0 for the types as given")
        if self.budget and self.bits:
            raise ValueError(
                f"budget={self.budget} and bits={self.bits:g} both choose the cold types: use one"
            )
        if not self.is_settled and (self.cold_type_k, self.cold_type_v, self.layers) != ("q4_0", "q4_0", ""):
            asked = f"budget={self.budget}" if self.budget else f"bits={self.bits}"
            raise ValueError(f"{asked} chooses the cold types: leave cold_type_k, cold_type_v and layers out")

    @classmethod
    def for_budget(
        cls,
        model: str | os.PathLike[str] | ModelShape,
        n_ctx: int,
        n_bytes: int | str,
        *,
        n_seq: int = 1,
        shares: Shares | None = None,
        **given: Any,
    ) -> MixedKVConfig | UniformKV:
        """Return the setting whose cache takes at most `n_bytes` (or "2GiB") and changes predictions least.

        Bits go to K and V of the layers where they help most, see `mixedkv.model.layer_plan`. Bytes left over
        when all rows have eight bits widen the recent window; if F16 fits, it is llama.cpp's F16 cache. If
        four bits with the given window are too many, the window is halved until they fit.

        Args:
            model: a GGUF file, or its shape.
            n_ctx: tokens that the cache is made for, which `n_seq` sequences share.
            shares: what `mixedkv bench sensitivity` measured: see `model.measured_shares.read_shares`.
            given: other fields; `quantization_threshold` is the window to begin with.

        Raises:
            ValueError: nothing fits; the message says what the smallest cache takes.
            OSError, InvalidModelFileError, UnsupportedModelError: see `model_shape`.
        """
        from mixedkv.model.settle import settle_for  # only here: all else about a setting needs no model

        return settle_for(cls(**given, budget=n_bytes), model, n_ctx, n_seq, shares)

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

    @property
    def _ranges(self) -> tuple[LayerTypes, ...]:
        return parse_layers(self.layers, COLD_TYPES)

    def types_of(self, il: int) -> tuple[str, str]:
        """Return the types of K and V in the cold rows of a layer."""
        self._check_settled()
        types = ((each.type_k, each.type_v) for each in self._ranges if il in each)
        return next(types, (self.cold_type_k, self.cold_type_v))

    def _check_settled(self) -> None:
        if not self.is_settled:
            name = f"budget={self.budget}" if self.budget else f"bits={self.bits:g}"
            raise ValueError(
                f"{name}: its value depends on the model and its context: pass it through `settle` first"
            )

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
        """The rule that says which positions are F16."""
        return HotWindow(self.quantization_threshold, self.group_size, self.sink_tokens, self.n_draft)

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
        from mixedkv import _core  # only here: settings are read beside the stock library too

        self._check_settled()
        named = {"auto": _core.CacheConfig.HOT_BUDGET_AUTO, "all": _core.CacheConfig.HOT_BUDGET_ALL}
        return _core.CacheConfig(
            threshold=self.quantization_threshold,
            group_size=self.group_size,
            sink_tokens=self.sink_tokens,
            attention=self.attention,
            n_draft=self.n_draft,
            equalize=self.equalize,
            hot_budget=self.hot_budget if isinstance(self.hot_budget, int) else named[self.hot_budget],
            layers=[
                (
                    each.first,
                    -1 if each.last is None else each.last,
                    ggml_type(each.type_k),
                    ggml_type(each.type_v),
                )
                for each in self._ranges
            ],
            rounding=self.rounding if isinstance(self.rounding, int) else 0,
            v_skip=self.v_skip,
            sparse_error=standard_error(self.sparse),
        )

    def __str__(self) -> str:
        """Return the spec that `parse_kv` reads back: what differs from the defaults."""
        if not self.enable_quantization:
            return str(self.without_quantization())
        return spec_of("mixed", _changes(self))

    @property
    def full_spec(self) -> str:
        """The spec with cold types, window and sinks, also if they are the defaults, and without `rounding`.

        Entries on disk are found by it, also by a version with other defaults.
        """
        if not self.enable_quantization:
            return str(self.without_quantization())
        shape = {key: getattr(self, KEYS[key]) for key in ("cold_k", "cold_v", "threshold", "group", "sinks")}
        left_out = {"cold", "rounding", *shape}
        rest = {key: value for key, value in _changes(self).items() if key not in left_out}
        return spec_of("mixed", shape | rest)


def _changes(config: MixedKVConfig) -> dict[str, object]:
    """Return the fields that differ from the defaults, by key of the spec; equal cold types together."""
    default = {field.name: field.default for field in fields(config)}
    changes = {
        key: getattr(config, field) for key, field in KEYS.items() if getattr(config, field) != default[field]
    }
    if changes.get("cold_k") is not None and changes.get("cold_k") == changes.get("cold_v"):
        cold = changes.pop("cold_k")
        del changes["cold_v"]
        return {"cold": cold, **changes}
    return changes
