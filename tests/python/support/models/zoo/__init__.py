"""Tiny random-weight GGUF models, one per kind of attention memory that the cache meets.

Each model is a few hundred KB, the same bytes every time, and scaled so that attention matters: scores
spread over a few units, so single keys carry weight and an early token changes the logits. Tensor names,
shapes and metadata keys are those llama.cpp's loaders ask for (src/llama-arch.cpp, src/models/*.cpp).
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from support.models.zoo import dense, encoder, hybrid, latent, recurrent, sliding
from support.models.zoo.dense import decoder
from support.models.zoo.model import Gguf, Shape, add_key
from support.models.zoo.parts import N_CTX_TRAIN
from support.models.zoo.vocabulary import N_VOCAB, add_tokenizer, write_byte_vocabulary, write_vocabulary

__all__ = [
    "KINDS",
    "MORE",
    "N_CTX_TRAIN",
    "N_VOCAB",
    "REFUSED",
    "SHAPES",
    "SUPPORTED",
    "Gguf",
    "Shape",
    "add_key",
    "add_tokenizer",
    "decoder",
    "make",
    "muted",
    "planted",
    "write",
    "write_byte_vocabulary",
    "write_muted",
    "write_vocabulary",
]

_Maker = Callable[[Shape], Gguf]


def _kind(like: str, maker: _Maker, name: str, arch: str, **fields: Any) -> tuple[Shape, _Maker]:
    return Shape(name, arch, like=like, **fields), maker


_SMALL: dict[str, Any] = {"n_embd": 128, "n_head": 2, "n_head_kv": 1}
_TWO_OF_FOUR: dict[str, Any] = {"n_layer": 4, "kv_layers": (1, 3)}
_SLIDING: dict[str, Any] = {"kv_layers": (1,), "swa_layers": (0,), "rope": "neox"}
_NO_ROWS: dict[str, Any] = {"kv_layers": (), "rope": "none"}
_GEMMA4: dict[str, Any] = {
    "n_layer": 6,
    "head": 128,
    "kv_layers": (1, 3),
    "swa_layers": (0, 2),
    "rope": "neox",
}
_LLAMA4: dict[str, Any] = {"n_layer": 4, "kv_layers": (3,), "swa_layers": (0, 1, 2)}
_NEMOTRON: dict[str, Any] = {"n_layer": 6, "kv_layers": (1, 4), "rope": "none"}

# those that the tests of the mixed cache go through one by one
_SUPPORTED = [
    _kind("Llama 3, Mistral", decoder, "llama-64", "llama"),
    _kind("", decoder, "llama-128", "llama", head=128, n_head_kv=1),
    _kind("Qwen3", lambda s: decoder(s, qk_norm=True), "qwen3", "qwen3", rope="neox"),
    _kind("Gemma 2", sliding.gemma2, "gemma2", "gemma2", **_SLIDING),
    _kind("Gemma 4", sliding.gemma4, "gemma4", "gemma4", **_GEMMA4),
    _kind("gpt-oss", sliding.gpt_oss, "gpt-oss", "gpt-oss", **_SLIDING),
    _kind("Refact", decoder, "refact", "refact", n_head_kv=1, rope="none"),  # ALiBi
    _kind("LFM2", hybrid.lfm2, "lfm2", "lfm2", rope="neox", **_SMALL, **_TWO_OF_FOUR),
    _kind("DeepSeek-V2 to R1", latent.deepseek2, "deepseek2", "deepseek2", head=192, n_head_kv=1),
    # fits the block of 32, but is not rotated (not a multiple of 64)
    _kind("", decoder, "llama-96", "llama", head=96),
]

# other kinds that people run: what each can is tried, see docs/models.md
_MORE = [
    _kind("Qwen3 MoE", dense.qwen3moe, "qwen3moe", "qwen3moe", rope="neox"),
    _kind("Phi-3, Phi-4", dense.phi3, "phi", "phi3", rope="neox", **_SMALL),
    _kind("GLM-4.5, GLM-4.6", dense.glm4moe, "glm4moe", "glm4moe", rope="neox"),
    _kind("Qwen2-VL, Qwen2.5-VL", dense.qwen2vl, "qwen2vl", "qwen2vl", rope="mrope", **_SMALL),
    _kind("Gemma 3", sliding.gemma3, "gemma3", "gemma3", **_SLIDING),
    _kind("Llama 4", sliding.llama4, "llama4", "llama4", **_LLAMA4),
    _kind("Granite 4 hybrid", hybrid.granite_hybrid, "granite-hybrid", "granitehybrid", **_TWO_OF_FOUR),
    _kind("Nemotron-H", hybrid.nemotron_h, "nemotron-h", "nemotron_h", **_NEMOTRON),
    _kind("Falcon-H1", hybrid.falcon_h1, "falcon-h1", "falcon-h1", rope="neox"),
    _kind("Qwen3-Next", hybrid.qwen3next, "qwen3next", "qwen3next", rope="neox", **_TWO_OF_FOUR),
    _kind("Qwen3.5", hybrid.qwen35, "qwen35", "qwen35", rope="mrope", **_TWO_OF_FOUR),
]

_REFUSED = [
    _kind("", decoder, "llama-48", "llama", head=48),  # 48 % 32 != 0
    _kind("Mamba", recurrent.mamba, "mamba", "mamba", **_NO_ROWS),
    _kind("RWKV-7", recurrent.rwkv7, "rwkv7", "rwkv7", n_embd=128, **_NO_ROWS),
    _kind("BERT", encoder.bert, "bert", "bert", n_embd=64, n_head=2, head=32, **_NO_ROWS),
]

SHAPES: dict[str, Shape] = {s.name: s for s, _ in [*_SUPPORTED, *_MORE, *_REFUSED]}
SUPPORTED: tuple[str, ...] = tuple(s.name for s, _ in _SUPPORTED)
MORE: tuple[str, ...] = tuple(s.name for s, _ in _MORE)
REFUSED: tuple[str, ...] = tuple(s.name for s, _ in _REFUSED)
KINDS: tuple[str, ...] = tuple(name for name, shape in SHAPES.items() if shape.like)
_MAKERS: dict[str, _Maker] = {s.name: make for s, make in [*_SUPPORTED, *_MORE, *_REFUSED]}


def make(name: str) -> Gguf:
    """The named model in memory: metadata and tensors as they go to the file."""
    g = _MAKERS[name](SHAPES[name])
    if name in SUPPORTED:
        _plant(g)
    return g


def _plant(g: Gguf) -> None:
    """Some pairs of channels of K are twice as large as the others and some half as large. Q makes up
    for it, by powers of two, so scores stay as they are.
    """
    for il in range(g.shape.n_layer):
        if (q := g.tensors.get(f"blk.{il}.attn_q.weight")) is None:
            continue
        d = len(q) // g.shape.n_head
        k = g.tensors.get(f"blk.{il}.attn_k.weight")
        normed = f"blk.{il}.attn_q_norm.weight" in g.tensors
        n_kv = 1 if normed or k is None else len(k) // d
        scales = planted(g.shape, d, n_kv)
        for which, factors in (
            ("k", scales),
            ("q", np.repeat(1 / scales, 1 if normed else g.shape.n_head // n_kv, 0)),
        ):
            for part in ("_norm.weight",) if normed else (".weight", ".bias"):
                if (data := g.tensors.get(f"blk.{il}.attn_{which}{part}")) is not None:
                    flat = factors.astype(np.float32).reshape((-1,) + (1,) * (data.ndim - 1))
                    g.tensors[f"blk.{il}.attn_{which}{part}"] = data * flat


def planted(shape: Shape, d: int, n_kv: int) -> np.ndarray:
    """What _plant multiplies K by, [n_kv, d]: the same in all layers, as some read the rows of others."""
    rng = np.random.default_rng(zlib.crc32(f"{shape.name}/outliers/{d}".encode()))
    pairs = np.exp2(rng.choice([-1, 0, 0, 0, 0, 0, 0, 1], (n_kv, d if shape.rope == "none" else d // 2)))
    if shape.rope == "none":
        return pairs
    return np.repeat(pairs, 2, axis=1) if shape.rope == "norm" else np.tile(pairs, 2)


def write(name: str, folder: Path) -> Path:
    """Writes the named model to `folder` unless it is there; returns the path."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        make(name).write(part)
        part.rename(path)
    return path


