"""The bundled model as if it had been made for infilling."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from mixedkv.bundled import model_path
from mixedkv.model.gguf_copy import write_and_close

NAMES = ("fim_pre", "fim_suf", "fim_mid")


def write_fim_model(target: Path, tokens: tuple[int, int, int]) -> Path:
    """A copy whose file says that these tokens go before what is before, after, and missing."""
    reader = gguf.GGUFReader(model_path())
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, part)
    for name, token in zip(NAMES, tokens, strict=True):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    write_and_close(writer)
    return target
