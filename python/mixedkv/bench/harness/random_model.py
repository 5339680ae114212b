"""Writes a model of random weights, for speed alone: the time a token takes does not depend on the weights.

    python -m mixedkv.bench.harness.random_model random.gguf

By default it has 4 layers of width 1024 with 16 query heads over 4 KV heads of size 128, in F16: the shape
of a layer of a small model of today, in a file of 107 MiB.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

_SPECIALS = ("<unk>", "<s>", "</s>")
_PIECES = ("\u2581", *"etaoinshrdlu")
_N_CTX = 131072


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """The shape of a llama with random weights."""

    n_layer: int = 4
    n_embd: int = 1024
    n_head: int = 16
    n_head_kv: int = 4
    head_size: int = 128
    n_ff: int = 2816
    seed: int = 1

    @property
    def n_vocab(self) -> int:
        return len(_SPECIALS) + 256 + len(_PIECES)

    def write(self, path: Path) -> None:
        """Write the model; the file is there only when it is whole."""
        part = path.with_name(path.name + ".part")
        writer = gguf.GGUFWriter(part, "llama")
        self._add_keys(writer)
        _add_vocabulary(writer)
        for name, data in self._tensors():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, path)

    def _add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_name(f"random, {self.n_head} heads over {self.n_head_kv} of {self.head_size}")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_context_length(_N_CTX)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(500_000.0)

    def _tensors(self) -> Iterator[tuple[str, npt.NDArray[np.floating]]]:
        random = np.random.default_rng(self.seed)

        def matrix(n_out: int, n_in: int) -> npt.NDArray[np.float16]:
            values = random.standard_normal((n_out, n_in), np.float32) / np.sqrt(n_in)
            return np.asarray(values, np.float16)

        ones = np.ones(self.n_embd, np.float32)
        n_q, n_kv = self.n_head * self.head_size, self.n_head_kv * self.head_size
        yield "token_embd.weight", matrix(self.n_vocab, self.n_embd)
        yield "output.weight", matrix(self.n_vocab, self.n_embd)
        yield "output_norm.weight", ones
        for il in range(self.n_layer):
            layer = f"blk.{il}."
            yield layer + "attn_norm.weight", ones
            yield layer + "attn_q.weight", matrix(n_q, self.n_embd)
            yield layer + "attn_k.weight", matrix(n_kv, self.n_embd)
            yield layer + "attn_v.weight", matrix(n_kv, self.n_embd)
            yield layer + "attn_output.weight", matrix(self.n_embd, n_q)
            yield layer + "ffn_norm.weight", ones
            yield layer + "ffn_gate.weight", matrix(self.n_ff, self.n_embd)
            yield layer + "ffn_up.weight", matrix(self.n_ff, self.n_embd)
            yield layer + "ffn_down.weight", matrix(self.n_embd, self.n_ff)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Bytes and a few letters, so that any text has tokens."""
    tokens = [*_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 3 + [-1000.0] * 256 + [-float(i) for i in range(len(_PIECES))])
    writer.add_token_types(
        [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256 + [kind.NORMAL] * len(_PIECES)
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mixedkv.bench.harness.random_model", description=__doc__.split("\n")[0]
    )
    parser.add_argument("path", type=Path, metavar="FILE")
    for key, value in RandomModel.__dataclass_fields__.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, default=value.default, metavar="N")
    options = vars(parser.parse_args())
    path = options.pop("path")
    RandomModel(**options).write(path)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
