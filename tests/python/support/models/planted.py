"""Outlier channels in the keys of a GGUF file, planted without changing what the model computes.

Real models have a few channels of K that are tens of times larger than the others; small trained models and
random weights have none.

    python tests/python/support/models/planted.py SOURCE.gguf TARGET.gguf --seed 1 --bias 300

SOURCE may also be `smollm2:f16` or `gemma3:f16`. `--bias` is for models without norms or biases of K.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from mixedkv.model.gguf_copy import copy_metadata, write_and_close
from mixedkv.model.named_model import find_measured_model


def plant(
    source: Path | str, target: Path, seed: int, low: float = 12, high: float = 40, bias: float = 0
) -> Path:
    """Write a copy of a model with two pairs of channels of each KV head `low` to `high` times as large, and
    the others spread a little; Q is divided by as much. Where K and Q have norms, the weights of these are
    scaled, and else K and Q become F16. `bias` is the norm of a K bias of each KV head, in its slowest pair.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()

    def get(key: str, default: int = 0) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        return default if field is None else int(field.contents())

    n_layer, n_head = get("block_count"), get("attention.head_count")
    n_kv = get("attention.head_count_kv", n_head)
    size = get("attention.key_length", get("embedding_length") // n_head)
    names = {tensor.name for tensor in reader.tensors}
    has_norms = "blk.0.attn_k_norm.weight" in names
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(target, architecture)
    copy_metadata(reader, writer)
    planted = {}
    for il in range(n_layer):
        pairs = np.exp(rng.normal(0, 0.6, (1 if has_norms else n_kv, size // 2)))
        for head in pairs:
            head[rng.choice(len(head), 2, replace=False)] *= rng.uniform(low, high, 2)
        # RoPE turns neighbours in a llama file, and the halves of a head in others
        scales = np.repeat(pairs, 2, axis=1) if architecture == "llama" else np.tile(pairs, 2)
        if has_norms:
            planted[f"blk.{il}.attn_k_norm.weight"] = scales[0]
            planted[f"blk.{il}.attn_q_norm.weight"] = 1 / scales[0]
            continue
        if bias:
            angle = rng.uniform(0, 2 * np.pi, n_kv)
            biases = np.zeros_like(scales, np.float32)
            biases[:, -2:] = bias * np.stack([np.cos(angle), np.sin(angle)], axis=1)
            writer.add_tensor(f"blk.{il}.attn_k.bias", biases.ravel())
        of_q = np.repeat(1 / scales, n_head // n_kv, axis=0)
        planted |= {f"blk.{il}.attn_k.{part}": scales.ravel() for part in ("weight", "bias")}
        planted |= {f"blk.{il}.attn_q.{part}": of_q.ravel() for part in ("weight", "bias")}
    for tensor in reader.tensors:
        if tensor.name not in planted:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        elif len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, (tensor.data * planted[tensor.name]).astype(np.float32))
        else:
            wide = gguf.dequantize(tensor.data, tensor.tensor_type) * planted[tensor.name][:, None]
            writer.add_tensor(tensor.name, wide.astype(np.float16))
    write_and_close(writer)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=find_measured_model)
    parser.add_argument("target", type=Path)
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--bias", type=float, default=0, metavar="NORM", help="of a K bias of each head (0)")
    options = parser.parse_args()
    plant(options.source, options.target, options.seed, bias=options.bias)


if __name__ == "__main__":
    main()
