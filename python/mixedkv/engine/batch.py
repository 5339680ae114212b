"""A llama_batch whose arrays are numpy's: filling it costs a few slices, not a loop over ctypes fields."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.engine.scheduler import Run


class Batch:
    """Tokens of several sequences for one `llama_decode`; `n_max` at most.

    Each token belongs to one sequence. `add` returns the index of the run's last token, the one
    whose logits can be asked for.

    Args:
        width: 0 for token ids; else each token is given as a vector of so many numbers.
    """

    def __init__(self, n_max: int, width: int = 0) -> None:
        self.n_max = n_max
        self._outputs_all = width > 0  # so llama.cpp wants it of a context that gives hidden states
        self._input: npt.NDArray[Any] = (
            np.zeros((n_max, width), np.float32) if width else np.zeros(n_max, np.int32)
        )
        self._pos = np.zeros(n_max, np.int32)
        self._n_seq = np.ones(n_max, np.int32)
        self._seq = np.zeros(n_max, np.int32)
        self._logits = np.zeros(n_max, np.int8)
        # llama_batch wants a pointer to the sequence ids of each token: here one id each
        step = self._seq.itemsize
        self._seq_at = self._seq.ctypes.data + step * np.arange(n_max, dtype=np.uintp)
        fields: dict[str, Any] = {field[0]: field[1] for field in llama_cpp.llama_batch._fields_}
        self._native = llama_cpp.llama_batch(
            n_tokens=0,
            token=None if width else ctypes.cast(self._input.ctypes.data, fields["token"]),
            embd=ctypes.cast(self._input.ctypes.data, fields["embd"]) if width else None,
            pos=ctypes.cast(self._pos.ctypes.data, fields["pos"]),
            n_seq_id=ctypes.cast(self._n_seq.ctypes.data, fields["n_seq_id"]),
            seq_id=ctypes.cast(self._seq_at.ctypes.data, fields["seq_id"]),
            logits=ctypes.cast(self._logits.ctypes.data, fields["logits"]),
        )

    def __len__(self) -> int:
        return int(self._native.n_tokens)

    def clear(self) -> None:
        self._native.n_tokens = 0

    def add(
        self, tokens: Sequence[int] | npt.NDArray[Any], pos: int, seq: int, logits: bool, every: bool = False
    ) -> int:
        """Append a run of one sequence from position `pos` on; `logits`: of its last token, or of `every`."""
        first, last = len(self), len(self) + len(tokens)
        self._input[first:last] = tokens
        self._pos[first:last] = np.arange(pos, pos + len(tokens), dtype=np.int32)
        self._seq[first:last] = seq
        self._logits[first:last] = self._outputs_all or (logits and every)
        self._logits[last - 1] = self._outputs_all or logits
        self._native.n_tokens = last
        return last - 1

    def add_run(self, run: Run) -> None:
        """Append what a job has in a step."""
        job, first = run.job, run.job.n_rows
        assert job.seq is not None
        self.add(job.inputs(first, first + run.n), first, job.seq.id, logits=run.chooses)
        if run.drafts:
            self.add(run.drafts, first + run.n, job.seq.id, logits=True, every=True)

    def decode(self, context: object) -> int:
        """llama_decode's return code: 0, 1 when no cells are free for it, else an error."""
        return int(llama_cpp.llama_decode(context, self._native))
