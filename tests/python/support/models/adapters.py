"""Tiny LoRA adapters with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

_RANK = 4


def write_adapter(path: Path, model: Path, seed: int, *, size: float = 1.0) -> Path:
    """An adapter for the projections of K of all layers.

    Args:
        model: the GGUF file that it is for.
        size: of its weights; larger ones change more.
    """
    reader = gguf.GGUFReader(model)
    field = reader.get_field("general.architecture")
    assert field is not None
    writer = gguf.GGUFWriter(path, str(field.contents()))
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    rng = np.random.default_rng(seed)
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_k.weight"):
            n_in, n_out = map(int, tensor.shape)
            for name, shape in (("lora_a", (_RANK, n_in)), ("lora_b", (n_out, _RANK))):
                values = (size * rng.standard_normal(shape)).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
