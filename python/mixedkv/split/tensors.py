"""A tensor on its way from one GGUF file into another: its data are made when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt


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
