"""Writes a model of random weights, for speed alone: the time a token takes does not depend on the weights.

    python tests/python/support/models/random_model.py random.gguf

    python tests/python/support/models/random_model.py 8b.gguf --kind q4_k_m --n-layer 32 --n-embd 4096 \
        --n-head 32 --n-head-kv 8 --n-ff 14336 --n-vocab 128256

    python tests/python/support/models/random_model.py moe.gguf --kind q4_0 --n-layer 16 \
        --n-ff 1024 --n-expert 64

    python tests/python/support/models/random_model.py oss.gguf --arch gpt-oss --n-layer 12 --n-head 64 \
        --n-head-kv 8 --head-size 64 --n-ff 1024 --n-expert 8

What it says is letters, never bytes that are no text, and it has a chat template, so servers can be measured
with it.

By default it has 4 layers of width 1024 with 16 query heads over 4 KV heads of size 128, in F16: the shape
of a layer of a small model of today, in a file of 107 MiB. The second has the shape of Llama 3.1 8B in
Q4_K_M, 4.6 GiB.
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
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
_FILE_TYPES = {
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M,
}
_ONES_OR_ZEROS = ("norm.weight", "sinks.weight", "bias")


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """The shape of a llama with random weights, or of a gpt-oss, whose even layers have a window of 128."""

    arch: str = "llama"
    n_layer: int = 4
    n_embd: int = 1024
    n_head: int = 16
    n_head_kv: int = 4
    head_size: int = 128
    n_ff: int = 2816
    n_expert: int = 0  # routed, of which a token takes n_expert_used; 0: dense
    n_expert_used: int = 4
    seed: int = 1
    kind: str = "f16"
    n_vocab: int = len(_SPECIALS) + 256 + len(_PIECES)  # at least; the others are no text

    def write(self, path: Path) -> None:
        """Write the model; the file is there only when it is whole."""
        part = path.with_name(path.name + ".part")
        writer = gguf.GGUFWriter(part, self.arch)
        self._add_keys(writer)
        _add_vocabulary(writer, self.n_vocab)
        for name, shape in self._shapes():
            writer.add_tensor_info(
                name, shape, np.dtype(np.float32), _n_bytes(shape, self._kind(name)), self._kind(name)
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        random = np.random.default_rng(self.seed)
        for name, shape in self._shapes():  # one at a time: a model may be larger than memory
            values = self._values(random, name, shape)
            if name == "output.weight":  # the best of the letters is above 0
                values[: -len(_PIECES)] = np.zeros((), values.dtype)
            writer.write_tensor_data(values)
        writer.close()
        os.replace(part, path)

    def _add_keys(self, writer: gguf.GGUFWriter) -> None:
        writer.add_name(f"random, {self.n_head} heads over {self.n_head_kv} of {self.head_size}")
        writer.add_file_type(_FILE_TYPES[self.kind])
        writer.add_context_length(_N_CTX)
        writer.add_embedding_length(self.n_embd)
        writer.add_block_count(self.n_layer)
        writer.add_feed_forward_length(self.n_ff)
        if self.n_expert:
            writer.add_expert_count(self.n_expert)
            writer.add_expert_used_count(self.n_expert_used)
        if self.arch == "gpt-oss":
            writer.add_expert_feed_forward_length(self.n_ff)
            writer.add_sliding_window(128)
        writer.add_head_count(self.n_head)
        writer.add_head_count_kv(self.n_head_kv)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(500_000.0)

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        n_q, n_kv = self.n_head * self.head_size, self.n_head_kv * self.head_size
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        yield "output.weight", (self.n_vocab, self.n_embd)
        yield "output_norm.weight", (self.n_embd,)
        for il in range(self.n_layer):
            layer = f"blk.{il}."
            yield layer + "attn_norm.weight", (self.n_embd,)
            yield layer + "attn_q.weight", (n_q, self.n_embd)
            yield layer + "attn_k.weight", (n_kv, self.n_embd)
            yield layer + "attn_v.weight", (n_kv, self.n_embd)
            yield layer + "attn_output.weight", (self.n_embd, n_q)
            yield layer + self._norm_before_ffn, (self.n_embd,)
            routed, experts = ("_exps", (self.n_expert,)) if self.n_expert else ("", ())
            if self.n_expert:
                yield layer + "ffn_gate_inp.weight", (self.n_expert, self.n_embd)
            yield layer + f"ffn_gate{routed}.weight", (*experts, self.n_ff, self.n_embd)
            yield layer + f"ffn_up{routed}.weight", (*experts, self.n_ff, self.n_embd)
            yield layer + f"ffn_down{routed}.weight", (*experts, self.n_embd, self.n_ff)
            if self.arch == "gpt-oss":
                yield layer + "attn_sinks.weight", (self.n_head,)
                yield from (
                    (layer + f"attn_{name}.bias", (n,))
                    for name, n in zip("qkv", (n_q, n_kv, n_kv), strict=True)
                )
                yield layer + "attn_output.bias", (self.n_embd,)
                yield layer + "ffn_gate_inp.bias", (self.n_expert,)
                yield layer + "ffn_gate_exps.bias", (self.n_expert, self.n_ff)
                yield layer + "ffn_up_exps.bias", (self.n_expert, self.n_ff)
                yield layer + "ffn_down_exps.bias", (self.n_expert, self.n_embd)

    @property
    def _norm_before_ffn(self) -> str:
        return "post_attention_norm.weight" if self.arch == "gpt-oss" else "ffn_norm.weight"

    def _kind(self, name: str) -> gguf.GGMLQuantizationType:
        types = gguf.GGMLQuantizationType
        if name.endswith(_ONES_OR_ZEROS):
            return types.F32
        if self.kind == "q4_k_m":
            return types.Q6_K if self._has_more_bits(name) else types.Q4_K
        return {"f16": types.F16, "q4_0": types.Q4_0}[self.kind]

    def _has_more_bits(self, name: str) -> bool:
        """Return whether Q4_K_M has this tensor in Q6_K (llama-quant.cpp, `use_more_bits`)."""
        if not name.startswith("blk."):
            return name == "output.weight"
        layer, eighth = int(name.split(".")[1]), self.n_layer // 8
        is_chosen = layer < eighth or layer >= 7 * self.n_layer // 8 or (layer - eighth) % 3 == 2
        return is_chosen and ("attn_v" in name or "ffn_down" in name)

    def _values(
        self, random: np.random.Generator, name: str, shape: tuple[int, ...]
    ) -> npt.NDArray[np.generic]:
        if name.endswith(_ONES_OR_ZEROS):
            return np.full(shape, name.endswith("norm.weight"), np.float32)
        deviation = 1 / np.sqrt(shape[-1])
        kind = self._kind(name)
        if kind == gguf.GGMLQuantizationType.F16:
            return np.asarray(random.standard_normal(shape, np.float32) * deviation, np.float16)
        make, n = _BLOCKS[kind]
        blocks = make(random, int(np.prod(shape)) // n, deviation)
        return blocks.view(np.uint8).reshape(*shape[:-1], -1)


def _bytes(random: np.random.Generator, *shape: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(random.bytes(int(np.prod(shape))), np.uint8).reshape(shape)


def _q4_0(random: np.random.Generator, n: int, deviation: float) -> npt.NDArray[np.void]:
    blocks = np.empty(n, [("scale", np.float16), ("quants", np.uint8, 16)])
    blocks["scale"] = deviation / np.sqrt(21.5)  # the deviation of whole numbers from -8 to 7
    blocks["quants"] = _bytes(random, n, 16)
    return blocks


def _q4_k(random: np.random.Generator, n: int, deviation: float) -> npt.NDArray[np.void]:
    """Make blocks whose eight pairs of a scale and a minimum are alike: a weight is scale * (q - 7.5)."""
    blocks = np.empty(
        n, [("scale", np.float16), ("min", np.float16), ("scales", "u1", 12), ("quants", "u1", 128)]
    )
    blocks["scale"] = deviation / np.sqrt(1333 * 21.25)  # mean squares of 0 to 63, and of 0 to 15 less 7.5
    blocks["min"] = 7.5 * blocks["scale"]
    low, high = _bytes(random, n, 4), _bytes(random, n, 4) & 15
    blocks["scales"] = np.concatenate([low, low, high * 17], axis=1)
    blocks["quants"] = _bytes(random, n, 128)
    return blocks


def _q6_k(random: np.random.Generator, n: int, deviation: float) -> npt.NDArray[np.void]:
    blocks = np.empty(n, [("quants", "u1", 192), ("scales", "i1", 16), ("scale", np.float16)])
    blocks["scale"] = deviation / np.sqrt(5461 * 341.5)  # mean squares of -128 to 127, and of -32 to 31
    blocks["scales"] = _bytes(random, n, 16).view(np.int8)
    blocks["quants"] = _bytes(random, n, 192)
    return blocks


_BLOCKS = {  # what makes them, and their weights
    gguf.GGMLQuantizationType.Q4_0: (_q4_0, 32),
    gguf.GGMLQuantizationType.Q4_K: (_q4_k, 256),
    gguf.GGMLQuantizationType.Q6_K: (_q6_k, 256),
}


def _n_bytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // block * size


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Bytes and a few letters, so that any text has tokens, behind those that no text has."""
    n_unused = n_vocab - len(_SPECIALS) - 256 - len(_PIECES)
    tokens = [
        *_SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(f"<unused{i}>" for i in range(n_unused)),
        *_PIECES,
    ]
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(
        [0.0] * 3 + [-1000.0] * (256 + n_unused) + [-float(i) for i in range(len(_PIECES))]
    )
    writer.add_token_types(
        [kind.UNKNOWN, kind.CONTROL, kind.CONTROL]
        + [kind.BYTE] * 256
        + [kind.UNUSED] * n_unused
        + [kind.NORMAL] * len(_PIECES)
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(_TEMPLATE)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tests/python/support/models/random_model.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("path", type=Path, metavar="FILE")
    for key, value in RandomModel.__dataclass_fields__.items():
        kind = type(value.default)
        parser.add_argument(f"--{key.replace('_', '-')}", type=kind, default=value.default, metavar="N")
    options = vars(parser.parse_args())
    path = options.pop("path")
    RandomModel(**options).write(path)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
