"""A trained llama model in other shapes of attention, which compute the same: what repair does to answers
needs a model that answers.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SHAPES = {
    "head of 128": {"head": 128, "n_rot": 128},
    "half of a head turned": {"head": 128, "n_rot": 64},
    "eight query heads to one": {"copies": 4},
}


def reshape(source: Path | str, target: Path, head: int = 64, n_rot: int = 64, copies: int = 1) -> Path:
    """A copy with heads of `head` channels, of which RoPE turns `n_rot`, and each query head `copies` times.

    New channels are zero. Turned ones stand between the old pairs, so that these keep their frequencies. A
    copied head's part of the output matrix is divided by the copies. The architecture is nanbeige's: llama's,
    but that heads may be turned in part.
    """
    reader = gguf.GGUFReader(source)
    keys = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    n_head, n_kv, old = (
        keys[f"llama.attention.{part}"].contents() for part in ("head_count", "head_count_kv", "key_length")
    )
    own = {
        "attention.head_count": n_head * copies,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": n_rot,
    }
    pairs = np.arange(old) // 2 * (2 * n_rot // old) + np.arange(old) % 2
    values = np.arange(old)

    def spread(weight: Floats, n: int, channels: npt.NDArray[np.int64]) -> Floats:
        wide = np.zeros((n, head, weight.shape[-1]), np.float32)
        wide[:, channels] = weight.reshape(n, old, -1)
        return wide

    writer = gguf.GGUFWriter(target, "nanbeige")
    for name, field in keys.items():
        if name != "general.architecture":
            kind, short = field.types[0], name.removeprefix("llama.")
            value = own.get(short, field.contents())
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name.replace("llama.", "nanbeige.", 1), value, kind, sub_type)
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        if part not in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if part == "attn_output":
            wide = np.repeat(spread(weight.T, n_head, values) / copies, copies, axis=0)
            wide = wide.reshape(-1, weight.shape[0]).T
        elif part == "attn_q":
            weight *= np.sqrt(head / old)  # scores are divided by the root of the head's size
            wide = np.repeat(spread(weight, n_head, pairs), copies, axis=0).reshape(-1, weight.shape[1])
        else:
            wide = spread(weight, n_kv, pairs if part == "attn_k" else values).reshape(-1, weight.shape[1])
        writer.add_tensor(tensor.name, np.ascontiguousarray(wide, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
