"""Chooses the cache and the context of a `Llama` by its file's header and the memory, before it is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from mixedkv.config import KVSetting, MixedKVConfig, UniformKV, parse_kv
from mixedkv.config.mixed import type_name
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import padded
from mixedkv.model.fit import Beside, ContextPlace, Fit, check_room, compute_bytes, fit, fit_with_gpu
from mixedkv.model.footprint import Sliding, model_shape
from mixedkv.model.gguf_file import ModelFile, default_n_ctx
from mixedkv.native.memory import gpu_kinds, gpu_room, memory_room

_N_BATCH = 512  # of llama_cpp.Llama


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextChoice:
    """A cache and a context: as they were asked for, and then as they are made.

    Args:
        setting: of the cache; `chosen` if it was asked for, and is not the default.
        n_ctx: tokens, 0: the model's, "fit": as many as fit.
        n_seq_max, kv_unified, n_windows, flash_attn: arguments of `Llama`.
        takes_all: nothing checks whether the cache fits the memory: other rules say what is loaded.
        shares_weights: another `Llama` has the weights.
        beside: what else is loaded.
        fit: the choice that "fit" made.
        n_gpu_layers: layers on a GPU that it chose; None: what was said of them stays.
        warnings: what is not as it was asked for.
    """

    setting: KVSetting
    chosen: bool
    n_ctx: int | Literal["fit"]
    n_seq_max: int
    kv_unified: bool
    n_windows: int
    flash_attn: bool | None
    takes_all: bool
    shares_weights: bool
    beside: Beside
    fit: Fit | None = None
    n_gpu_layers: int | None = None
    warnings: tuple[str, ...] = ()


def choose_setting(
    kv: str | KVSetting | None, type_k: int | None, type_v: int | None, embedding: bool
) -> KVSetting:
    """Return the cache that was asked for. The default of embeddings is F16: they read a row once and reserve
    sequences by the hundred.

    Raises:
        ValueError: `kv` cannot be read, or types are given besides.
    """
    if type_k is None and type_v is None:
        return parse_kv(kv if kv is not None else "f16" if embedding else "mixed")
    if kv is not None:
        raise ValueError(
            f"kv={str(kv)!r} and type_k={type_k}, type_v={type_v} both choose the cache: give kv only"
        )
    k, v = (1 if kind is None else kind for kind in (type_k, type_v))
    return UniformKV(type_k=type_name(k), type_v=type_name(v))


def choose_context(
    choice: ContextChoice, file: ModelFile, options: Mapping[str, Any], embedding: bool
) -> ContextChoice:
    """Return what is made where this was asked for; `options` are the other arguments of `Llama`.

    Raises:
        ValueError: the cache does not fit the context or the memory, or needs flash attention.
    """
    place = _place(choice, file, options)
    if not choice.chosen and (place is None or not place.shape.layers):
        choice = replace(choice, setting=parse_kv("f16"))  # no layer keeps rows, or it is not known
    choice = replace(choice, flash_attn=_choose_flash_attn(choice.setting, choice.flash_attn))
    if choice.n_ctx == "fit":
        choice = _fitted(choice, file, place, options)
    n_ctx = choice.n_ctx or int(file.get("context_length", 0))
    assert n_ctx != "fit"
    choice = _resolved(choice, file, place, n_ctx)
    if place is not None and choice.n_windows:
        n_windows = place.sliding.windows(place.shape.window, n_ctx, choice.n_seq_max)
        choice = replace(choice, n_windows=n_windows)
    if place is not None and place.on_cpu and n_ctx and choice.fit is None and not choice.takes_all:
        check_room(place, choice.setting, n_ctx)
    if n_ctx:  # 0 is left to llama.cpp
        n_seq = 1 if choice.kv_unified or embedding else choice.n_seq_max
        choice.setting.check_context(padded(n_ctx // n_seq))
    return choice


def fitting_context(file: ModelFile, kv: KVSetting | None, n_seq: int = 1, n_windows: int = 0) -> Fit | None:
    """Return what n_ctx="fit" chooses on this machine now, for sequences that share a context; None where the
    system does not say how much memory is free, the model's shape is not known, or a budget is too small.

    Args:
        kv: the cache; None is the default.
        n_windows: as in `Llama`.
    """
    choice = ContextChoice(
        setting=kv or parse_kv("mixed"),
        chosen=kv is not None,
        n_ctx="fit",
        n_seq_max=n_seq,
        kv_unified=True,
        n_windows=n_windows,
        flash_attn=None,
        takes_all=False,
        shares_weights=False,
        beside=Beside(),
    )
    options: dict[str, Any] = {"swa_full": False}
    try:
        found = _fitted(choice, file, _place(choice, file, options), options).fit
    except ValueError:
        return None
    return found if found is not None and found.n_left is not None else None


def _place(choice: ContextChoice, file: ModelFile, options: Mapping[str, Any]) -> ContextPlace | None:
    """Return where the context is to fit; None where its shape is not known: llama.cpp has the last word."""
    try:
        shape = model_shape(file)
    except UnsupportedModelError:
        return None
    n_ubatch = min(options.get("n_ubatch", _N_BATCH), options.get("n_batch", _N_BATCH))
    offloads = bool(options.get("offload_kqv", True))
    return ContextPlace(
        shape=shape,
        n_seq=choice.n_seq_max,
        n_stream=1 if choice.kv_unified else choice.n_seq_max,
        sliding=Sliding(full=options["swa_full"], n_windows=choice.n_windows, n_ubatch=n_ubatch),
        on_cpu=not (options.get("n_gpu_layers") and offloads),
        offloads=offloads,
        gpus_write_all=gpu_kinds() == {"CUDA"},
        weights=(0 if choice.shares_weights else file.size) + _size_of(options.get("lora_path")),
        compute=lambda n_ctx: compute_bytes(file, n_ubatch, n_ctx),
        beside=choice.beside,
        room=memory_room(),
    )


def _fitted(
    choice: ContextChoice, file: ModelFile, place: ContextPlace | None, options: Mapping[str, Any]
) -> ContextChoice:
    """Choose the context, the cache, and layers on a GPU that nothing was said of."""
    if place is None:
        return replace(choice, n_ctx=default_n_ctx(file))
    kv = choice.setting if choice.chosen else None
    free, layers = gpu_room(), options.get("n_gpu_layers")
    if free is None or layers == 0:
        found, layers = fit(place, kv), None
    else:
        found = fit_with_gpu(place, kv, free, layers)
        layers = found.n_gpu_layers
    return replace(
        choice,
        n_ctx=found.n_ctx,
        setting=found.kv,
        fit=found,
        n_gpu_layers=layers,
        warnings=(*choice.warnings, *found.warnings),
    )


def _resolved(
    choice: ContextChoice, file: ModelFile, place: ContextPlace | None, n_ctx: int
) -> ContextChoice:
    """Settle a budget or a number of bits, and a window that is too wide for the context."""
    setting = choice.setting
    if not isinstance(setting, MixedKVConfig):
        return choice
    if place is None:
        if not setting.is_resolved:
            model_shape(file)  # says what is not known
        return choice
    if not n_ctx:
        if setting.budget:
            raise ValueError(f"kv={str(setting)!r}: the model names no context: give n_ctx with a budget")
        return choice
    resolved = place.resolved(setting, n_ctx)
    warnings = choice.warnings
    if choice.chosen and setting.is_resolved and resolved != setting:
        warnings += (
            f"kv={str(setting)!r} would take more than an F16 cache of n_ctx={n_ctx}, or not fit: it is "
            f"{str(resolved)!r} here. A larger n_ctx has room for what was asked for",
        )
    return replace(choice, setting=resolved, warnings=warnings)


def _choose_flash_attn(setting: KVSetting, flash_attn: bool | None) -> bool:
    if setting.needs_flash and flash_attn is False:
        raise ValueError(
            f"flash_attn=False does not go with kv={str(setting)!r}: this cache is read with flash "
            f"attention only. Leave flash_attn out, or use kv='f16'"
        )
    return setting.needs_flash or bool(flash_attn)


def _size_of(path: str | None) -> int:
    """Return the bytes of a file, 0 where it is not there."""
    try:
        return os.path.getsize(path) if path else 0
    except OSError:
        return 0
