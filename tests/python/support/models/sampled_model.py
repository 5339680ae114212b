"""The bundled model, with a recommendation how to sample in its file."""

from __future__ import annotations

from pathlib import Path

import gguf

from mixedkv.bundled import model_path
from mixedkv.model.gguf_copy import copy_metadata, write_and_close


def recommending(path: Path, **values: float) -> Path:
    """Write the bundled model to `path` with keys like `general.sampling.temp`, and return it."""
    reader = gguf.GGUFReader(model_path())
    writer = gguf.GGUFWriter(path, "llama")
    copy_metadata(reader, writer)
    for name, value in values.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    write_and_close(writer)
    return path
