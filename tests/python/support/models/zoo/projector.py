"""Tiny image encoders ("mmproj" files) with random weights, for models of the zoo."""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np

from support.models.zoo.model import add_key

_SIDE, _PATCH, _WIDTH, _HEADS, _FF = 32, 8, 32, 2, 64


def write_projector(kind: str, width: int, folder: Path) -> Path:
    """
    Args:
        kind: "mlp" as in LLaVA, "gemma3", whose vectors see each other, or "qwen2vl_merger", with M-RoPE.
        width: of the model's embeddings.
    """
    path = folder / f"mmproj-{kind}-{width}.gguf"
    if path.exists():
        return path
    writer = gguf.GGUFWriter(path, "clip")
    keys: dict[str, object] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        "clip.vision.image_size": _SIDE,
        "clip.vision.patch_size": _PATCH,
        "clip.vision.embedding_length": _WIDTH,
        "clip.vision.feed_forward_length": _FF,
        "clip.vision.block_count": 2,
        "clip.vision.projection_dim": width,
        "clip.vision.attention.head_count": _HEADS,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    if kind == "gemma3":
        keys["clip.vision.projector.scale_factor"] = 2
    for key, value in keys.items():
        add_key(writer, key, value)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, shape in _shapes(kind, width).items():
        rng = np.random.default_rng(zlib.crc32(f"{kind}/{name}".encode()))
        data = rng.standard_normal(shape)
        if name.endswith("bias"):
            data *= 0.1
        elif len(shape) == 1:
            data = 1 + 0.1 * data
        elif "position" not in name:
            data /= np.sqrt(np.prod(shape[1:]))
        writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(kind: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"v.patch_embd.weight": (_WIDTH, 3, _PATCH, _PATCH)}
    n_patches = (_SIDE // _PATCH) ** 2
    if kind == "qwen2vl_merger":
        shapes["v.patch_embd.weight.1"] = (_WIDTH, 3, _PATCH, _PATCH)
    else:
        shapes["v.patch_embd.bias"] = (_WIDTH,)
        shapes["v.position_embd.weight"] = (n_patches + (kind == "mlp"), _WIDTH)
    if kind == "mlp":
        shapes |= {"v.class_embd": (_WIDTH,), "v.pre_ln.weight": (_WIDTH,), "v.pre_ln.bias": (_WIDTH,)}
    else:
        shapes |= {"v.post_ln.weight": (_WIDTH,), "v.post_ln.bias": (_WIDTH,)}
    for il in range(2):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes[f"v.blk.{il}.{part}.weight"] = (_WIDTH, _WIDTH)
            shapes[f"v.blk.{il}.{part}.bias"] = (_WIDTH,)
        shapes |= {
            f"v.blk.{il}.{norm}.{part}": (_WIDTH,) for norm in ("ln1", "ln2") for part in ("weight", "bias")
        }
        shapes[f"v.blk.{il}.ffn_up.weight"], shapes[f"v.blk.{il}.ffn_up.bias"] = (_FF, _WIDTH), (_FF,)
        shapes[f"v.blk.{il}.ffn_down.weight"], shapes[f"v.blk.{il}.ffn_down.bias"] = (_WIDTH, _FF), (_WIDTH,)
    if kind == "gemma3":
        shapes |= {"mm.input_projection.weight": (_WIDTH, width), "mm.soft_emb_norm.weight": (_WIDTH,)}
    else:
        merged = 4 * _WIDTH if kind == "qwen2vl_merger" else _WIDTH
        inner = merged if kind == "qwen2vl_merger" else width
        shapes |= {"mm.0.weight": (inner, merged), "mm.0.bias": (inner,)}
        shapes |= {"mm.2.weight": (width, inner), "mm.2.bias": (width,)}
    return shapes
