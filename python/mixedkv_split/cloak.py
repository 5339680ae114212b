"""Another basis of the hidden states: vectors on the wire are turned by a rotation that only the files have.

Row vectors h become h Q, Q orthogonal. What reads the residual stream gets W Q, what writes to it Q^T W, and
an RMSNorm commutes with Q once its weight is part of the matrices after it, so nothing else changes: the
invariance that SliceGPT uses, https://arxiv.org/abs/2401.15024.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt

from mixedkv.errors import UnsupportedModelError
from mixedkv_split.parts import OUTPUT, OUTPUT_BIAS, OUTPUT_NORM, TOKEN_EMBD, Tensor

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

# What a tensor is to the residual stream: rows of it (h Q), what writes to it (Q^T W), norms (their weight
# becomes 1), what reads it behind a norm (norm W Q). Those inside a layer never see the basis.
_Role = Literal["row", "writer", "norm", "reader", "inside"]
_ROLES: dict[str, _Role] = {TOKEN_EMBD: "row", OUTPUT: "reader", OUTPUT_NORM: "norm", OUTPUT_BIAS: "inside"}


def cloaked(tensors: Mapping[str, Tensor], seed: int, path: object) -> dict[str, Tensor]:
    """Return all tensors of a model in another basis, matrices as F32; each is computed when it is read.

    Args:
        seed: of the rotation. Who can guess it has undone it.
        path: of the model, for messages.

    Raises:
        UnsupportedModelError: a tensor is known to none of the rules: a norm behind a layer, or one with a
            bias, does not commute with a rotation.
    """
    q = rotation(tensors[TOKEN_EMBD].ne[0], seed)
    with_output = {**tensors, OUTPUT: tensors.get(OUTPUT, tensors[TOKEN_EMBD])}
    return {name: _turned(tensor, name, tensors, q, path) for name, tensor in with_output.items()}


def rotation(width: int, seed: int) -> _Matrix:
    """Return an orthogonal matrix, all of them equally likely (Mezzadri,
    https://arxiv.org/abs/math-ph/0609050).
    """
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))
    return q * np.sign(np.diag(r))


def _turned(tensor: Tensor, name: str, tensors: Mapping[str, Tensor], q: _Matrix, path: object) -> Tensor:
    """Return a tensor in the other basis, by what it does to the residual stream."""
    match _role(name):
        case "row":
            return _read_later(name, tensor, lambda x: x @ q)
        case "writer":
            return _read_later(name, tensor, lambda x: q.T @ x)
        case "norm":
            return _read_later(name, tensor, np.ones_like)
        case "reader":
            norm = tensors.get(_norm_before(name))
            if norm is None:
                raise UnsupportedModelError(f"{path} cannot be cloaked: {name} has no norm before it")
            return _read_later(name, tensor, lambda x: (x * norm.array()) @ q)
        case "inside":
            return tensor
    raise UnsupportedModelError(
        f"{path} cannot be cloaked: what {name} does is not known to commute with a rotation"
    )


def _role(name: str) -> _Role | None:
    """Return what the tensor does, None if no rule knows it."""
    if name in _ROLES:
        return _ROLES[name]
    if name.startswith("rope_"):
        return "inside"
    block = _BLOCK.match(name)
    part = name[block.end() :] if block else name
    if part in _UNTOUCHED:
        return "inside"
    stem, _, kind = part.partition(".")
    if not block or kind not in ("weight", "bias"):
        return None
    is_weight = kind == "weight"
    if stem in _NORM_OF:
        return "reader" if is_weight else "inside"
    if stem in _WRITERS:
        return "writer" if is_weight else "row"
    return "norm" if stem in _READERS and is_weight else None


def _norm_before(name: str) -> str:
    """Return the name of the norm whose output a reader multiplies."""
    block = _BLOCK.match(name)
    if not block:
        return OUTPUT_NORM
    stem = name[block.end() :].partition(".")[0]
    return f"{block.group()}{_NORM_OF[stem]}.weight"


def _read_later(name: str, tensor: Tensor, turn: Callable[[_Matrix], _Matrix]) -> Tensor:
    shape = tuple(int(n) for n in reversed(tensor.ne))
    f32 = gguf.GGMLQuantizationType.F32

    def read() -> npt.NDArray[Any]:
        return turn(tensor.array()).astype(np.float32)

    return Tensor(name, f32, shape, np.dtype(np.float32), tensor.ne, read)
