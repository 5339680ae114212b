"""Loads models as the settings of a server say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mixedkv.config import MixedKVConfig
from mixedkv.engine.chat import tokenizer
from mixedkv.engine.embed.embedding_context import embedding_bytes
from mixedkv.images.projector import Projector
from mixedkv.limits import CELLS
from mixedkv.llama import Llama
from mixedkv.model.gguf_file import ModelFile, default_n_ctx
from mixedkv.server.models import ServedModel
from mixedkv.server.settings import ServerSettings
from mixedkv.streaming.layer_choice import parse_layers
from mixedkv.streaming.streaming import memory_beside
from mixedkv.terminal import LoadingBar


def load_model(
    settings: ServerSettings,
    model: ServedModel,
    file: ModelFile,
    generates: bool,
    weights: Llama | None,
    mtp: bool = False,
    check: Callable[[], None] | None = None,
) -> Llama:
    """Load a model or an adapter. An exception from `check` ends the loading."""
    n_ctx: int | Literal["fit"] = model.n_ctx or "fit"
    if not model.n_ctx and weights is not None:
        n_ctx = int(weights.n_ctx())
    elif not model.n_ctx and (settings.stream_layers or settings.memory):
        n_ctx = default_n_ctx(file)
    if model.adapter and settings.memory:
        raise ValueError(
            "lora: a model with an adapter streams layers of its own, so memory is not the budget of both: "
            "leave memory out, or say with stream_layers how many layers are read"
        )
    if settings.stream_layers:  # each `Llama` has a ring of its own
        weights = None
    memory: int | str | None = settings.memory or None
    if (settings.stream_layers or memory) and (settings.embeddings or not generates):
        needed = embedding_bytes(file, n_ctx=settings.embedding_n_ctx, n_batch=settings.n_batch or 512)
        memory = memory_beside(memory, needed)
    return _open(
        settings,
        model.path,
        check,
        # a model that only embeds does not use this context
        kv=(None if settings.kv == "mixed" else settings.kv) if generates else "f16",
        n_ctx=n_ctx if generates else CELLS,
        n_seq_max=settings.n_seq,
        n_windows=settings.parallel,
        swa_full=settings.swa_full or settings.reuse == "chunks" or settings.overflow == "slide",
        n_rs_seq=settings.n_rs_seq,
        load_mtp=mtp,
        stream_layers=parse_layers(settings.stream_layers) if settings.stream_layers else None,
        memory=memory,
        lora_path=model.adapter or None,
        lora_scale=model.scale,
        weights=weights,
    )


def load_draft_model(settings: ServerSettings, llm: Llama) -> Llama:
    kv = "mixed" if isinstance(llm.kv.config, MixedKVConfig) else "f16"
    return _open(
        settings, Path(settings.draft_model), None, kv=kv, n_ctx=int(llm.n_ctx()), n_seq_max=settings.parallel
    )


def _open(settings: ServerSettings, path: Path, check: Callable[[], None] | None, **options: Any) -> Llama:
    if settings.n_batch:
        options.update(n_batch=settings.n_batch, n_ubatch=settings.n_batch)
    if settings.n_ubatch:
        options["n_ubatch"] = settings.n_ubatch
    if settings.n_gpu_layers is not None:
        options["n_gpu_layers"] = settings.n_gpu_layers
    with LoadingBar() as bar:

        def progress(share: float) -> None:
            bar(share)
            if check is not None:
                check()

        llm = Llama(
            path,
            **options,
            kv_unified=True,
            n_threads=settings.threads or None,
            n_threads_batch=settings.threads_batch or settings.threads or None,
            verbose=settings.verbose,
            progress=progress,
        )
    if not settings.verbose:
        tokenizer.silence()  # Llama changes the log
    return llm


def open_projector(settings: ServerSettings, model: ServedModel, llm: Llama) -> Projector | None:
    if not model.mmproj:
        return None
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            "mmproj needs pillow, which is not installed: pip install 'mixedkv[server]'"
        ) from None
    return Projector(llm, model.mmproj, settings.threads or None, verbose=settings.verbose)
