"""Loads the model of a server as its settings say, and opens its engine and one for each adapter on it.

Notices when the model's file is changed in place: it is mapped, so a file that is cut short would end the
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import llama_cpp

from mixedkv import system
from mixedkv.config import KVSetting, MixedKVConfig, parse_kv
from mixedkv.engine import ChunkConnector, Embedder, Engine, StoreConnector, Tokenizer
from mixedkv.errors import ClosedError, ModelChangedError
from mixedkv.images.projector import Projector
from mixedkv.kv.stats import format_saving
from mixedkv.limits import CELLS
from mixedkv.llama import Llama
from mixedkv.model.embedding_model import only_embeds
from mixedkv.model.encoder import encoder_bytes
from mixedkv.model.fingerprint import model_parts
from mixedkv.model.fit import Beside
from mixedkv.model.footprint import Sliding
from mixedkv.model.gguf_file import ModelFile, default_n_ctx, n_mtp_layers, read_model_file
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prefix.checkpoints import CheckpointLimits
from mixedkv.sizes import GB, format_bytes
from mixedkv.store import KVStore
from mixedkv.streaming.layer_choice import parse_layers
from mixedkv.streaming.streaming import context_bytes, memory_beside
from mixedkv.terminal import LoadingBar
from mixedkv_server.models import ServedModel, capabilities, chat_format
from mixedkv_server.settings import ServerSettings, parse_reuse
from mixedkv_server.state import ServerState

_SECONDS = 0.2  # seconds between two looks


def ignore_signal() -> None:
    """Ignore SIGIO, by which the kernel says that a program waits for a file on which we have a lease: leases
    are polled instead. Call it on the main thread; files can then be watched from any thread.
    """
    if system.HAS_LEASES and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGIO, signal.SIG_IGN)


class ModelWatch:
    """Holds a lease on each file: a program that opens one for writing has to wait until the model is no
    longer read, for at most 45 seconds (/proc/sys/fs/lease-break-time). Renaming another file over it changes
    nothing. If there are no leases, size and time of change are polled. That is so on systems other than
    Linux, on some file systems, with another user's file, with a file that is open for writing already, and
    off the main thread before `ignore_signal`. See
    https://man7.org/linux/man-pages/man2/F_GETLEASE.2const.html.

    Use it as a context manager, from before the files are loaded until they are not needed any more.
    """

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._paths = [Path(path) for path in paths]
        self._files: list[int] = []
        self._leased: list[int] = []
        self._before: list[tuple[int, int]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ModelWatch:
        # off the main thread the signal cannot be ignored, and would end the process
        ignore_signal()
        can_lease = system.HAS_LEASES and signal.getsignal(signal.SIGIO) is signal.SIG_IGN
        for path in self._paths:
            file = os.open(path, os.O_RDONLY)
            self._files.append(file)
            if not can_lease:
                continue
            try:
                system.take_lease(file)
                self._leased.append(file)
            except OSError as error:
                log.info("no lease on a model's file (%s): it is looked at instead", error.strerror)
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._release()

    def begin(self, stop: Callable[[], None]) -> None:
        """Call `stop` once, on a thread, when a file changes or is about to. Nothing may read the file after
        that.
        """
        self._thread = threading.Thread(target=self._watch, args=(stop,), name="mixedkv-model", daemon=True)
        self._thread.start()

    def _watch(self, stop: Callable[[], None]) -> None:
        while not self._ended.wait(_SECONDS):
            if self._changes():
                try:
                    stop()
                finally:
                    self._give_way()
                return

    def _changes(self) -> bool:
        return any(map(system.lease_is_broken, self._leased)) or self._now() != self._before

    def _now(self) -> list[tuple[int, int]]:
        """Return the size and time of change of each file."""
        return [(info.st_size, info.st_mtime_ns) for info in map(os.fstat, self._files)]

    def _give_way(self) -> None:
        for file in self._leased:
            with contextlib.suppress(OSError):
                system.end_lease(file)
        self._leased.clear()

    def _release(self) -> None:
        self._give_way()
        for file in self._files:
            os.close(file)
        self._files.clear()


log = logging.getLogger("mixedkv.server")


def open_engines(
    states: Sequence[ServerState], models: Sequence[ServedModel], file: ModelFile, stack: ExitStack
) -> None:
    """Load a model and its adapters, which share its weights. Closing the stack stores what is still to be
    stored and frees them.
    """
    beside = _beside(states[0].settings, models, file)
    for state, model in zip(states, models, strict=True):
        _open(state, model, file, states[0] if model.parent else None, stack, beside)
        _describe(state)


def _open(
    state: ServerState,
    model: ServedModel,
    file: ModelFile,
    parent: ServerState | None,
    stack: ExitStack,
    beside: Beside,
) -> None:
    settings = state.settings
    drafts = settings.draft_model and parent is None
    files = [model.path, Path(settings.draft_model)] if drafts else [model.path]
    watch = stack.enter_context(ModelWatch(part.path for path in files for part in model_parts(path)))
    mtp = settings.speculation == "mtp"
    if mtp and not n_mtp_layers(file):
        raise ValueError(f"speculation='mtp': {model.name} has no MTP layers")
    weights = parent.engine.llm if parent is not None else None
    llm = stack.enter_context(load_model(settings, model, file, state.generates, weights, mtp, beside))
    if llm.fitted is not None:
        print(f"mixedkv fits {model.name}: {llm.fitted}", file=sys.stderr, flush=True)
    draft_model = stack.enter_context(load_draft_model(settings, llm)) if drafts else None
    state.connector = _connector(settings, state.store)
    engine = stack.enter_context(
        Engine(
            llm,
            parallel=settings.parallel,
            max_queue=settings.max_queue,
            exact_only=settings.reuse != "prefix",
            connector=state.connector,
            observer=state.metrics,
            deliver=state.delivery,
            tokenizer=Tokenizer(llm, *chat_format(settings.chat_format)),
            limits=state.keys.limits,
            checkpoints=CheckpointLimits(max_bytes=_checkpoint_bytes(llm)),
            speculation=speculation_of(settings, drafts=draft_model is not None or mtp),
            draft_model=draft_model,
            turns=parent.engine.turns if parent is not None else None,
        )
    )
    watch.begin(partial(_stop_reading, engine))
    state.engine = engine
    state.session_kv.models.append(state)
    state.embedder = _open_embedder(state, engine, file) if parent is None else None
    if parent is not None:
        state.projector = parent.projector
    elif model.mmproj:
        state.projector = Projector(llm, model.mmproj, settings.threads or None, verbose=settings.verbose)


def _checkpoint_bytes(llm: Llama) -> int:
    """Return the most memory for checkpoints: a gigabyte; of what a fitted context has left, half."""
    left = llm.fitted.n_left if llm.fitted is not None else None
    return GB if left is None else min(GB, left // 2)


def _stop_reading(engine: Engine) -> None:
    """Stop the engine, so that the program which waits for the model's file can write it."""
    error = ModelChangedError(
        "the model's file was changed, or opened to be: restart the server, and replace a model by "
        "renaming another file over it"
    )
    log.error("no more requests are taken: %s", error)
    engine.drain(0, error)
    with suppress(ClosedError):  # wait for embedding work under way
        engine.call(lambda: None).result()


