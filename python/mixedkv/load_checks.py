"""Looks at a `Llama` as it was loaded: what would fail later is refused, what surprises is said, and a failed
load gets the reason that the base class leaves to llama.cpp's log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import llama_cpp

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.config.mixed import ggml_type, type_block
from mixedkv.errors import InvalidModelFileError, UnsupportedModelError
from mixedkv.load_plan import LoadPlan
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import ModelFile
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.llama_arguments import beyond_training
from mixedkv.sizes import format_bytes

if TYPE_CHECKING:
    from mixedkv.guarded_llama import GuardedLlama


def check_loaded(llm: GuardedLlama, plan: LoadPlan) -> None:
    """Refuse a model that would end the process, or lacks what was asked for.

    Raises:
        InvalidModelFileError: the adapter is not one of this model, or a byte has no token.
        UnsupportedModelError: tokens cannot be taken back.
    """
    if llm.lora_path and not _llama_cpp.has_adapter(llm):
        raise InvalidModelFileError(
            f"{llm.lora_path} cannot be loaded: it is no LoRA adapter for {llm.model_path}; "
            f"verbose=True shows why"
        )
    if (byte := _llama_cpp.missing_byte(llm)) is not None:
        raise InvalidModelFileError(
            f"{plan.file.path} has no token for the byte 0x{byte:02X}: llama.cpp could not read every text. "
            f"Convert the model again, with its byte tokens"
        )
    if plan.n_rs_seq and not llm.kv.can_cut and not _llama_cpp.n_rollback(llm):
        raise UnsupportedModelError(
            f"n_rs_seq={plan.n_rs_seq}: llama.cpp cannot take tokens of {plan.file.architecture} back: use 0"
        )


def surprises(llm: GuardedLlama, plan: LoadPlan) -> Iterator[str]:
    """Yield what a user may not expect of what was loaded."""
    if plan.base.get("vocab_only"):
        return
    if isinstance(plan.setting, MixedKVConfig) and (stats := llm.kv.stats()).saving < 0:
        yield (
            f"kv={str(plan.setting)!r} takes {format_bytes(stats.bytes_total)} here, more than the "
            f"{format_bytes(stats.bytes_f16)} of kv='f16'"
        )
    n_ctx = int(llm.n_ctx()) // (1 if plan.kv_unified else plan.n_seq_max)
    if text := beyond_training(n_ctx, int(plan.file.get("context_length", 0)), plan.base):
        yield text
    if plan.base.get("n_gpu_layers") and not llama_cpp.llama_supports_gpu_offload():
        yield (
            f"n_gpu_layers={plan.base['n_gpu_layers']} has no effect: this build of llama.cpp has no GPU, or "
            "finds none. Leave it out, or install with a backend for your GPU"
        )


def reason_of(error: BaseException, llm: GuardedLlama, plan: LoadPlan, assertion: str) -> BaseException:
    """Return the error that says why loading failed: `error` itself where that says it.

    Args:
        assertion: of llama.cpp that did not hold; "" if none.
    """
    file = plan.file
    if assertion:
        return InvalidModelFileError(
            f"{file.path} cannot be loaded: llama.cpp takes no such {file.architecture} model: {assertion}"
        )
    if isinstance(error, ValueError) and str(error).startswith("Failed to load model"):
        return InvalidModelFileError(
            f"{file.path} cannot be loaded: llama.cpp refuses it (architecture {file.architecture}); "
            f"verbose=True shows why"
        )
    if isinstance(error, ValueError) and str(error) == "Failed to create llama_context":
        reason, n_ctx = _core.last_error(), llm.context_params.n_ctx
        problem = _unsupported(llm, plan, n_ctx) or _block_problem(plan.setting, file)
        if problem or "not supported" in reason:
            return UnsupportedModelError(problem or reason)
        requested = f"n_ctx={n_ctx} and kv={str(plan.setting)!r}"
        return ValueError(
            f"llama.cpp could not make a context of {requested}: {reason or 'its log says why'}"
        )
    return error


def _unsupported(llm: GuardedLlama, plan: LoadPlan, n_ctx: int) -> str:
    """Return why this model cannot have this cache; "" if it can."""
    if (native := plan.setting.native()) is None:
        return ""
    types = ggml_type(plan.setting.type_k), ggml_type(plan.setting.type_v)
    n_ctx_seq = n_ctx // (1 if plan.kv_unified else plan.n_seq_max)
    try:
        _core.check(_llama_cpp.model(llm), native, *types, n_ctx_seq)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _block_problem(setting: KVSetting, file: ModelFile) -> str:
    """Return why a type's blocks do not divide a head, "" if they do; llama.cpp would only log it."""
    try:
        layers = model_shape(file).layers
    except UnsupportedModelError:
        return ""
    for layer in layers:
        for kind, size in zip(setting.types_of(layer.il), (layer.head_k, layer.head_v), strict=True):
            elements, _ = type_block(kind)
            if size % elements:
                other = "a type of blocks of 32, as q4_0" if size % 32 == 0 else "kv='f16'"
                return f"{kind} packs {elements} elements, layer {layer.il} has heads of {size}: use {other}"
    return ""
