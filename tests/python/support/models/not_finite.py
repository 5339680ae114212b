"""Copies of the bundled model that compute values which are no numbers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from mixedkv.bundled import model_path
from mixedkv.model.gguf_copy import copy_metadata, write_and_close

_NAN_F16 = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)


def write_model(path: Path, tokens: tuple[int, ...] = ()) -> Path:
    """Write a model whose embeddings of these tokens are NaN; without tokens all its logits are."""
    reader = gguf.GGUFReader(model_path())
    writer = gguf.GGUFWriter(path, "llama")
    copy_metadata(reader, writer)
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    embeddings, kind = tensors["token_embd.weight"]
    assert kind == gguf.GGMLQuantizationType.Q8_0
    tensors.setdefault("output.weight", (embeddings.copy(), kind))
    for token in tokens:
        embeddings[token].reshape(-1, 34)[:, :2] = _NAN_F16  # the scales of its blocks
    if not tokens:
        norm, kind = tensors["output_norm.weight"]
        tensors["output_norm.weight"] = np.full_like(norm, np.nan), kind
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    write_and_close(writer)
    return path
