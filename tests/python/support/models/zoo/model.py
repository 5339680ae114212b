"""A model in memory, as it goes to a GGUF file."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from support.models.zoo.vocabulary import add_tokenizer


@dataclass(frozen=True)
class Shape:
    """What the tests need to know about a model without asking the library."""

    name: str
    arch: str
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head: int = 64  # K and V head size of the full-attention layers
    kv_layers: tuple[int, ...] = (0, 1)  # full-attention layers that own a KV cache
    swa_layers: tuple[int, ...] = ()
    rope: str = "norm"  # "norm": pairs of neighbours, "neox": halves, "mrope": halves with sections, "none"
    like: str = ""  # what people run that is of this kind


@dataclass
class Gguf:
    shape: Shape
    keys: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    n_token_types: int = 0
    n_words: int = 0  # of the vocabulary, besides those that all have
    rerank_template: str = ""
    chat_template: str = ""
    tokenizer: Callable[[gguf.GGUFWriter], None] | None = None  # writes another vocabulary

    def weight(self, name: str, *ne: int, scale: float = 1.0) -> None:
        """A random matrix in ggml's order of dimensions; `scale` is the output's std for a unit-
        variance input.
        """
        rng = np.random.default_rng(zlib.crc32(f"{self.shape.name}/{name}".encode()))
        data = rng.standard_normal(ne[::-1]) * (scale / np.sqrt(ne[0]))
        self.tensors[name] = data.astype(np.float32)

    def vector(self, name: str, n: int, mean: float = 1.0, std: float = 0.1) -> None:
        rng = np.random.default_rng(zlib.crc32(f"{self.shape.name}/{name}".encode()))
        self.tensors[name] = (mean + std * rng.standard_normal(n)).astype(np.float32)

    def add_words(self, n: int) -> None:
        """Let the vocabulary have `n` words more, with random rows."""
        self.n_words = n
        for name in self.tensors.keys() & {"token_embd.weight", "output.weight"}:
            former = self.tensors[name]
            rng = np.random.default_rng(zlib.crc32(f"{self.shape.name}/words/{name}".encode()))
            rows = rng.standard_normal((n, former.shape[1]), np.float32) * former.std()
            self.tensors[name] = np.concatenate([former, rows])

    def write(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, self.shape.arch)
        writer.add_name(f"zoo {self.shape.name}")
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        if self.tokenizer is not None:
            self.tokenizer(writer)
        else:
            add_tokenizer(writer, self.n_words)
        if self.n_token_types:
            writer.add_token_type_count(self.n_token_types)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)
        if self.rerank_template:
            writer.add_string("tokenizer.chat_template.rerank", self.rerank_template)
        for key, value in self.keys.items():
            add_key(writer, f"{self.shape.arch}.{key}", value)
        for name, data in self.tensors.items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key}: {value!r}")
