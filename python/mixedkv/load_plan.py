"""Decides what a `Llama` loads, and as what, before anything is loaded: from its arguments, the header of the
file and the memory there is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mixedkv.config import KVSetting
from mixedkv.config.mixed import ggml_type
from mixedkv.context_choice import ContextChoice, choose_context, choose_setting
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import MAX_SEQUENCES, MAX_SNAPSHOTS, check_int, padded
from mixedkv.model.adapter import check_adapter
from mixedkv.model.fit import Beside, Fit
from mixedkv.model.gguf_file import ModelFile, file_stamp, n_layers, n_mtp_layers, read_model_file
from mixedkv.model.named_model import check_file, find_model, is_name
from mixedkv.native.llama_arguments import check_numbers, check_sequences
from mixedkv.prompts.content_marks import CONTENT_TOKENS, ContentTokens
from mixedkv.streaming.layer_choice import StreamLayers
from mixedkv.streaming.streaming import Mode, StreamingPlan, plan_streaming

_BATCH = 512  # n_batch and n_ubatch of llama_cpp.Llama


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadArguments:
    """The arguments of `Llama` that say what is loaded, each checked by itself. See `Llama`.

    Args:
        shares_weights: another `Llama` has the weights.
        options: the arguments of `llama_cpp.Llama`.

    Raises:
        TypeError: an argument has another type.
        ValueError: it is out of its range, or does not go with another.
    """

    kv: str | KVSetting | None = None
    n_seq_max: int = 1
    kv_unified: bool = False
    n_rs_seq: int = 0
    load_mtp: bool = False
    n_windows: int = 0
    n_ctx: int | Literal["fit"] = 512
    flash_attn: bool | None = None
    type_k: int | None = None
    type_v: int | None = None
    embedding: bool = False
    stream_layers: StreamLayers | None = None
    memory: int | str | None = None
    stream_mode: Mode = "direct"
    shares_weights: bool = False
    beside: Beside | None = None
    content_tokens: ContentTokens = "text"
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_numbers({**self.options, "n_ctx": 0 if self.n_ctx == "fit" else self.n_ctx})
        choose_setting(self.kv, self.type_k, self.type_v, self.embedding)
        check_sequences(self.n_seq_max, self.options.get("n_batch", _BATCH))
        check_int("n_rs_seq", self.n_rs_seq, 0, MAX_SNAPSHOTS)
        check_int("n_windows", self.n_windows, 0, MAX_SEQUENCES)
        if self.content_tokens not in CONTENT_TOKENS:
            raise ValueError(
                f"content_tokens={self.content_tokens!r}: use one of {', '.join(CONTENT_TOKENS)}"
            )

    def choice(self, setting: KVSetting) -> ContextChoice:
        """Return the cache and the context as they were asked for."""
        return ContextChoice(
            setting=setting,
            chosen=self.kv is not None or self.type_k is not None or self.type_v is not None,
            n_ctx=self.n_ctx,
            n_seq_max=int(self.n_seq_max),
            kv_unified=bool(self.kv_unified),
            n_windows=int(self.n_windows),
            flash_attn=self.flash_attn,
            takes_all=bool(
                self.embedding
                or self.options.get("vocab_only")
                or self.stream_layers is not None
                or self.memory is not None
            ),
            shares_weights=self.shares_weights,
            beside=self.beside or Beside(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """A plan of what a `Llama` loads. Making one reads the header of the file and the memory there is; it
    changes nothing.

    Attributes:
        path, file: the model's file, and its header.
        stamp: what tells it from another file that takes its name later.
        setting: of the cache.
        n_ctx: tokens of the context as they were asked for, 0: what the model was trained with.
        n_seq_max, kv_unified, n_rs_seq, n_windows, load_mtp, content_tokens: as in `Llama`.
        fit: the choice that n_ctx="fit" made.
        streaming: which layers are streamed, and how; None: none.
        base: arguments of `llama_cpp.Llama`, but for the path.
        again: arguments of `Llama` that make the same plan, besides those of `base`.
        warnings: what the user should know.
    """

    path: str
    file: ModelFile
    stamp: Any
    setting: KVSetting
    n_ctx: int
    n_seq_max: int
    kv_unified: bool
    n_rs_seq: int
    n_windows: int
    load_mtp: bool
    content_tokens: ContentTokens
    fit: Fit | None
    streaming: StreamingPlan | None
    base: Mapping[str, Any]
    again: Mapping[str, Any]
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, requested: LoadArguments, path: str) -> LoadPlan:
        """Plan what is loaded of a file.

        Raises:
            InvalidModelFileError: the file is not a GGUF model llama.cpp can load.
            UnsupportedModelError: the model cannot have this cache, or its layers cannot be streamed.
            ValueError: a setting does not fit the model, the context or the memory.
        """
        file, stamp = read_model_file(path), file_stamp(path)
        options = _options(requested, file)
        setting = choose_setting(requested.kv, requested.type_k, requested.type_v, requested.embedding)
        choice = choose_context(requested.choice(setting), file, options, requested.embedding)
        if choice.n_gpu_layers is not None:
            options["n_gpu_layers"] = choice.n_gpu_layers
        if requested.load_mtp and not n_mtp_layers(file):
            raise UnsupportedModelError(f"load_mtp: {file.path} has no MTP layers")
        choice.setting.check_layers(n_layers(file))
        n_ctx = int(choice.n_ctx)
        context = {**options, "n_ctx": n_ctx, "n_seq_max": choice.n_seq_max}
        streaming = plan_streaming(
            file, choice.setting, requested.stream_layers, requested.memory, requested.stream_mode, context
        )
        if streaming is not None and streaming.n_batch:
            options |= {"n_batch": streaming.n_batch, "n_ubatch": streaming.n_batch}
        if lora_path := options.get("lora_path"):
            check_adapter(lora_path)
        return cls(
            path=path,
            file=file,
            stamp=stamp,
            setting=choice.setting,
            n_ctx=n_ctx,
            n_seq_max=choice.n_seq_max,
            kv_unified=choice.kv_unified,
            n_rs_seq=int(requested.n_rs_seq),
            n_windows=choice.n_windows,
            load_mtp=bool(requested.load_mtp),
            content_tokens=requested.content_tokens,
            fit=choice.fit,
            streaming=streaming,
            base=_base_arguments(choice, file, options, requested.embedding),
            again={name: getattr(requested, name) for name in ("stream_layers", "memory", "stream_mode")},
            warnings=choice.warnings,
        )


def find_path(given: str | os.PathLike[str]) -> str:
    """Return the path of a model, which may be given by its name. One of that name is downloaded if it is not
    there yet.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = os.fsdecode(given)
    if is_name(path):
        path = str(find_model(path))
    check_file(path)
    return path


