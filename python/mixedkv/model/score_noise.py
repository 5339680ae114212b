"""Estimates from a model's weights how far rounding K moves the attention scores of each layer.

Keys are equalised and rotated before they are rounded, so the error is spread evenly over their channels.
A score then moves by a variance of the sum over channels of q^2 k^2, times the type's error. How large q and
k are follows from weights: of the norms of Q and K where there are any, else of the norm before attention and
a sample of the rows of both matrices. No token is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.model.footprint import LayerShape, ModelShape
from mixedkv.model.gguf_file import TensorFacts, read_model_file

_N_HEADS, _N_CHANNELS = 4, 16  # that are looked at, of a layer

Floats = npt.NDArray[np.float64]


def score_noise(shape: ModelShape) -> Mapping[int, float]:
    """Return for each layer how far its scores move, as a multiple of the layers' mean.

    Nothing where that does not follow from the weights: latent attention, one matrix for Q, K and V, no norm
    before attention, a model in several files, or a shape without a file.
    """
    if shape.path is None or not shape.path.exists():
        return {}
    noise = np.array(_read(shape.path, shape.path.stat().st_mtime_ns, shape.layers, shape.n_head))
    return {layer.il: float(x / noise.mean()) for layer, x in zip(shape.layers, noise, strict=False)}


@lru_cache(maxsize=8)
def _read(
    path: Path, _changed: int, layers: tuple[LayerShape, ...], n_head: tuple[int, ...]
) -> tuple[float, ...]:
    """Return the noise of each layer, or nothing if it is not known of one."""
    file = read_model_file(path)
    if file.metadata.get("split.count", 1) != 1:
        return ()
    weights = _Weights(path, {tensor.name: tensor for tensor in file.tensors})
    try:
        found = tuple(_of_layer(weights, layer, n_head[layer.il]) for layer in layers)
    except LookupError:  # a tensor that other architectures have
        return ()
    return found if all(each > 0 for each in found) else ()


class _Weights:
    """Tensors of a file, of which rows are read."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorFacts]) -> None:
        self._tensors = tensors
        self._data: Any = np.memmap(path, np.uint8, "r")

    def squares(self, name: str, rows: Any = slice(None)) -> Floats:
        """Return the squares of some rows of a tensor; a vector is one row.

        Raises:
            LookupError: the file has no such tensor, or its type is not known.
        """
        import gguf  # takes a while

        tensor = self._tensors[name]
        if not tensor.n_bytes:
            raise LookupError(name)
        data = self._data[tensor.start : tensor.start + tensor.n_bytes]
        n_rows = int(np.prod(tensor.shape[1:]))
        chosen = np.ascontiguousarray(data.reshape(n_rows, -1)[rows])
        values = gguf.dequantize(chosen, gguf.GGMLQuantizationType(tensor.kind))
        return np.square(values.astype(np.float64))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


def _of_layer(weights: _Weights, layer: LayerShape, n_head: int) -> float:
    """Return the mean over heads of the sum over channels of q^2 k^2, both for unit inputs."""
    name, size = f"blk.{layer.il}.attn_", layer.head_k
    if f"{name}k_norm.weight" in weights:
        norms = (weights.squares(f"{name}{part}_norm.weight").reshape(-1, size) for part in ("q", "k"))
        q, k = (each.mean(axis=0) for each in norms)
        return float((q * k).sum()) / size
    inputs = weights.squares(f"{name}norm.weight")[0]
    heads, group = np.arange(min(_N_HEADS, layer.n_head_kv)), n_head // layer.n_head_kv
    channels = np.linspace(0, size - 1, min(size, _N_CHANNELS)).astype(int)

    def power(part: str, chosen: npt.NDArray[np.int_]) -> Floats:
        rows = (chosen[:, None] * size + channels).ravel()
        found = weights.squares(f"{name}{part}.weight", rows) @ inputs
        if part == "q" and f"{name}q.bias" in weights:  # biases of K are not stored
            found += weights.squares(f"{name}q.bias")[0][rows]
        return found.reshape(len(chosen), len(channels))

    of_k = power("k", heads)
    of_q = power("q", (heads[:, None] * group + np.arange(group)).ravel()).reshape(len(heads), group, -1)
    return float((of_q.mean(axis=1) * of_k).mean(axis=0).sum()) / len(channels)
