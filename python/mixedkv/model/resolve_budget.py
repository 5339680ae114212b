"""Settles a budget: spends it on the types of rows first, then on the window."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.limits import padded
from mixedkv.model.footprint import (
    WINDOWED,
    ModelShape,
    Reads,
    Sliding,
    cache_bytes,
    footprint,
    model_shape,
    n_cells,
)
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.layer_plan import LayerPlan, Shares
from mixedkv.sizes import format_bytes

Types = list[tuple[int, str, str]]


def resolve_budget(
    kv: KVSetting,
    shape: ModelShape,
    n_ctx: int,
    n_seq: int = 1,
    shares: Shares | None = None,
    *,
    n_stream: int = 1,
    on_cpu: bool = True,
    gpus_write_all: bool = False,
    sliding: Sliding = WINDOWED,
    reads: Reads = _core.gpus_read,
) -> KVSetting:
    """The setting that a budget comes to for a model and a context, see `for_budget`; a setting
    without one stays as it is. `n_stream` equal parts of the context have sequences
    of their own; `on_cpu`: the cache lies in CPU memory. Elsewhere attention takes an F16 view of a layer
    whose rows GPUs do not read as they lie, and types of `OWN_TYPES` need GPUs that write them.

    Raises:
        ValueError: nothing fits the budget.
    """
    if not isinstance(kv, MixedKVConfig) or kv.is_resolved:
        return kv
    n_each, n_seq_each = n_ctx // n_stream, n_seq // n_stream
    kv = _within(kv, padded(n_each))
    cells = n_cells(shape, n_each, n_seq_each, sliding)
    plan = LayerPlan(shape, shares, cells=cells, own_types=on_cpu or gpus_write_all)
    f16 = kv.without_quantization()
    if bits := kv.budget_bits:
        if bits < plan.bits(0):
            raise ValueError(
                f"budget={kv.budget}: the coarsest types take {plan.bits(0):g} bits in this model"
            )
        type_k, type_v, layers = shorten(plan.types(plan.most(bits)))
        return replace(kv, budget=0, cold_type_k=type_k, cold_type_v=type_v, layers=layers)

    def size(setting: KVSetting) -> int:
        return cache_bytes(
            shape, setting, n_ctx, n_seq, sliding, n_stream=n_stream, on_cpu=on_cpu, reads=reads
        )

    def make(types: Types, threshold: int) -> MixedKVConfig:
        type_k, type_v, layers = shorten(types)
        group_size = min(kv.group_size, threshold or kv.group_size)
        kept = replace(kv, budget=0, quantization_threshold=threshold, group_size=group_size)
        return replace(kept, cold_type_k=type_k, cold_type_v=type_v, layers=layers)

    if size(f16) <= int(kv.budget):
        return f16
    least, most = kv.quantization_threshold, n_each // n_seq_each - kv.sink_tokens
    windows = range(least, max(most, least) + 1, kv.group_size)
    return _spend(str(kv), int(kv.budget), plan, windows, make, size)


def _spend(
    spec: str,
    budget: int,
    plan: LayerPlan,
    windows: Sequence[int],
    make: Callable[[Types, int], MixedKVConfig],
    size: Callable[[KVSetting], int],
) -> MixedKVConfig:
    """Return the setting of least divergence that takes `budget` bytes at most.

    Args:
        windows: F16 tokens of the recent window, ascending; the first one is the one to aim at. It is halved
            where not even the coarsest types fit with it, and grows when all rows have the finest.
        make: a setting of these types of layers and this window.
        size: bytes of a setting.

    Raises:
        ValueError: nothing fits; the message has the bytes of the smallest setting.
    """
    coarsest, window = plan.types(0), windows[0]
    while window and size(make(coarsest, window)) > budget:
        window //= 2
    if (smallest := size(make(coarsest, window))) > budget:
        raise ValueError(
            f"kv={spec!r}: {format_bytes(budget)} is too little, the smallest cache takes "
            f"{format_bytes(smallest, enough=True)}: raise the budget, or lower n_ctx"
        )
    steps = range(len(plan) + 1)
    n = bisect_right(steps, budget, key=lambda n: size(make(plan.types(n), window))) - 1
    if n == len(plan) and window == windows[0]:
        wide = bisect_right(windows, budget, key=lambda wider: size(make(plan.types(n), wider)))
        window = windows[wide - 1]
    return make(plan.types(n), window)


def fit_window(
    kv: KVSetting,
    shape: ModelShape,
    n_ctx: int,
    n_seq: int = 1,
    n_stream: int = 1,
    sliding: Sliding = WINDOWED,
) -> KVSetting:
    """Return the setting with its window halved until the context has room for it, and the cache is no larger
    than an F16 one.

    A window takes F16 rows beside the cold ones, which a short context has no gain to pay with. A setting
    that no window makes small enough stays as it is. Arguments as in `resolve_budget`.
    """
    if not isinstance(kv, MixedKVConfig) or not kv.enable_quantization or not kv.native().chooses_rows:
        return kv

    def size(setting: KVSetting) -> int:
        return n_stream * footprint(shape, setting, n_ctx // n_stream, n_seq // n_stream, sliding).bytes

    kv = _within(kv, padded(n_ctx // n_stream))
    most, fitted = size(kv.without_quantization()), kv
    while fitted.quantization_threshold and size(fitted) > most:
        fitted = _halved(fitted)
    return fitted if size(fitted) <= most else kv


def _within(kv: MixedKVConfig, n_ctx: int) -> MixedKVConfig:
    """Return the setting with a window and sinks that `n_ctx` tokens have room for."""
    while kv.quantization_threshold and kv.quantization_threshold + kv.sink_tokens > n_ctx:
        kv = _halved(kv)
    return replace(kv, sink_tokens=n_ctx) if kv.sink_tokens > n_ctx else kv


def _halved(kv: MixedKVConfig) -> MixedKVConfig:
    threshold = kv.quantization_threshold // 2
    group_size = max(1, min(kv.group_size, threshold))
    return replace(kv, quantization_threshold=threshold, group_size=group_size)


def for_budget(
    model: str | os.PathLike[str] | ModelShape,
    n_ctx: int,
    n_bytes: int | str,
    *,
    n_seq: int = 1,
    shares: Shares | None = None,
    **given: Any,
) -> KVSetting:
    """Return the setting whose cache takes at most `n_bytes` (or "2GiB") and changes predictions least.

    Bits go to K and V of the layers where they help most, see `layer_plan`. Bytes left over when all rows
    have eight bits widen the recent window; if F16 fits, it is llama.cpp's F16 cache. If four bits with the
    given window are too many, the window is halved until they fit.

    Args:
        model: a GGUF file, or its shape.
        n_ctx: tokens that the cache is made for, which `n_seq` sequences share.
        shares: what `mixedkv bench sensitivity` measured: see `measured_shares.read_shares`.
        given: other fields of `MixedKVConfig`; `quantization_threshold` is the window to begin with.

    Raises:
        ValueError: nothing fits; the message says what the smallest cache takes.
        OSError, InvalidModelFileError, UnsupportedModelError: see `model_shape`.
    """
    shape = model if isinstance(model, ModelShape) else model_shape(read_model_file(model))
    return resolve_budget(MixedKVConfig(**given, budget=n_bytes), shape, n_ctx, n_seq, shares)


def join_layers(types: Iterable[tuple[int, str, str]]) -> str:
    """Return the short form of (layer, type of K, type of V), in order; equal neighbours are one range."""
    in_range = groupby(enumerate(types), lambda each: (each[1][0] - each[0], each[1][1:]))
    ranges = [(pair, [il for _, (il, *_) in each]) for (_, pair), each in in_range]
    return ",".join(
        f"{il[0]}{'' if len(il) == 1 else f'-{il[-1]}'}:{k if k == v else f'{k}/{v}'}"
        for (k, v), il in ranges
    )


def shorten(types: Sequence[tuple[int, str, str]]) -> tuple[str, str, str]:
    """Return the commonest types of K and V, and the short form of the layers that have others."""
    (type_k, type_v), _ = Counter(each[1:] for each in types).most_common(1)[0]
    return type_k, type_v, join_layers(each for each in types if each[1:] != (type_k, type_v))
