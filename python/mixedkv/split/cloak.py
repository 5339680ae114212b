"""Another basis of the hidden states: vectors on the wire are turned by a rotation that only the files have.

Row vectors h become h Q, Q orthogonal. What reads the residual stream gets W Q, what writes to it Q^T W, and
an RMSNorm commutes with Q once its weight is part of the matrices after it, so nothing else changes: the
invariance that SliceGPT uses, https://arxiv.org/abs/2401.15024.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from mixedkv.errors import UnsupportedModelError
from mixedkv.split.parts import OUTPUT, OUTPUT_BIAS, OUTPUT_NORM, TOKEN_EMBD
from mixedkv.split.tensors import Tensor

_Matrix = npt.NDArray[np.float64]

# by the norm whose weight they take in, as llama.cpp's src/models/*.cpp name them
_READERS = {
    "attn_norm": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "ffn_norm": ("ffn_gate", "ffn_up", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps"),
}
_NORM_OF = {name: norm for norm, names in _READERS.items() for name in names}
_WRITERS = ("attn_output", "ffn_down", "ffn_down_exps")
_UNTOUCHED = ("attn_q_norm.weight", "attn_k_norm.weight")  # within a head
_BLOCK = re.compile(r"blk\.\d+\.")


def cloaked(tensors: Mapping[str, Tensor], seed: int, path: object) -> dict[str, Tensor]:
    """All tensors of a model in another basis, matrices as F32; each is computed when it is read.

    Args:
        seed: of the rotation. Who can guess it has undone it.
        path: of the model, for messages.

    Raises:
        UnsupportedModelError: a tensor is known to none of the rules: a norm behind a layer, or one with a
            bias, does not commute with a rotation.
    """
    return dict(_turn(tensors, rotation(tensors[TOKEN_EMBD].ne[0], seed), path))


def rotation(width: int, seed: int) -> _Matrix:
    """An orthogonal matrix, all of them equally likely (Mezzadri, https://arxiv.org/abs/math-ph/0609050)."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))
    return q * np.sign(np.diag(r))


def _turn(tensors: Mapping[str, Tensor], q: _Matrix, path: object) -> Iterator[tuple[str, Tensor]]:
    all_of_them = {**tensors, OUTPUT: tensors.get(OUTPUT, tensors[TOKEN_EMBD])}
    for name, tensor in all_of_them.items():
        block = _BLOCK.match(name)
        part = name[block.end() :] if block else name
        stem, _, kind = part.partition(".")
        if name == TOKEN_EMBD:
            turned = _read_later(name, tensor, lambda x: x @ q)
        elif name == OUTPUT:
            turned = _reads(name, tensor, tensors[OUTPUT_NORM], q)
        elif name == OUTPUT_NORM or (block and kind == "weight" and stem in _READERS):
            turned = _read_later(name, tensor, np.ones_like)
        elif block and kind == "weight" and stem in _NORM_OF:
            norm = tensors.get(f"{block.group()}{_NORM_OF[stem]}.weight")
            if norm is None:
                raise UnsupportedModelError(f"{path} cannot be cloaked: {name} has no norm before it")
            turned = _reads(name, tensor, norm, q)
        elif block and stem in _WRITERS and kind == "weight":
            turned = _read_later(name, tensor, lambda x: q.T @ x)
        elif block and stem in _WRITERS and kind == "bias":
            turned = _read_later(name, tensor, lambda x: x @ q)
        elif (
            name == OUTPUT_BIAS
            or name.startswith("rope_")
            or part in _UNTOUCHED
            or (block and kind == "bias" and stem in _NORM_OF)
        ):
            turned = tensor
        else:
            raise UnsupportedModelError(
                f"{path} cannot be cloaked: what {name} does is not known to commute with a rotation"
            )
        yield name, turned


def _reads(name: str, tensor: Tensor, norm: Tensor, q: _Matrix) -> Tensor:
    return _read_later(name, tensor, lambda x: (x * norm.array()) @ q)


def _read_later(name: str, tensor: Tensor, turn: Callable[[_Matrix], _Matrix]) -> Tensor:
    shape = tuple(int(n) for n in reversed(tensor.ne))
    f32 = gguf.GGMLQuantizationType.F32

    def read() -> npt.NDArray[Any]:
        return turn(tensor.array()).astype(np.float32)

    return Tensor(name, f32, shape, np.dtype(np.float32), tensor.ne, read)
