"""The two files of a split model: what each holds, what their headers say of each other, and tensors on their
way there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from mixedkv.errors import UnsupportedModelError
from mixedkv.model.gguf_file import ModelFile

VERSION = 1  # of the two files and of the wire
PREFIX = "mixedkv.split."
HEAD, BODY = "head", "body"

TOKEN_EMBD, OUTPUT, OUTPUT_BIAS = "token_embd.weight", "output.weight", "output.bias"
OUTPUT_NORM = "output_norm.weight"
HEAD_TENSORS = (TOKEN_EMBD, OUTPUT, OUTPUT_BIAS)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operations of llama.cpp's graph on embeddings and logits besides the two matrices.

    Embeddings are multiplied by `embedding_scale`; logits by `logit_scale`, then x becomes
    softcap * tanh(x / softcap) where `logit_softcap` is not 0.
    """

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0


# By architecture, as llama.cpp's src/models/*.cpp have it: what is done to vectors that come from outside
# (Granite's embedding scale, Gemma's and Gemma 2's) is the server's, the rest is the client's.
_ARITHMETIC: dict[str, Callable[[ModelFile], Arithmetic]] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral3",
            "qwen2",
            "qwen3",
            "qwen3moe",
            "phi3",
            "olmo2",
            "smollm3",
            "starcoder2",
            "gemma",
        ),
        lambda file: Arithmetic(),
    ),
    "gemma2": lambda file: Arithmetic(logit_softcap=file.get("final_logit_softcapping", 30.0)),
    "gemma3": lambda file: Arithmetic(
        embedding_scale=math.sqrt(file.get("embedding_length")),
        logit_softcap=file.get("final_logit_softcapping", 0.0),
    ),
    "granite": lambda file: Arithmetic(logit_scale=1.0 / file.get("logit_scale")),
}


def arithmetic(file: ModelFile, tensors: set[str]) -> Arithmetic:
    """Return the arithmetic of a model that can be split.

    Args:
        tensors: names of all tensors of the model.

    Raises:
        UnsupportedModelError: the model cannot be split; the message names the architecture and the reason.
    """
    kind = file.architecture
    if extra := next((name for name in tensors if name.startswith("per_layer_")), None):
        raise UnsupportedModelError(
            f"{file.path} cannot be split: each layer of {kind} embeds tokens anew ({extra}), so a server "
            f"without tokens cannot evaluate it"
        )
    if kind not in _ARITHMETIC:
        raise UnsupportedModelError(
            f"{file.path} cannot be split: {kind} is not one of {', '.join(sorted(_ARITHMETIC))}"
        )
    known = {*HEAD_TENSORS, OUTPUT_NORM, "output_norm.bias"}
    odd = [name for name in tensors if name.startswith(("token_", "output")) and name not in known]
    if TOKEN_EMBD not in tensors or odd:
        reason = f"it has {min(odd)}" if odd else f"it has no {TOKEN_EMBD}"
        raise UnsupportedModelError(f"{file.path} cannot be split: {reason}")
    return _ARITHMETIC[kind](file)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Facts from the header of a head or a body.

    Attributes:
        pair: 32 hex digits that a head and its body share, and no other two files.
        width: numbers in the vector of a token.
    """

    kind: str
    pair: str
    width: int


def read_part(file: ModelFile, kind: str) -> ModelPart:
    """Read the header of a part of a model.

    Raises:
        UnsupportedModelError: the file is not such a part, or one of another version.
    """
    get: Callable[[str], Any] = lambda key: file.metadata.get(PREFIX + key)  # noqa: E731
    if get("part") != kind:
        raise UnsupportedModelError(
            f"{file.path} is not the {kind} of a split model: `mixedkv split export` writes one"
        )
    if get("version") != VERSION:
        raise UnsupportedModelError(
            f"{file.path} has version {get('version')} of the split format, this package has {VERSION}: "
            f"export the model again"
        )
    pair, width = get("pair"), file.get("embedding_length")
    if not (isinstance(pair, str) and len(pair) == 32 and isinstance(width, int) and 0 < width <= 1 << 20):
        raise UnsupportedModelError(f"{file.path} is damaged: export the model again")
    return ModelPart(kind, pair, width)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a model file, whose data is read when it is asked for.

    Attributes:
        kind: of its numbers.
        shape, dtype: of what `read` gives, which for quantised types are rows of bytes.
        ne: its shape as ggml has it, the fastest dimension first.
        read: the data as they lie in the file.
    """

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ne: tuple[int, ...]
    read: Callable[[], npt.NDArray[Any]]

    @classmethod
    def of(cls, tensor: Any) -> Tensor:
        """Describe a `gguf.ReaderTensor`."""
        data, ne = tensor.data, tuple(int(n) for n in tensor.shape)
        return cls(tensor.name, tensor.tensor_type, data.shape, data.dtype, ne, lambda: data)

    @classmethod
    def zeros(cls, name: str, *shape: int) -> Tensor:
        f32 = gguf.GGMLQuantizationType.F32
        return cls(name, f32, shape, np.dtype(np.float32), shape[::-1], lambda: np.zeros(shape, np.float32))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self) -> npt.NDArray[np.float64]:
        """Return the tensor's numbers, the fastest dimension last."""
        values = gguf.dequantize(self.read(), self.kind)
        return values.reshape(self.ne[::-1]).astype(np.float64)
