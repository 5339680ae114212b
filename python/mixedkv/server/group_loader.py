"""Loads and unloads a model with its adapters. Their stores stay open, so that their KV is kept."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp

from mixedkv.config import parse_kv
from mixedkv.engine.chat import tokenizer
from mixedkv.engine.chat.chat_template import ChatRenderer
from mixedkv.engine.connect.chunk_connector import ChunkConnector
from mixedkv.engine.connect.store_connector import StoreConnector
from mixedkv.engine.embed.embedder import Embedder
from mixedkv.engine.embed.embedding_context import EmbeddingContext, only_embeds, ranks
from mixedkv.engine.engine import Engine
from mixedkv.engine.sample.sampling_defaults import sampling_defaults
from mixedkv.engine.schedule.checkpoints import CheckpointLimits
from mixedkv.engine.schedule.request import SpeculationMode
from mixedkv.engine.turns import Turns
from mixedkv.errors import ClosedError, ModelChangedError
from mixedkv.model.fingerprint import model_parts
from mixedkv.model.gguf_file import ModelFile, default_n_ctx, n_mtp_layers, read_model_file, weight_type
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.server.model_loading import load_draft_model, load_model, open_projector
from mixedkv.server.model_watch import ModelWatch
from mixedkv.server.models import ServedModel
from mixedkv.server.residence import Check, ModelLoadError
from mixedkv.server.session_kv import ModelKV
from mixedkv.server.settings import ServerSettings
from mixedkv.server.state import ModelInMemory, ServerState
from mixedkv.store import KVStore

log = logging.getLogger("mixedkv.server")


@dataclass
class Served:
    """A model or an adapter of a group, with the state that outlives its unloading."""

    model: ServedModel
    state: ServerState
    kv: ModelKV
    store: KVStore | None


@dataclass(eq=False)
class GroupLoader:
    """A `Loadable`: a model and its adapters.

    Args:
        members: the model, then its adapters.
        first: whether it is the server's default model, which has the draft model.
        file: the model's header for the first load, if it was just read.
        on_change: called on any thread when a model's file is changed, after the engine has stopped.

    Attributes:
        warm: evaluates the prompts to be warm, after each load.
    """

    members: list[Served]
    first: bool
    turns: Turns
    on_change: Callable[[], None] = lambda: None
    file: ModelFile | None = None
    warm: list[Callable[[Check], None]] = field(default_factory=list)
    _stack: ExitStack | None = None

    def load(self, check: Check) -> None:
        """Load the model and its adapters, and evaluate the prompts to be warm.

        Raises:
            ModelLoadError: a model that is loaded on demand cannot be loaded; the message has no folders,
                since clients read it.
            ValueError, OSError: the same for a model that is loaded at the start.
        """
        if not self._settings.on_demand:
            self._open(check)
            return
        try:
            self._open(check)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            raise ModelLoadError(self._reason(error)) from error
        for warm in self.warm:
            try:
                warm(check)
            except Exception as error:
                log.warning("a prompt of the model %s is not warm: %s", self.members[0].model.name, error)
        gc.freeze()  # as at the start, to spare streams the garbage collection of these objects

    def unload(self) -> None:
        """Store the KV that is still to be stored, and free the model and its adapters."""
        stack, self._stack = self._stack, None
        if stack is None:
            return
        for each in self.members:
            each.state.loaded = None
        stack.close()
        if self._settings.on_demand:
            gc.unfreeze()
            gc.collect()
            gc.freeze()

    async def finish(self) -> None:
        """Wait for a slice of embedding work whose request was cancelled."""
        for each in self.members:
            if each.state.embedder is not None:
                await each.state.embedder.drain(0)

    @property
    def broken(self) -> bool:
        """True if an engine has stopped."""
        return any(each.state.loaded is None or not each.state.engine.alive for each in self.members)

    @property
    def _settings(self) -> ServerSettings:
        return self.members[0].state.settings

    def _reason(self, error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"a file of it is not there: {Path(str(error.filename or error)).name}"
        text = (error.strerror or "") if isinstance(error, OSError) else ""
        text = text or str(error) or type(error).__name__
        files = [path for each in self.members for path in (each.model.path, each.model.adapter) if path]
        for path in [*files, *(each.model.mmproj for each in self.members if each.model.mmproj)]:
            text = text.replace(str(path), Path(path).name)
        return text

    def _open(self, check: Check) -> None:
        model = self.members[0].model
        file, self.file = self.file or read_model_file(model.path), None
        if only_embeds(file) == self.members[0].state.generates:
            raise ValueError(f"{model.path} is a model of another kind than before: restart the server")
        with ExitStack() as stack:
            parent: ModelInMemory | None = None
            opened: list[ModelInMemory] = []
            for each in self.members:
                check()
                opened.append(self._open_one(each, file, parent, stack, check))
                parent = opened[0]
            for each, loaded in zip(self.members, opened, strict=True):
                _tell(each.state, file, loaded)
            self._stack = stack.pop_all()

    def _open_one(
        self, each: Served, file: ModelFile, parent: ModelInMemory | None, stack: ExitStack, check: Check
    ) -> ModelInMemory:
        settings, state, model = self._settings, each.state, each.model
        drafts = settings.draft_model and self.first and parent is None
        files = [model.path, Path(settings.draft_model)] if drafts else [model.path]
        watch = stack.enter_context(ModelWatch(part.path for path in files for part in model_parts(path)))
        # the default model must have such layers; other models use them if they have them
        is_first = self.first and parent is None
        mtp = settings.speculation == "mtp" and (is_first or n_mtp_layers(file) > 0)
        weights = parent.engine.llm if parent is not None else None
        llm = stack.enter_context(load_model(settings, model, file, state.generates, weights, mtp, check))
        draft_model = stack.enter_context(load_draft_model(settings, llm)) if drafts else None
        connector = _connector(settings, each.store)
        engine = stack.enter_context(
            Engine(
                llm,
                parallel=settings.parallel,
                max_queue=settings.max_queue,
                slowdown=settings.slowdown,
                exact_only=settings.reuse != "prefix",
                connector=connector,
                observer=state.metrics,
                deliver=state.delivery,
                tokenizer=tokenizer.Tokenizer(
                    llm, settings.chat_format, read_chat_template(settings.chat_template)
                ),
                limits=state.keys.limits,
                checkpoints=CheckpointLimits(
                    settings.checkpoints, settings.checkpoint_every, int(settings.max_checkpoint_gb * 1e9)
                ),
                speculation=speculation_of(settings, drafts=draft_model is not None or mtp),
                draft_model=draft_model,
                turns=self.turns,
            )
        )
        watch.begin(partial(self._stop_reading, engine))
        each.kv.attach(engine, connector)
        stack.callback(each.kv.detach)
        embedder = _open_embedder(state, engine, file) if parent is None else None
        projector = parent.projector if parent is not None else open_projector(settings, model, llm)
        return ModelInMemory(engine=engine, embedder=embedder, projector=projector)

    def _stop_reading(self, engine: Engine) -> None:
        """Stop the engine, so that the program which waits for the model's file can write it."""
        error = ModelChangedError(
            "the model's file was changed, or opened to be: restart the server, and replace a model by "
            "renaming another file over it"
        )
        log.error("no more requests are taken: %s", error)
        engine.drain(0, error)
        with suppress(ClosedError):  # wait for embedding work under way
            engine.call(lambda: None).result()
        self.on_change()