def speculation_of(settings: ServerSettings, drafts: bool) -> str:
    """Return the speculation mode of a model's answers. `drafts`: it has MTP layers or the draft model, which
    adapters lack.
    """
    if settings.draft_model:
        return "draft-model" if drafts else "prompt-lookup"
    if settings.speculation == "mtp" and not drafts:
        return "prompt-lookup"
    return settings.speculation or "off"


def _describe(state: ServerState) -> None:
    """Describe a loaded model."""
    engine, embedder = state.engine, state.embedder
    words = engine.tokenizer
    state.kv = str(engine.llm.kv.config)
    state.parallel = engine.parallel
    with suppress(LookupError):  # encoders and recurrent models keep no rows
        stats = engine.llm.kv.stats()
        size, saving = format_bytes(stats.bytes_total), format_saving(stats.saving)
        state.size = f"{size}: {stats.bits_per_element:.1f} bits, {saving}"
    state.chat_template = words.chat_template
    state.capabilities = capabilities(
        generates=state.generates,
        tools=state.generates and words.renders,
        thinks=state.generates and words.thinks,
        infills=state.generates and words.infills,
        sees=state.projector is not None,
        embeds=embedder is not None and not embedder.context.ranks,
    )
    state.facts |= {
        "n_params": int(llama_cpp.llama_model_n_params(_llama_cpp.model(engine.llm))),
        "n_ctx": engine.n_ctx if state.generates else None,
        "n_embd": embedder.context.n_embd if embedder and not embedder.context.ranks else None,
        "embedding_n_ctx": embedder.context.n_ctx if embedder is not None else None,
    }