def write_q4_1(name: str, folder: Path) -> Path:
    """Writes the named model with weights in Q4_1 to `folder` unless it is there; returns the path.

    Products with such weights have the same bits for any number of columns, those with floats do not.
    """
    path = folder / f"{name}-q4_1.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1, True
        code = llama_cpp.llama_model_quantize(
            str(write(name, folder)).encode(), str(part).encode(), ctypes.byref(params)
        )
        assert code == 0
        part.rename(path)
    return path


def muted(name: str, il: int) -> Gguf:
    """The named model with attention in layer `il` as the only block that adds to the residual stream.

    Rows of that layer's cache then come straight from the embeddings, to F32 rounding: an oracle that
    computes them on its own quantises to the same levels, and what differs in the logits is attention's
    doing alone.
    """
    g = make(name)
    for tensor, data in g.tensors.items():
        layer = int(tensor.split(".")[1]) if tensor.startswith("blk.") else -1
        part = tensor.split(".", 2)[2] if layer >= 0 else ""
        if part.startswith(("ffn_down", "shortconv.out_proj")) or (
            part.startswith("attn_output.") and layer != il
        ):
            g.tensors[tensor] = np.zeros_like(data)
    return g


def write_muted(name: str, il: int, folder: Path) -> Path:
    """Writes muted(name, il) to `folder` unless it is there; returns the path."""
    path = folder / f"{name}-only-{il}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        muted(name, il).write(part)
        part.rename(path)
    return path