def speculation_of(settings: ServerSettings, drafts: bool) -> SpeculationMode:
    """Return the speculation mode of a model's answers. `drafts`: it has MTP layers or the draft model, which
    only the default model has.
    """
    if settings.speculation in ("draft-model", "mtp") and not drafts:
        return "prompt-lookup"
    return settings.speculation or ("draft-model" if drafts else "off")


def read_chat_template(path: str) -> str:
    """Read a chat template from its file.

    Raises:
        ValueError: the file cannot be read.
    """
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template={path}: {error}: give a file, or with chat_format the name of a format"
        ) from None


def check_files(model: ServedModel) -> None:
    """Check that the files of a model that is loaded later exist.

    Raises:
        FileNotFoundError: a file is missing.
    """
    for option, path in (("lora", model.adapter), ("mmproj", model.mmproj)):
        if path and not Path(path).is_file():
            raise FileNotFoundError(f"{option}={model.name}={path}: there is no such file")


def describe(state: ServerState, model: ServedModel, file: ModelFile) -> None:
    """Describe a model that is not loaded, as far as its file tells. `load` completes the description."""
    settings = state.settings
    template = "" if settings.chat_format else read_chat_template(settings.chat_template)
    template = template or str(file.metadata.get("tokenizer.chat_template", ""))
    state.chat_template = template
    renderer = ChatRenderer(template, "", "")
    embeds = not model.parent and (settings.embeddings or only_embeds(file))
    n_ctx = model.n_ctx or default_n_ctx(file)
    state.kv = str(parse_kv(settings.kv if state.generates else "f16"))
    state.capabilities = _capabilities(
        generates=state.generates,
        tools=state.generates and bool(template or settings.chat_format),
        thinks=state.generates and renderer.thinks,
        infills=any(f"tokenizer.ggml.{name}_token_id" in file.metadata for name in ("fim_pre", "prefix")),
        sees=bool(model.mmproj),
        embeds=embeds and not ranks(file),
    )
    state.sampling = {**sampling_defaults(file.metadata), **settings.sampling()}
    state.facts = {
        "architecture": file.architecture,
        "n_params": sum(_n_elements(tensor.shape) for tensor in file.tensors),
        "quantization": weight_type(file),
        "size_bytes": file.size,
        "n_ctx": n_ctx if state.generates else None,
        "n_embd": file.get("embedding_length") if embeds and not ranks(file) else None,
        "embedding_n_ctx": None,
    }


