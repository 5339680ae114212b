"""Computes the size of a KV cache from the header of a model file: nothing is allocated or loaded.

llama.cpp's rules, as in its llama-kv-cache*.cpp: a context is a multiple of 256 tokens, a recurrent layer
keeps no keys and values, and a layer with a sliding window has room for the windows and a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from mixedkv import _core
from mixedkv.config import KVSetting
from mixedkv.config.mixed import ggml_type, type_bits
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import CELLS, padded
from mixedkv.model.gguf_file import ModelFile, n_layers


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One of every `period` layers reads all tokens: the last, or the first. `window` is what a file without
    one has; `fixed`: whatever the file says.
    """

    period: int
    dense_first: bool = False
    window: int = 0
    fixed: bool = False


_PATTERNS = {
    "afmoe": _Pattern(4),
    "cohere2": _Pattern(4),
    "cohere2moe": _Pattern(4, dense_first=True),
    "exaone-moe": _Pattern(4, window=128),
    "exaone4": _Pattern(4, window=4096),
    "gemma-embedding": _Pattern(6),
    "gemma2": _Pattern(2, window=4096),
    "gemma3": _Pattern(6),
    "gemma3n": _Pattern(5),
    "gpt-oss": _Pattern(2),
    "laguna": _Pattern(4, dense_first=True),
    "llama4": _Pattern(4, window=8192, fixed=True),
    "mellum": _Pattern(4),
    "muse-glimmer": _Pattern(4),
    "olmo2": _Pattern(4),
    "plamo3": _Pattern(8),
    "smallthinker": _Pattern(4, dense_first=True, window=4096, fixed=True),
}
_LISTED = ("dots3note", "gemma4", "granite-swa", "maple", "mimo2", "spark2-5", "step35")  # one flag a layer
_FIRST_WITH_ROWS = {"gemma3n": 20}  # layers behind these read the rows of earlier ones


def sliding_window(model: ModelFile) -> int:
    """Return the tokens that layers with a sliding window see; 0 if there are none, or all layers have all
    rows.
    """
    pattern, found = _PATTERNS.get(model.architecture), int(model.get("attention.sliding_window", 0))
    if model.architecture in _LISTED:
        return found
    if pattern is None or (model.architecture == "exaone4" and n_layers(model) != 64):
        return 0
    if pattern.fixed:  # llama.cpp takes no other
        absent = model.get("attention.sliding_window") is None
        turned_off = found == 0 and (model.architecture != "llama4" or not absent)
        return 0 if turned_off else pattern.window
    return found or pattern.window


def sliding_layers(model: ModelFile) -> list[bool]:
    """Return for each layer whether it has a sliding window."""
    n = n_layers(model)
    if not sliding_window(model):
        return [False] * n
    listed: Any = model.get("attention.sliding_window_pattern")
    if isinstance(listed, list):
        return [bool(x) for x in listed[:n]]
    pattern = _PATTERNS.get(model.architecture, _Pattern(0))
    period = int(listed) if listed is not None else pattern.period
    if not period:
        return [True] * n
    first = 0 if pattern.dense_first else period - 1
    return [il % period != first for il in range(n)]


def n_layers_with_rows(model: ModelFile) -> int:
    """Return how many of the first layers have rows of their own: those behind read theirs."""
    n = n_layers(model)
    shared = int(model.get("attention.shared_kv_layers", 0)) if model.architecture == "gemma4" else 0
    return min(n, _FIRST_WITH_ROWS.get(model.architecture, n - shared))


_UINT32 = 1 << 32  # a damaged file may say more
_F16_BYTES = 2
_LEAST_WINDOWS = 4  # answers at a time, as llama-server has unless told otherwise