def _options(requested: LoadArguments, file: ModelFile) -> dict[str, Any]:
    options = {"verbose": False, **requested.options, "swa_full": bool(requested.options.get("swa_full"))}
    if file.get("attention.causal", True) is False:  # llama.cpp ends the process where a batch is cut
        options["n_batch"] = min(options.get("n_batch", _BATCH), options.get("n_ubatch", _BATCH))
    return options


def _base_arguments(
    choice: ContextChoice, file: ModelFile, options: Mapping[str, Any], embedding: bool
) -> dict[str, Any]:
    n_streams = 1 if choice.kv_unified or embedding else choice.n_seq_max
    n_ctx = int(choice.n_ctx)
    arguments = {
        **options,
        "n_ctx": _cells(n_ctx, n_streams),
        "flash_attn": bool(choice.flash_attn),
        "type_k": ggml_type(choice.setting.type_k),
        "type_v": ggml_type(choice.setting.type_v),
        "embedding": embedding,
    }
    if "n_batch" in arguments:  # llama_cpp has room for logits of as many tokens
        most = _cells(n_ctx or int(file.get("context_length", 0)), n_streams)
        arguments["n_batch"] = min(arguments["n_batch"], most or arguments["n_batch"])
    return arguments


def _cells(n_ctx: int, n_streams: int) -> int:
    """Return the context that llama.cpp makes of `n_ctx`: llama_cpp has room for as many tokens as it is
    told, and its `n_ctx()` says how many llama.cpp has.
    """
    return padded(padded(n_ctx) // n_streams) * n_streams