def _tell(state: ServerState, file: ModelFile, loaded: ModelInMemory) -> None:
    """Describe a loaded model."""
    engine, embedder = loaded.engine, loaded.embedder
    words = engine.tokenizer
    state.loaded = loaded
    state.kv = str(engine.llm.kv.config)
    state.chat_template = words.chat_template
    state.capabilities = _capabilities(
        generates=state.generates,
        tools=state.generates and words.takes_tools,
        thinks=state.generates and words.thinks,
        infills=state.generates and words.infills,
        sees=loaded.projector is not None,
        embeds=embedder is not None and not embedder.context.ranks,
    )
    state.sampling = {**sampling_defaults(file.metadata), **state.settings.sampling()}
    state.facts = {
        "architecture": file.architecture,
        "n_params": int(llama_cpp.llama_model_n_params(_llama_cpp.model(engine.llm))),
        "quantization": weight_type(file),
        "size_bytes": file.size,
        "n_ctx": engine.n_ctx if state.generates else None,
        "n_embd": embedder.context.n_embd if embedder and not embedder.context.ranks else None,
        "embedding_n_ctx": embedder.context.n_ctx if embedder is not None else None,
    }


def _capabilities(
    *, generates: bool, tools: bool, thinks: bool, infills: bool, sees: bool, embeds: bool
) -> list[str]:
    """Return a model's capabilities in Ollama's terms."""
    can = {
        "completion": generates,
        "tools": generates and tools,
        "thinking": generates and thinks,
        "insert": generates and infills,
        "vision": generates and sees,
        "embedding": embeds,
    }
    return [name for name, is_so in can.items() if is_so]


def _n_elements(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _open_embedder(state: ServerState, engine: Engine, file: ModelFile) -> Embedder | None:
    settings = state.settings
    if not settings.embeddings and not only_embeds(file):
        return None
    context = EmbeddingContext(
        engine.llm, file, n_ctx=settings.embedding_n_ctx, n_batch=settings.n_batch or 512
    )
    max_requests = settings.max_queue + settings.parallel
    return Embedder(
        engine, context, max_requests=max_requests, slowdown=settings.slowdown, limits=state.keys.limits
    )


def _connector(settings: ServerSettings, store: KVStore | None) -> StoreConnector | None:
    if store is None:
        return None
    if settings.reuse != "chunks":
        return StoreConnector(store, closes=False)
    options: dict[str, Any] = {
        "repair": settings.chunk_repair or None,
        "ratio": settings.chunk_ratio or None,
        "overlap_k": settings.chunk_overlap or None,
        "chunk_size": settings.chunk_size,
        "boundary_window": min(settings.chunk_boundary, settings.chunk_size // 2),
        "max_kld": settings.chunk_max_kld,
        "check": settings.chunk_check,
    }
    return ChunkConnector(store, closes=False, **options)