# Where the file does not say which layers are recurrent: all but the last of every so many, from llama.cpp's
# src/models/*.cpp.
_HYBRID_PERIOD = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer that keeps keys and values; head_v is 0 where values are a part of the keys (MLA). One that
    `slides` has a sliding window. `has_k_bias`: its keys have a bias, which quantised rows may leave out.
    """

    il: int
    n_head_kv: int
    head_k: int
    head_v: int
    slides: bool = False
    has_k_bias: bool = False

    @property
    def n_embd_k(self) -> int:
        return self.n_head_kv * self.head_k

    @property
    def n_embd_v(self) -> int:
        return self.n_head_kv * self.head_v


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as its KV cache sees it.

    Of its `n_layer` layers, `layers` are those that keep keys and values. `n_head` are the query heads of
    each layer, `window` is the length of sliding-window layers, 0 if there are none.
    """

    architecture: str
    name: str
    n_layer: int
    n_head: tuple[int, ...]
    n_ctx_train: int
    window: int
    layers: tuple[LayerShape, ...]

    @property
    def groups(self) -> tuple[tuple[LayerShape, ...], tuple[LayerShape, ...]]:
        """The layers that keep all rows, and those with a sliding window: caches of their own."""
        layers = self.layers
        return tuple(x for x in layers if not x.slides), tuple(x for x in layers if x.slides)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sliding:
    """The number of rows that layers with a sliding window have room for.

    Args:
        full: all of the context.
        n_windows: windows of so many sequences at most, in a quarter of the context, but four; 0: of all.
        n_ubatch: tokens of a micro-batch.
    """

    full: bool = False
    n_windows: int = 0
    n_ubatch: int = 512

    def windows(self, window: int, n_ctx: int, n_seq: int) -> int:
        """Return how many sequences have a window at a time."""
        if self.full or not (self.n_windows and window):
            return n_seq
        return min(n_seq, self.n_windows, max(_LEAST_WINDOWS, (n_ctx // 16 - self.n_ubatch) // window))

    def n_cells(self, window: int, n_ctx: int, n_seq: int) -> int:
        """Return the cells of these layers."""
        if self.full:
            return padded(n_ctx)
        n_ubatch = min(self.n_ubatch, padded(n_ctx))
        return padded(min(padded(n_ctx), window * self.windows(window, n_ctx, n_seq) + n_ubatch))


WINDOWED = Sliding()

Reads = Callable[[int, int, int, int, int, int], bool]
"""Tells whether GPUs read rows as they lie: of the types of K and V, the sizes of their heads, the number of
query heads and of KV heads."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a cache by formula, and the K and V elements they hold.

    `view` is what attention on a GPU takes of the compute buffers, for an F16 view of the rows of a layer
    that it does not read as they lie. It is a part of `bytes` if the setting asks for that.
    """

    bytes: int
    n_elements: int
    view: int = 0

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes / self.n_elements if self.n_elements else 0.0


def model_shape(model: ModelFile) -> ModelShape:
    """Return the layers of a model file.

    Raises:
        UnsupportedModelError: the header lacks what the formula needs.
    """
    n_layer = n_layers(model)
    n_head = model.get("attention.head_count")
    if not n_layer or not n_head or not model.get("embedding_length"):
        raise UnsupportedModelError(
            f"{model.path} does not describe layers with attention ({model.architecture})"
        )
    return ModelShape(
        architecture=model.architecture,
        name=str(model.metadata.get("general.name", model.path.name)),
        n_layer=n_layer,
        n_head=tuple(_per_layer(n_head, n_layer)),
        n_ctx_train=int(model.get("context_length", 0)),
        window=sliding_window(model),
        layers=tuple(_layers(model, n_layer)),
    )


def footprint(
    shape: ModelShape,
    kv: KVSetting,
    n_ctx: int,
    n_seq: int = 1,
    sliding: Sliding = WINDOWED,
    reads: Reads = _core.gpus_read,
) -> Footprint:
    """Return the bytes that a cache of `n_ctx` tokens would take, which `n_seq` sequences share.

    Args:
        reads: of the GPUs that there are; without one nothing is read as it lies.

    Raises:
        ValueError: the setting names layers that the model lacks.
    """
    kv.check_layers(shape.n_layer)
    cells = n_cells(shape, n_ctx, n_seq, sliding)
    merged = {layer.il for layer in shape.layers if not _reads_layer(shape, kv, layer, reads)}
    parts = [
        _part(group, kv, n, n_seq, merged) for group, n in zip(shape.groups, cells, strict=True) if group
    ]
    view = max((part.view for part in parts), default=0)
    return Footprint(
        bytes=sum(part.bytes for part in parts) + (view if kv.attention == "merged" else 0),
        n_elements=sum(part.n_elements for part in parts),
        view=view,
    )


def cache_bytes(
    shape: ModelShape,
    kv: KVSetting,
    n_ctx: int,
    n_seq: int = 1,
    sliding: Sliding = WINDOWED,
    *,
    n_stream: int = 1,
    on_cpu: bool = True,
    reads: Reads = _core.gpus_read,
) -> int:
    """Return the bytes of a cache whose context is `n_stream` equal parts. If it does not lie in CPU memory,
    these include the view that attention takes.
    """
    each = footprint(shape, kv, n_ctx // n_stream, n_seq // n_stream, sliding, reads)
    merges = not on_cpu and kv.attention == "auto"
    return n_stream * (each.bytes + (each.view if merges else 0))


def _reads_layer(shape: ModelShape, kv: KVSetting, layer: LayerShape, reads: Reads) -> bool:
    if kv.attention == "merged" or layer.has_k_bias or not layer.head_v:
        return False
    type_k, type_v = map(ggml_type, kv.types_of(layer.il))
    numbers = layer.head_k, layer.head_v, shape.n_head[layer.il], layer.n_head_kv
    return all(0 < n < _UINT32 for n in numbers) and reads(type_k, type_v, *numbers)


def n_cells(shape: ModelShape, n_ctx: int, n_seq: int = 1, sliding: Sliding = WINDOWED) -> tuple[int, int]:
    """Return the cells of layers that keep all rows, and of those with a sliding window."""
    return padded(n_ctx), sliding.n_cells(shape.window, n_ctx, n_seq)


def _part(
    layers: Sequence[LayerShape], kv: KVSetting, n_cells: int, n_seq: int, merged: Set[int]
) -> Footprint:
    """Return what layers with the same cells take. Those in `merged` are read through a view."""
    n_embd = sum(layer.n_embd_k + layer.n_embd_v for layer in layers)
    n_rows = _ring_rows(layers, kv, n_cells, n_seq)
    return Footprint(
        bytes=n_cells * sum(cold_bytes(layer, kv) for layer in layers) + n_rows * _F16_BYTES * n_embd,
        n_elements=n_cells * n_embd,
        view=max((_view_bytes(layer, n_cells + n_rows) for layer in layers if layer.il in merged), default=0)
        if n_rows
        else 0,
    )


def longest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number of tokens that fits, `most` or a multiple of `CELLS`; 0 if none does."""
    if fits(most):
        return most
    low, high = 0, -(-most // CELLS)  # `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * CELLS) else (low, middle)
    return low * CELLS


def cold_bytes(layer: LayerShape, kv: KVSetting) -> int:
    """Return the number of bytes of a token's rows in the cold types, or in those of a uniform cache."""
    type_k, type_v = kv.types_of(layer.il)
    return int(layer.n_embd_k * type_bits(type_k) + layer.n_embd_v * type_bits(type_v)) // 8


def _ring_rows(layers: Sequence[LayerShape], kv: KVSetting, n_cells: int, n_seq: int) -> int:
    """Return how many F16 rows layers of `n_cells` cells allocate."""
    native = kv.native()
    if native is None or kv.window.rows() == 0:
        return 0
    cold = sum(cold_bytes(layer, kv) for layer in layers)
    f16 = _F16_BYTES * sum(layer.n_embd_k + layer.n_embd_v for layer in layers)
    return _core.count_ring_rows(native, n_seq, n_cells, cold, f16)[0]


def _view_bytes(layer: LayerShape, n_rows: int) -> int:
    """Compute the most that llama_kv_cache_mixed::get_view_bytes says: K in F16, then besides it V in F32 and
    F16. Devices that gather F16 rows take no F32.
    """
    k, v = 2 * layer.n_embd_k, 2 * layer.n_embd_v
    return padded(n_rows) * max(3 * k, k + 3 * v)


def _layers(model: ModelFile, n_layer: int) -> Iterator[LayerShape]:
    n_head = _per_layer(model.get("attention.head_count"), n_layer)
    n_head_kv = _per_layer(model.get("attention.head_count_kv", n_head), n_layer)
    recurrent = _recurrent_layers(model, n_layer)
    width = int(model.get("embedding_length"))
    slides = sliding_layers(model)
    latent = bool(model.get("attention.key_length_mla") and model.get("attention.value_length_mla"))
    names = {tensor.name for tensor in model.tensors}
    for il in range(n_layers_with_rows(model)):
        if n_head_kv[il] and not recurrent[il]:
            size = width // max(1, n_head[il])
            head_k, head_v = (
                (slides[il] and model.get(f"attention.{part}_length_swa"))
                or model.get(f"attention.{part}_length", size)
                for part in ("key", "value")
            )
            has_k_bias = not names.isdisjoint(f"blk.{il}.attn_{part}.bias" for part in ("k", "qkv"))
            yield LayerShape(
                il, n_head_kv[il], int(head_k), 0 if latent else int(head_v), slides[il], has_k_bias
            )


def _recurrent_layers(model: ModelFile, n_layer: int) -> list[bool]:
    if isinstance(listed := model.get("attention.recurrent_layers"), list):
        return [bool(x) for x in _per_layer(listed, n_layer)]
    period = model.get("full_attention_interval", _HYBRID_PERIOD.get(model.architecture))
    return [bool(period) and (il + 1) % period != 0 for il in range(n_layer)]


def _per_layer(value: Any, n_layer: int) -> list[int]:
    if not isinstance(value, list):
        return [int(value)] * n_layer
    if len(value) < n_layer:
        raise UnsupportedModelError(f"a list for {n_layer} layers has {len(value)} entries")
    return value[:n_layer]
