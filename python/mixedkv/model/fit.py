"""Fits a model into the memory that is free: chooses the context and the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mixedkv import _core
from mixedkv.config import PRESETS, KVSetting, MixedKVConfig, parse_kv
from mixedkv.model.footprint import WINDOWED, ModelShape, Reads, Sliding, cache_bytes, longest
from mixedkv.model.gguf_file import ModelFile
from mixedkv.model.resolve_budget import fit_window, resolve_budget
from mixedkv.sizes import format_bytes

_ENOUGH = 32_768  # tokens that are worth fewer layers on a GPU
_USABLE = 4_096  # tokens: the default cache gets coarser rows only where it has no room for so many
_LONGER = 1.25  # and where they make the context this much longer
_LEAST = 512
_SPARE = 8  # of what is free, one part is left alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The choice for the memory that was free.

    Args:
        n_ctx: tokens of the context.
        kv: its cache.
        n_bytes: bytes of the cache.
        n_left: bytes that are still free then, None where the system does not say.
        n_ctx_train: what the model was trained with, 0 if its file does not tell.
        n_gpu_layers: layers on a GPU, -1: all.
        warnings: what the user should know of the choice, a sentence each.
    """

    n_ctx: int
    kv: KVSetting
    n_bytes: int
    n_left: int | None
    n_ctx_train: int
    n_gpu_layers: int = 0
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        limit = "the model's limit" if self.n_ctx == self.n_ctx_train else "as many as fit"
        name = next(
            (f"mixed:{name}" for name in PRESETS if parse_kv(f"mixed:{name}") == self.kv), str(self.kv)
        )
        name = "mixed" if self.kv == parse_kv("mixed") else name
        free = "" if self.n_left is None else f"; {format_bytes(self.n_left)} free"
        layers = "all" if self.n_gpu_layers < 0 else str(self.n_gpu_layers)
        gpu = f", {layers} layers on the GPU" if self.n_gpu_layers else ""
        return f"{self.n_ctx:,} tokens ({limit}), {name}, {format_bytes(self.n_bytes)}{gpu}{free}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """The rest that a process loads into the memory that a context is to fit.

    Args:
        n_contexts: contexts of this model and size, this one included: each adapter has one.
        n_bytes: bytes of all else for a context of some tokens: an image encoder, a draft model, embeddings.
    """

    n_contexts: int = 1
    n_bytes: Callable[[int], int] = lambda n_ctx: 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPlace:
    """The model, sequences and memory that a context is to fit.

    Args:
        n_seq: sequences that share it; `n_stream` equal parts have sequences of their own.
        on_cpu: the cache lies in CPU memory.
        offloads: GPUs have the cache of their layers; False with offload_kqv=False, all of it is the CPU's.
        gpus_write_all: GPUs write all cold types.
        reads: tells whether they read rows as they lie.
        weights: bytes of weights that are still to be loaded.
        compute: bytes of compute buffers for a context of some tokens.
        beside: what else is to be loaded.
        room: bytes that are free, None where the system does not say.
    """

    shape: ModelShape
    n_seq: int = 1
    n_stream: int = 1
    sliding: Sliding = WINDOWED
    on_cpu: bool = True
    offloads: bool = True
    gpus_write_all: bool = False
    reads: Reads = _core.gpus_read
    weights: int = 0
    compute: Callable[[int], int]
    beside: Beside = Beside()
    room: int | None

    def resolved(self, kv: KVSetting, n_ctx: int) -> KVSetting:
        """Return the setting for a context of `n_ctx` tokens: with types in place of a budget, or with a
        window that the context has room for.

        Raises:
            ValueError: its budget is too small.
        """
        if isinstance(kv, MixedKVConfig) and not kv.is_resolved:
            return resolve_budget(
                kv,
                self.shape,
                n_ctx,
                self.n_seq,
                n_stream=self.n_stream,
                on_cpu=self.on_cpu,
                gpus_write_all=self.gpus_write_all,
                sliding=self.sliding,
                reads=self.reads,
            )
        return fit_window(kv, self.shape, n_ctx, self.n_seq, self.n_stream, self.sliding)

    def size(self, kv: KVSetting, n_ctx: int) -> int:
        """Return the bytes of a cache, and of the view that attention takes on GPUs that do not read it as it
        lies.
        """
        return cache_bytes(
            self.shape,
            self.resolved(kv, n_ctx),
            n_ctx,
            self.n_seq,
            self.sliding,
            n_stream=self.n_stream,
            on_cpu=self.on_cpu,
            reads=self.reads,
        )

    def left(self, n_ctx: int) -> int | None:
        """Return the bytes that the cache of such a context may take."""
        if self.room is None:
            return None
        return (self.room - self.room // _SPARE - self.others(n_ctx)) // self.beside.n_contexts

    def others(self, n_ctx: int) -> int:
        """Return the bytes of all but the caches of such contexts."""
        return self.weights + self.beside.n_contexts * self.compute(n_ctx) + self.beside.n_bytes(n_ctx)

    def fits(self, kv: KVSetting, n_ctx: int) -> bool:
        left = self.left(n_ctx)
        try:
            return n_ctx <= _ENOUGH if left is None else self.size(kv, n_ctx) <= left
        except ValueError:
            return False

    @property
    def most(self) -> int:
        """Tokens of the longest context to try."""
        return self.shape.n_ctx_train or _ENOUGH

    @property
    def enough(self) -> int:
        """Tokens that are worth fewer layers on a GPU."""
        return min(_ENOUGH, self.most)

    @property
    def usable(self) -> int:
        """Tokens that are worth coarser rows."""
        return min(_USABLE, self.most)


def fit(place: ContextPlace, kv: KVSetting | None) -> Fit:
    """Return the longest context that fits, up to what the model was trained with.

    Where nothing fits beside the weights it is the smallest one, with a warning: weights are mapped, and read
    from the file again.

    Args:
        kv: the cache; None is "mixed", with coarser rows, and a warning, where it has no room for 4,096
            tokens and they give a quarter more.
    """
    chosen = kv or parse_kv("mixed")
    n_ctx = longest(place.most, partial(place.fits, chosen))
    warnings = []
    if kv is None and n_ctx < place.usable and place.on_cpu and place.room is not None:
        longer = longest(place.usable, lambda n: _squeezed(place, n) is not None)
        if longer >= _LONGER * n_ctx and (squeezed := _squeezed(place, longer)) is not None:
            warnings.append(_coarser(place, n_ctx, squeezed, longer))
            chosen, n_ctx = squeezed, longer
    if place.room is not None and place.others(_LEAST) > place.room:
        warnings.append(_too_large(place))
    n_ctx = max(n_ctx, min(_LEAST, place.most))
    n_bytes = place.size(chosen, n_ctx)
    taken = place.beside.n_contexts * n_bytes + place.others(n_ctx)
    return Fit(
        n_ctx=n_ctx,
        kv=place.resolved(chosen, n_ctx),
        n_bytes=n_bytes,
        n_left=None if place.room is None else max(0, place.room - taken),
        n_ctx_train=place.shape.n_ctx_train,
        warnings=tuple(warnings),
    )


def _coarser(place: ContextPlace, n_ctx: int, squeezed: KVSetting, longer: int) -> str:
    assert place.room is not None
    others = (
        f"or a short context with kv=mixed and n_ctx={n_ctx}" if n_ctx >= _LEAST else "or a smaller model"
    )
    return (
        f"{format_bytes(place.room)} are free: kv=mixed has room for {n_ctx:,} tokens, so rows are "
        f"coarser here, kv={squeezed}, with room for {longer:,}. Answers get worse: free memory, {others}"
    )


def _too_large(place: ContextPlace) -> str:
    assert place.room is not None
    room = format_bytes(place.room)
    return (
        f"the weights ({format_bytes(place.weights)}) and what is loaded beside them take "
        f"{format_bytes(place.others(_LEAST))}, and {room} are free: weights are read from the file again "
        f"and again. memory= (--memory {room.replace(' ', '')}) reads layer by layer, or take a smaller model"
    )


def fit_with_gpu(place: ContextPlace, kv: KVSetting | None, free: int, n_gpu_layers: int | None) -> Fit:
    """Fit a model into a machine with GPUs, of whose memory `free` bytes are free together.

    All layers go there if the context is long enough then, else as many as fit with their part of the weights
    and the cache, and with the view that attention takes of rows that GPUs do not read as they lie. Where not
    one fits, the choice is that of a machine without GPUs. A cache that stays in CPU memory is chosen as on
    such a machine, and GPUs have weights only.

    Args:
        n_gpu_layers: what was asked for; None: to be chosen.
    """
    if not place.offloads:
        found = fit(place, kv)
        if n_gpu_layers is None:
            n = _layers_that_fit(place, free, place.compute(found.n_ctx), place.weights)
            n_gpu_layers = -1 if n == place.shape.n_layer else n
        return replace(found, n_gpu_layers=n_gpu_layers)
    on_gpu = replace(place, on_cpu=False)  # types that GPUs write, and rows that they read
    if n_gpu_layers in (None, -1):
        whole = fit(replace(on_gpu, room=free), kv)
        if n_gpu_layers == -1 or (whole.n_ctx >= place.enough and place.weights < free):
            return replace(whole, n_gpu_layers=-1)
    found = fit(on_gpu, kv or parse_kv("mixed"))
    if n_gpu_layers is not None:
        return replace(found, n_gpu_layers=n_gpu_layers)
    without = place.size(replace(found.kv, attention="auto"), found.n_ctx)  # as CPUs read it
    view = found.n_bytes - without  # of one layer, whole on whichever GPU has it
    beside = place.compute(found.n_ctx) + view
    n = _layers_that_fit(place, free, beside, place.weights + without)
    return replace(found, n_gpu_layers=n) if n else fit(place, kv)


def _layers_that_fit(place: ContextPlace, free: int, beside: int, n_bytes: int) -> int:
    """Return how many layers, of which all take `n_bytes`, fit into `free` bytes with `beside` bytes more."""
    room = free - free // _SPARE - beside
    return max(0, min(place.shape.n_layer, room * place.shape.n_layer // max(1, n_bytes)))


def check_room(place: ContextPlace, kv: KVSetting, n_ctx: int) -> None:
    """Check that a cache fits into the memory that is free, whatever the weights take.

    Raises:
        ValueError: it does not; the message has the choice that fits.
    """
    if place.room is None or (taken := place.size(kv, n_ctx)) <= place.room:
        return
    choice = fit(place, kv)
    raise ValueError(
        f"n_ctx={n_ctx} and kv={str(kv)!r} take {format_bytes(taken)} for the cache, and "
        f"{format_bytes(place.room)} are free. n_ctx={choice.n_ctx} fits: {choice}"
    )


def compute_bytes(file: ModelFile, n_ubatch: int, n_ctx: int) -> int:
    """Estimate the bytes of compute buffers: F32 activations of a micro-batch, its mask, and the logits of
    some tokens.
    """
    n_ff = file.get("feed_forward_length", 0)  # of each layer, where they differ
    width, n_ff = int(file.get("embedding_length", 0)), max(n_ff) if isinstance(n_ff, list) else int(n_ff)
    n_vocab = int(file.get("vocab_size", 32768))
    return 4 * n_ubatch * (8 * width + 3 * n_ff + n_ctx) + 4 * 64 * n_vocab


def _squeezed(place: ContextPlace, n_ctx: int) -> KVSetting | None:
    """Return the best setting whose cache of `n_ctx` tokens fits, None if none does."""
    left = place.left(n_ctx)
    if left is None or left <= 0:
        return None
    try:
        return place.resolved(MixedKVConfig(budget=left), n_ctx)
    except ValueError:
        return None
