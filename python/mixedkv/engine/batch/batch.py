"""A batch of runs of tokens, which is filled with a few slices instead of a loop over ctypes fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampler import PromptLogprobs
from mixedkv.engine.schedule.contract import Run
from mixedkv.kv.cache import KVCache
from mixedkv.native.batch import NativeBatch, decode


class Batch:
    """Tokens of several sequences for one `llama_decode`; `n_max` at most.

    Each token belongs to one sequence. `add` returns the index of the run's last token, the one
    whose logits can be asked for.

    Args:
        width: 0 for token ids; otherwise the size of the vectors that are given in place of tokens.
        n_state: size of the state that comes with each token id; 0 for none.
    """

    def __init__(self, n_max: int, width: int = 0, n_state: int = 0) -> None:
        self.n_max = n_max
        self._outputs_all = width > 0  # llama.cpp requires it in a context that returns hidden states
        self._arrays = NativeBatch(
            np.zeros((n_max, width), np.float32) if width else np.zeros(n_max, np.int32),
            states=np.zeros((n_max, n_state), np.float32) if n_state else None,
        )
        self._native = self._arrays.native
        # of runs: with the batch's index, position and number of their tokens
        self._requested: list[tuple[PromptLogprobs, int, int, int]] = []

    def __len__(self) -> int:
        return int(self._native.n_tokens)

    def clear(self) -> None:
        self._native.n_tokens, self._requested = 0, []

    def add(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        pos: int,
        seq: int,
        logits: bool,
        every: bool = False,
        states: npt.NDArray[np.float32] | None = None,
    ) -> int:
        """Append a run of one sequence from position `pos` on, with logits of its last token or of `every`
        token.
        """
        first, last, arrays = len(self), len(self) + len(tokens), self._arrays
        arrays.inputs[first:last] = tokens
        if arrays.states is not None:
            arrays.states[first:last] = states
        arrays.pos[first:last] = np.arange(pos, pos + len(tokens), dtype=np.int32)
        arrays.seq[first:last] = seq
        arrays.logits[first:last] = self._outputs_all or (logits and every)
        arrays.logits[last - 1] = self._outputs_all or logits
        self._native.n_tokens = last
        return last - 1

    def set_runs(self, runs: Sequence[Run[Job]]) -> None:
        """Fill the batch with the runs of a step."""
        self.clear()
        for run in runs:
            self._add_run(run)

    def _add_run(self, run: Run[Job]) -> None:
        job, first = run.job, run.job.n_rows
        assert job.seq is not None
        logprobs = job.answer.prompt_logprobs
        requested = logprobs if logprobs is not None and logprobs.wants(first) else None
        if requested is not None:
            self._requested.append((requested, len(self), first, run.n))
        inputs, every = job.inputs(first, first + run.n), requested is not None
        self.add(inputs, first, job.seq.id, logits=run.chooses or every, every=every)
        if run.drafts:
            self.add(run.drafts, first + run.n, job.seq.id, logits=True, every=True)

    def decode(
        self, context: Any, kv: KVCache | None = None, needed: npt.NDArray[np.uint32] | None = None
    ) -> int:
        """Evaluate the batch and return llama_decode's code; `kv`: the context's, where it is a `Llama`'s."""
        code = decode(context, self._native) if kv is None else kv.decode(self._native, needed)
        for requested, index, first, n in self._requested if code == 0 else ():
            requested.take(context, index, first, n)
        return code
