"""A model of which only a part stays in memory: what is read, how, and how fast."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import llama_cpp

from mixedkv import _core
from mixedkv.config import KVSetting
from mixedkv.errors import UnsupportedModelError
from mixedkv.model.fit import compute_bytes
from mixedkv.model.footprint import Sliding, footprint, model_shape
from mixedkv.model.gguf_file import ModelFile, n_layers
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.memory import memory_room, own_memory
from mixedkv.sizes import size_of
from mixedkv.streaming.layer_choice import RING_LAYERS, LayerSizes, StreamLayers, choose_layers, no_room

Mode = Literal["direct", "prefetch", "mmap", "resident"]

_THREADS, _CHUNK = 4, 4 << 20
_SLACK = 64 << 20  # vocabulary, graph, Python's own objects
_BATCHES = (2048, 1024, 512)  # tokens of a micro-batch, the largest that takes a tenth of the room


@dataclass(frozen=True, slots=True)
class StreamingStats:
    """Memory and work of streaming; counts are since the model was loaded.

    Attributes:
        mode: how layers are read. "direct" with `o_direct` False: through the page cache, since the file
            system has no O_DIRECT.
        layers: that are streamed, ascending.
        bytes_pass: of these layers, which each pass over the model reads.
        bytes_ring: memory they pass through.
        bytes_resident: weights that stay; of a model with routed experts in mode "mmap" all others.
        bytes_locked: of ring and weights, that cannot be swapped out.
        bytes_read: ahead of passes too; with "prefetch" what was asked for.
        rate: bytes a second while reading.
        n_passes: over the streamed layers, each from the first to the last in `seconds`.
        n_stalls: layers that were not there when a pass came to them.
        share_waiting: of `seconds`.
    """

    mode: Mode
    o_direct: bool
    layers: tuple[int, ...]
    n_layer: int
    bytes_pass: int
    bytes_ring: int
    bytes_resident: int
    bytes_locked: int
    bytes_read: int
    rate: float
    n_passes: int
    seconds: float
    n_stalls: int
    seconds_waiting: float
    share_waiting: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingPlan:
    """A choice of the layers of a model that are streamed, and how.

    Attributes:
        mode: how layers are read.
        layers: those that are streamed; none where all stay.
        pattern: of the names of their weights.
        kept: bytes that stay of a model whose routed experts are mapped.
        n_batch: tokens of a batch and of a micro-batch; 0: as the user or llama_cpp has it.
    """

    file: ModelFile
    mode: Mode
    layers: tuple[int, ...] = ()
    pattern: str = ""
    kept: int = 0
    n_batch: int = 0


class Streaming:
    """The layers of one `Llama` that are streamed; `stats()` says how that goes."""

    def __init__(self, plan: StreamingPlan) -> None:
        self.mode, self.layers = plan.mode, plan.layers
        self._file, self._kept = plan.file, plan.kept
        self._n_locked = 0
        self._stream: _core.Stream | None = None
        self._overrides: Any = None
        if plan.layers:
            self._stream = _core.Stream(plan.mode == "prefetch", RING_LAYERS, _THREADS, _CHUNK)
            override = _llama_cpp.TensorBufferOverride(plan.pattern.encode(), self._stream.buffer_type())
            self._overrides = (_llama_cpp.TensorBufferOverride * 2)(override)  # an empty one ends it
        elif plan.kept:
            self._stream = _core.Stream(False, RING_LAYERS, _THREADS, _CHUNK)  # which locks them

    def prepare(self, params: Any) -> None:
        """Fill in llama_model_params. Weights that stay are read into memory, past the page cache: pages of a
        mapped file could go. Nothing is repacked: what is streamed cannot be, and a token must not depend on
        which layers are."""
        mapped = self.mode == "mmap"
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if mapped else llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO
        params.use_extra_bufts = False
        if self._overrides is not None:
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)

    def lock(self, llm: llama_cpp.Llama) -> Iterator[str]:
        """Keep in memory what should stay there, and yield what is not as it should be."""
        if self._stream is None:
            return
        if self.mode == "direct" and not self._stream.stats()["o_direct"]:
            yield (
                f"{self._file.path} cannot be read past the page cache (O_DIRECT): layers are read through "
                f"it, which is slower"
            )
        self._n_locked, n_bytes, problem = self._stream.lock(_llama_cpp.address(_llama_cpp.model(llm)))
        if problem:
            yield (
                f"{self._n_locked} of {n_bytes} bytes of weights are locked in memory ({problem}): "
                f"where there is swap, others may go there. Raise the limit with ulimit -l"
            )

    def check(self) -> None:
        """Raise what ended an evaluation.

        Raises:
            ModelReadError: the file could not be read; names it.
            KeyboardInterrupt: Ctrl-C, or what its handler raises.
        """
        if self._stream is not None:
            self._stream.check()

    @property
    def layer(self) -> tuple[int, int] | None:
        """The streamed layer that the pass is at, from 1, and how many there are; for another thread to
        show.
        """
        n = len(self.layers)
        return ((self._stream.stats()["n_holds"] - 1) % n + 1, n) if self._stream and n else None

    def stats(self) -> StreamingStats:
        read: Mapping[str, Any] = self._stream.stats() if self._stream else {}
        reading, seconds = read.get("seconds_reading", 0.0), read.get("seconds", 0.0)
        n_pass = read.get("bytes_streamed", 0)
        total = sum(tensor.n_bytes for tensor in self._file.tensors)
        return StreamingStats(
            mode=self.mode,
            o_direct=bool(read.get("o_direct", False)),
            layers=self.layers,
            n_layer=n_layers(self._file),
            bytes_pass=n_pass,
            bytes_ring=read.get("bytes_ring", 0),
            bytes_resident=self._kept if self.mode == "mmap" else total - n_pass,
            bytes_locked=self._n_locked,
            bytes_read=read.get("bytes_read", 0),
            rate=read.get("bytes_read", 0) / reading if reading else 0.0,
            n_passes=read.get("n_passes", 0),
            seconds=seconds,
            n_stalls=read.get("n_stalls", 0),
            seconds_waiting=read.get("seconds_waiting", 0.0),
            share_waiting=read.get("seconds_waiting", 0.0) / seconds if seconds else 0.0,
        )


def plan_streaming(
    file: ModelFile,
    setting: KVSetting,
    requested: StreamLayers | None,
    memory: int | str | None,
    mode: Mode,
    context: Mapping[str, Any],
) -> StreamingPlan | None:
    """Plan the streaming that a `Llama` was asked for, None if nothing; `context`: its other arguments.

    Raises:
        ValueError: what was asked does not fit, or does not go together.
        UnsupportedModelError: the model's layers cannot be streamed.
    """
    if requested is None and memory is None and mode == "direct":
        return None
    if mode not in get_args(Mode):
        raise ValueError(f"stream_mode={mode!r}: use one of {', '.join(get_args(Mode))}")
    if context.get("n_gpu_layers"):
        raise ValueError("streamed layers are evaluated by the CPU: leave n_gpu_layers or stream_layers out")
    if context.get("vocab_only"):
        raise ValueError("vocab_only loads no layers: leave stream_layers and memory out")
    if mode in ("mmap", "resident"):
        return StreamingPlan(file=file, mode=mode)
    sizes = LayerSizes.of(file, "ffn_" if requested == "ffn" else "")
    room = _room(memory)
    n_ctx = context["n_ctx"] or int(file.get("context_length", 0))
    given = "n_batch" in context or "n_ubatch" in context
    n_batch = 0 if given else _batch_within(file, room, n_ctx)
    n_ubatch = n_batch or min(context.get("n_ubatch", 512), context.get("n_batch", 512))
    sliding = Sliding(full=bool(context.get("swa_full")), n_ubatch=n_ubatch)
    taken = context_bytes(file, setting, n_ctx, context["n_seq_max"], sliding) + _SLACK
    if sizes.routed:
        plan = _beside_experts(file, sizes, requested, room - taken)
    else:
        layers = choose_layers(sizes, "auto" if requested is None else requested, room - taken)
        pattern = sizes.pattern(layers) if layers else ""
        mode = mode if layers else "resident"
        plan = StreamingPlan(file=file, mode=mode, layers=tuple(layers), pattern=pattern)
    return replace(plan, n_batch=n_batch)


def _batch_within(file: ModelFile, room: int, n_ctx: int) -> int:
    """Return the largest step that computes in a tenth of the room: the more tokens, the fewer reads."""
    n = next((n for n in _BATCHES if 10 * compute_bytes(file, n, n_ctx) <= room), _BATCHES[-1])
    return min(n, n_ctx or n)


def _beside_experts(
    file: ModelFile, sizes: LayerSizes, requested: StreamLayers | None, room: int
) -> StreamingPlan:
    """Plan the streaming of a model with routed experts: what a token always needs stays; experts are mapped,
    and read as they are chosen, unless all fit.
    """
    if requested not in (None, "auto"):
        raise UnsupportedModelError(
            f"stream_layers={requested!r}: {file.path} has routed experts. A token needs few of them, but a "
            f"streamed layer is read whole. Use 'auto', which reads only the experts that are chosen"
        )
    kept = sizes.rest + sum(sizes.layers)
    if kept + sizes.routed <= room:
        return StreamingPlan(file=file, mode="resident")
    if kept > room:
        raise ValueError(no_room("the weights that all tokens need", kept, room))
    return StreamingPlan(file=file, mode="mmap", kept=kept)


def _room(memory: int | str | None) -> int:
    left = memory_room()
    if memory is not None:
        limit = size_of("memory", memory) - own_memory()
        return limit if left is None else min(limit, left)
    if left is None:
        raise ValueError("memory is missing: this system does not say what is left, give e.g. memory='6GiB'")
    return left


def memory_beside(memory: int | str | None, n_bytes: int) -> int:
    """Return the `memory` of a `Llama` that leaves `n_bytes` of its process's memory to something else.

    Raises:
        ValueError: as `plan_streaming`.
    """
    return max(0, own_memory() + _room(memory) - n_bytes)


def context_bytes(file: ModelFile, setting: KVSetting, n_ctx: int, n_seq: int, sliding: Sliding) -> int:
    """Estimate the memory of a context: its cache and its compute buffers.

    Raises:
        UnsupportedModelError: the size of the model's cache is not known.
    """
    try:
        cache = footprint(model_shape(file), setting, n_ctx, n_seq, sliding).bytes
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"memory for its KV cache is not known: {error}") from None
    return cache + compute_bytes(file, sliding.n_ubatch, n_ctx)