def _open_embedder(state: ServerState, engine: Engine, file: ModelFile) -> Embedder | None:
    settings = state.settings
    if not settings.embeddings and not only_embeds(file):
        return None
    return Embedder.open(
        engine,
        file,
        n_ctx=settings.embedding_n_ctx,
        n_batch=settings.n_batch or 512,
        max_requests=settings.max_queue + settings.parallel,
        limits=state.keys.limits,
    )


def _connector(settings: ServerSettings, store: KVStore | None) -> StoreConnector | None:
    if store is None:
        return None
    if not settings.reuses_chunks:
        return StoreConnector(store, closes=False)
    return ChunkConnector(store, closes=False, **parse_reuse(settings.reuse)[1])


def load_model(
    settings: ServerSettings,
    model: ServedModel,
    file: ModelFile,
    generates: bool,
    weights: Llama | None,
    mtp: bool = False,
    beside: Beside | None = None,
) -> Llama:
    """Load a model or an adapter, which has the context and the cache of its model."""
    n_ctx: int | Literal["fit"] = model.n_ctx or "fit"
    kv: str | KVSetting | None = None if settings.kv == "mixed" else settings.kv
    if not model.n_ctx and weights is not None:
        n_ctx, kv = int(weights.n_ctx()), weights.kv.config
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
        needed = Embedder.context_bytes(file, n_ctx=settings.embedding_n_ctx, n_batch=settings.n_batch or 512)
        memory = memory_beside(memory, needed)
    return _load(
        settings,
        model.path,
        kv=kv if generates else "f16",  # a model that only embeds does not use this context
        n_ctx=n_ctx if generates else CELLS,
        n_seq_max=settings.n_seq,
        n_windows=settings.parallel,
        swa_full=settings.swa_full or settings.reuses_chunks or settings.overflow == "slide",
        n_rs_seq=settings.n_rs_seq,
        load_mtp=mtp,
        stream_layers=parse_layers(settings.stream_layers) if settings.stream_layers else None,
        memory=memory,
        lora_path=model.adapter or None,
        lora_scale=model.scale,
        weights=weights,
        beside=beside if weights is None else None,
    )


def _beside(settings: ServerSettings, models: Sequence[ServedModel], file: ModelFile) -> Beside:
    """Return what is loaded beside the first model's context."""
    fixed = sum(encoder_bytes(model.mmproj) for model in models if model.mmproj)
    fixed += sum(Path(model.adapter).stat().st_size for model in models if model.adapter)
    n_batch = settings.n_batch or 512
    if settings.embeddings:
        fixed += Embedder.context_bytes(file, n_ctx=settings.embedding_n_ctx, n_batch=n_batch)
    if not settings.draft_model:
        return Beside(n_contexts=len(models), n_bytes=lambda _: fixed)
    draft, kv = read_model_file(settings.draft_model), parse_kv("mixed")
    sliding = Sliding(n_ubatch=settings.n_ubatch or n_batch)

    def n_bytes(n_ctx: int) -> int:
        return fixed + draft.size + context_bytes(draft, kv, n_ctx, settings.parallel, sliding)

    return Beside(n_contexts=len(models), n_bytes=n_bytes)


def load_draft_model(settings: ServerSettings, llm: Llama) -> Llama:
    kv = "mixed" if isinstance(llm.kv.config, MixedKVConfig) else "f16"
    return _load(
        settings, Path(settings.draft_model), kv=kv, n_ctx=int(llm.n_ctx()), n_seq_max=settings.parallel
    )


def _load(settings: ServerSettings, path: Path, **options: Any) -> Llama:
    if settings.n_batch:
        options.update(n_batch=settings.n_batch, n_ubatch=settings.n_batch)
    if settings.n_ubatch:
        options["n_ubatch"] = settings.n_ubatch
    if settings.n_gpu_layers is not None:
        options["n_gpu_layers"] = settings.n_gpu_layers
    with LoadingBar() as bar:
        llm = Llama(
            path,
            **options,
            kv_unified=True,
            content_tokens=settings.content_tokens,
            n_threads=settings.threads or None,
            n_threads_batch=settings.threads_batch or settings.threads or None,
            verbose=settings.verbose,
            progress=bar,
        )
    if not settings.verbose:
        _llama_cpp.silence_log()  # Llama changes the log
    return llm
