"""A job that takes and returns vectors, for a model whose embeddings and output head are elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv.engine.jobs.job import Event, Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import NotFiniteError, RowsGoneError
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prefix.sequences import Sequence

Vectors = npt.NDArray[np.float32]


class VectorJob(Job):
    """Evaluates the next tokens of a session, given as vectors. The result is `hidden` instead of text.

    The pool tells rows apart by token ids, so each token has an id here that stands for it and all tokens
    before it. Rows are shared as for tokens. Those before the vectors must be there, or the job fails with
    RowsGoneError.

    Args:
        ids: ids of all the session's tokens, those of `vectors` last.
        vectors: vectors of the last n tokens, [n, width].
        n_hidden: number of last tokens whose hidden states are returned; 0 to n.
        resume: where the session's previous job left its rows.
        most_cut: maximum number of those rows to remove, if the session went back.

    Attributes:
        hidden: [n_hidden, width], complete when the job is done.
    """

    def __init__(
        self,
        ids: Seq[int],
        vectors: Vectors,
        n_hidden: int,
        *,
        tenant: str = "",
        resume: Sequence | None = None,
        most_cut: int = 0,
        deliver: Callable[[Event], None] = lambda event: None,
    ) -> None:
        request = Request(prompt=ids, max_tokens=0, tenant=tenant, store=False)
        super().__init__(request, deliver=deliver)
        self.vectors, self.paused = vectors, resume
        self.goes_on = True
        self.prefix.first, self.prefix.most_cut = self.n_prompt - len(vectors), most_cut
        self.n_hidden = n_hidden
        self.rows = resume  # the sequence that has the session's rows
        self._parts: list[Vectors] = []

    def begin(self, seq: Sequence, n_cached: int, exact: bool) -> bool:
        self.rows = seq
        return super().begin(seq, n_cached, exact)

    def inputs(self, p0: int, p1: int) -> npt.NDArray[Any]:
        return self.vectors[p0 - self.prefix.first : p1 - self.prefix.first]

    def take_hidden(self, context: object, index: int, n: int) -> None:
        """Keep the hidden states of the job's next `n` tokens, which are in the batch from `index` on."""
        p0, width = self.n_rows, self.vectors.shape[1]
        for p in range(max(p0, self.n_prompt - self.n_hidden), p0 + n):
            row = llama_cpp.llama_get_embeddings_ith(context, index + p - p0)
            self._parts.append(np.ctypeslib.as_array(row, (width,)).copy())

    @property
    def hidden(self) -> Vectors:
        """The hidden states that were asked for.

        Raises:
            RowsGoneError: the row of a requested token existed already, so its hidden state was not computed.
            NotFiniteError: the model returned values that are no numbers.
        """
        if len(self._parts) < self.n_hidden:
            raise RowsGoneError("these tokens were evaluated before: their hidden states have gone")
        hidden = np.array(self._parts[-self.n_hidden :], np.float32) if self.n_hidden else _NONE
        if not np.isfinite(hidden).all():
            raise NotFiniteError("hidden states")
        return hidden


_NONE = np.empty((0, 0), np.float32)


def vector_width(llm: Llama) -> int:
    """Make the context of a model without vocabulary return hidden states, and return their width; 0 for
    others.
    """
    if _llama_cpp.has_vocabulary(llm):
        return 0
    llama_cpp.llama_set_embeddings(llm.ctx, True)
    return int(llama_cpp.llama_model_n_embd(_llama_cpp.model(llm)))


def take_hidden(context: object, step: StepPlan[Job]) -> None:
    """Give a step's hidden states to its jobs, before their rows are counted."""
    begin = 0
    for run in step.runs:
        assert isinstance(run.job, VectorJob)
        if not run.spoiled:
            run.job.take_hidden(context, begin, run.n)
        begin += run.n
