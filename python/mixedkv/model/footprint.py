"""What a KV cache would take, from the header of a model file: nothing is allocated or loaded.

llama.cpp's rules, as in its llama-kv-cache*.cpp: a context is a multiple of 256 tokens, a recurrent layer
keeps no keys and values, and a sliding-window layer keeps the whole context, as `Llama` has it unless told
swa_full=False.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig, type_bits
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import padded
from mixedkv.model.gguf_file import ModelFile

# Where the file does not say which layers are recurrent: all but the last of every so many, from llama.cpp's
# src/models/*.cpp.
_HYBRID_PERIOD = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer that keeps keys and values."""

    il: int
    n_head_kv: int
    head_k: int
    head_v: int

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


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a cache by formula, and the K and V elements they hold.

    `view` is what merged attention takes of the compute buffers, for an F16 view of the rows of a layer. It
    is a part of `bytes` if the setting asks for that.
    """

    bytes: int
    n_elements: int
    view: int = 0

    @property
    def bits_per_element(self) -> float:
        return 8 * self.bytes / self.n_elements if self.n_elements else 0.0


def model_shape(model: ModelFile) -> ModelShape:
    """The layers of a model file.

    Raises:
        UnsupportedModelError: the header lacks what the formula needs, or the cache holds something other
            than keys and values (multi-head latent attention).
    """
    n_layer = model.get("block_count")
    n_head = model.get("attention.head_count")
    if not isinstance(n_layer, int) or not n_head or not model.get("embedding_length"):
        raise UnsupportedModelError(
            f"{model.path} does not describe layers with attention ({model.architecture})"
        )
    if model.get("attention.kv_lora_rank"):
        raise UnsupportedModelError(
            f"{model.path} has multi-head latent attention ({model.architecture}): "
            f"its cache holds no keys and values"
        )
    return ModelShape(
        architecture=model.architecture,
        name=str(model.metadata.get("general.name", model.path.name)),
        n_layer=n_layer,
        n_head=tuple(_per_layer(n_head, n_layer)),
        n_ctx_train=int(model.get("context_length", 0)),
        window=int(model.get("attention.sliding_window", 0)),
        layers=tuple(_layers(model, n_layer)),
    )


def footprint(shape: ModelShape, kv: KVSetting, n_ctx: int, n_seq: int = 1) -> Footprint:
    """Bytes that a cache of `n_ctx` tokens would take, which `n_seq` sequences share.

    Raises:
        ValueError: `hot_budget` is less than one window.
    """
    n_cells = padded(n_ctx)
    n_k = sum(layer.n_embd_k for layer in shape.layers)
    n_v = sum(layer.n_embd_v for layer in shape.layers)
    cold, f16 = int(n_k * type_bits(kv.type_k) + n_v * type_bits(kv.type_v)) // 8, 2 * (n_k + n_v)
    n_rows = _ring_rows(kv, n_seq, n_cells, cold, f16) if isinstance(kv, MixedKVConfig) else 0
    view = max((_view_bytes(layer, n_cells + n_rows) for layer in shape.layers), default=0) if n_rows else 0
    merged = isinstance(kv, MixedKVConfig) and kv.attention == "merged"
    return Footprint(
        bytes=n_cells * cold + n_rows * f16 + (view if merged else 0),
        n_elements=n_cells * (n_k + n_v),
        view=view,
    )


def _ring_rows(kv: MixedKVConfig, n_seq: int, n_cells: int, bytes_cold: int, bytes_f16: int) -> int:
    """F16 rows that are allocated."""
    window = kv.quantization_threshold, kv.group_size, kv.sink_tokens, kv.n_draft
    n_rows, least = _core.count_ring_rows(*window, kv.native_budget, n_seq, n_cells, bytes_cold, bytes_f16)
    if least and not n_rows:
        raise ValueError(
            f"hot_budget={kv.hot_budget} is less than the {least} F16 tokens of one window and the sinks of "
            f"{n_seq} sequences: raise it, or lower quantization_threshold or the number of sequences"
        )
    return n_rows


def _view_bytes(layer: LayerShape, n_rows: int) -> int:
    """As llama_kv_cache_mixed::get_view_bytes: K in F16, then besides it V in F32 and F16."""
    k, v = 2 * layer.n_embd_k, 2 * layer.n_embd_v
    return padded(n_rows) * max(3 * k, k + 3 * v)


def _layers(model: ModelFile, n_layer: int) -> Iterator[LayerShape]:
    n_head = _per_layer(model.get("attention.head_count"), n_layer)
    n_head_kv = _per_layer(model.get("attention.head_count_kv", n_head), n_layer)
    recurrent = _recurrent_layers(model, n_layer)
    width = int(model.get("embedding_length"))
    for il in range(n_layer):
        if n_head_kv[il] and not recurrent[il]:
            size = width // max(1, n_head[il])
            head_k = model.get("attention.key_length", size)
            head_v = model.get("attention.value_length", size)
            yield LayerShape(il, n_head_kv[il], int(head_k), int(head_v))


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
