"""A llama_batch whose arrays are numpy's."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

NO_CELLS = 1  # llama_decode: no free cells for the batch; nothing has changed


def decode(context: Any, batch: Any) -> int:
    """Evaluate a llama_batch and return llama_decode's code: 0, NO_CELLS, else an error.

    A micro-batch that did not end well has left nothing; those before it have.
    """
    return int(llama_cpp.llama_decode(context, batch))


class NativeBatch:
    """A batch of tokens that belong to one sequence each. Fill `pos`, `seq` and `logits`, set
    `native.n_tokens`, and give `native` to llama_decode.

    Args:
        inputs: token ids, int32 [n], or vectors, float32 [n, width].
        n_pos: parts of a position; those of all tokens stand together, so `pos` is int32 [n_pos * n].
        states: beside token ids, hidden states of other tokens, float32 [n, width]: what an MTP layer reads.
    """

    def __init__(
        self, inputs: npt.NDArray[Any], n_pos: int = 1, states: npt.NDArray[np.float32] | None = None
    ) -> None:
        n = len(inputs)
        self.inputs, self.states = inputs, states
        self.pos = np.zeros(n_pos * n, np.int32)
        self.seq = np.zeros(n, np.int32)
        self.logits = np.zeros(n, np.int8)
        self._n_seq = np.ones(n, np.int32)
        # llama_batch wants a pointer to the sequence ids of each token: here one id each
        self._seq_at = self.seq.ctypes.data + self.seq.itemsize * np.arange(n, dtype=np.uintp)
        fields: dict[str, Any] = {field[0]: field[1] for field in llama_cpp.llama_batch._fields_}
        given = {"token": inputs, "embd": states} if inputs.ndim == 1 else {"token": None, "embd": inputs}
        arrays = {
            **given,
            "pos": self.pos,
            "n_seq_id": self._n_seq,
            "seq_id": self._seq_at,
            "logits": self.logits,
        }
        pointers = {
            name: None if array is None else ctypes.cast(array.ctypes.data, fields[name])
            for name, array in arrays.items()
        }
        self.native: Any = llama_cpp.llama_batch(n_tokens=0, **pointers)
