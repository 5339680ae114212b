"""Settings of the KV cache, each validated once, and their short written form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import gguf

from mixedkv.hot_window import HotWindow
from mixedkv.limits import INT32_MAX

HOT_TYPES = ("f16",)
COLD_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
UNIFORM_TYPES = ("f16", "bf16", "f32", *COLD_TYPES)
ATTENTIONS = ("auto", "fused", "merged")
HOT_BUDGETS = ("auto", "all")


def ggml_type(name: str) -> int:
    """The ggml type id of a type name, e.g. 8 for "q8_0"."""
    return int(gguf.GGMLQuantizationType[name.upper()])


def type_name(ggml_id: int) -> str:
    """The name of a ggml type id, e.g. "q8_0" for 8."""
    return gguf.GGMLQuantizationType(ggml_id).name.lower()


def type_bits(name: str) -> float:
    """Bits per element of a type, scales included: 16 for "f16", 8.5 for "q8_0", 4.5 for "q4_0"."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    return 8 * size / block


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedKVConfig:
    """A cache that keeps the recent tokens of each sequence in F16 and the older ones quantised.

    Args:
        enable_quantization: False asks for llama.cpp's uniform F16 cache; of the rest only
            `attention` applies then.
        quantization_threshold: F16 tokens at most in the recent window of a sequence; 0 keeps none.
            Also what the window can be set to at most while the cache lives.
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

    def __post_init__(self) -> None:
        for field in ("enable_quantization", "equalize"):
            if not isinstance(getattr(self, field), bool):
                raise TypeError(f"{field}={getattr(self, field)!r}: use True or False")
        for field in ("hot_type_k", "hot_type_v"):
            _normalise(self, field, HOT_TYPES)
        for field in ("cold_type_k", "cold_type_v"):
            _normalise(self, field, COLD_TYPES)
        _normalise(self, "attention", ATTENTIONS)
        check_window(self.quantization_threshold, self.group_size, self.sink_tokens)
        _check_int("n_draft", self.n_draft, at_least=0)
        if isinstance(self.hot_budget, str):
            _normalise(self, "hot_budget", HOT_BUDGETS)
        else:
            _check_int("hot_budget", self.hot_budget, at_least=1)

    @property
    def native_budget(self) -> int:
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
        return {
            "mixed": True,
            "threshold": self.quantization_threshold,
            "group_size": self.group_size,
            "sink_tokens": self.sink_tokens,
            "attention": self.attention,
            "n_draft": self.n_draft,
            "equalize": self.equalize,
            "hot_budget": self.native_budget,
        }

    def __str__(self) -> str:
        """The spec that `parse_kv` reads back: what differs from the defaults."""
        if not self.enable_quantization:
            return str(_without_quantization(self))
        return _spec("mixed", _changes(self))


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
        return _spec(name, {} if self.attention == "auto" else {"attention": self.attention})


KVSetting = MixedKVConfig | UniformKV

_NATIVE_BUDGETS = {"auto": 0, "all": 2**32 - 1}  # MIXEDKV_HOT_BUDGET_*

_KEYS = {
    "cold_k": "cold_type_k",
    "cold_v": "cold_type_v",
    "threshold": "quantization_threshold",
    "group": "group_size",
    "sinks": "sink_tokens",
    "attention": "attention",
    "draft": "n_draft",
    "equalize": "equalize",
    "hot_budget": "hot_budget",
}
_KNOWN_KEYS = "cold, " + ", ".join(_KEYS)

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
    hot_budget=2048"; "cold=q8_0" sets both cold types.
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
        options = _parse_options(kv, more) if more else {}
        return MixedKVConfig(**{**PRESETS[preset], **_mixed_fields(kv, options)})
    options = _parse_options(kv, rest) if colon else {}
    if name == "mixed":
        return MixedKVConfig(**_mixed_fields(kv, options))
    type_k, slash, type_v = name.partition("/")
    if not slash:
        type_v = type_k
    if not {type_k, type_v} <= set(UNIFORM_TYPES):
        raise ValueError(f"kv={kv!r} names no cache: use one of {_KNOWN_NAMES}")
    if unknown := options.keys() - {"attention"}:
        raise ValueError(f"kv={kv!r}: a uniform cache takes attention only, not {', '.join(sorted(unknown))}")
    return UniformKV(type_k=type_k, type_v=type_v, **options)


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
        raise ValueError(f"{field}={value!r} is not one of {', '.join(known)}")
    object.__setattr__(setting, field, value.lower())


def _without_quantization(config: MixedKVConfig) -> UniformKV:
    return UniformKV(attention="fused" if config.attention == "fused" else "auto")


def _changes(config: MixedKVConfig) -> dict[str, object]:
    """What differs from the defaults, by key of the spec; equal cold types together."""
    default = {field.name: field.default for field in fields(config)}
    changes = {
        key: getattr(config, field)
        for key, field in _KEYS.items()
        if getattr(config, field) != default[field]
    }
    if changes.get("cold_k") is not None and changes.get("cold_k") == changes.get("cold_v"):
        cold = changes.pop("cold_k")
        del changes["cold_v"]
        return {"cold": cold, **changes}
    return changes


def _spec(name: str, options: dict[str, object]) -> str:
    items = (f"{key}={str(value).lower()}" for key, value in options.items())
    return name + (":" if options else "") + ",".join(items)


def _parse_options(spec: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise ValueError(f"kv={spec!r}: {item!r} is not key=value; known keys: {_KNOWN_KEYS}")
        if key != "cold" and key not in _KEYS:
            raise ValueError(f"kv={spec!r}: unknown key {key!r}; known keys: {_KNOWN_KEYS}")
        if key in options or (key in ("cold_k", "cold_v") and "cold" in options):
            raise ValueError(f"kv={spec!r} gives {key} twice")
        if key == "cold" and options.keys() & {"cold_k", "cold_v"}:
            raise ValueError(f"kv={spec!r}: cold stands for both cold_k and cold_v, which is given too")
        options[key] = value
    return options


def _mixed_fields(spec: str, options: dict[str, str]) -> dict[str, Any]:
    if "cold" in options:
        cold = options.pop("cold")
        options.update(cold_k=cold, cold_v=cold)
    return {_KEYS[key]: _parse_value(spec, key, value) for key, value in options.items()}


def _parse_value(spec: str, key: str, value: str) -> str | int | bool:
    if key in ("threshold", "group", "sinks", "draft"):
        return _parse_int(spec, key, value)
    if key == "hot_budget":
        return value if value in HOT_BUDGETS else _parse_int(spec, key, value)
    if key != "equalize":
        return value
    if value not in ("true", "false"):
        raise ValueError(f"kv={spec!r}: equalize={value} is neither true nor false")
    return value == "true"


def _parse_int(spec: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(INT32_MAX))):
        raise ValueError(f"kv={spec!r}: {key}={value} is not a whole number of tokens")
    return int(value)
