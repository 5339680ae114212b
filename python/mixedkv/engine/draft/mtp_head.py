"""Drafts with layers of the model itself that were trained to predict further tokens (multi-token prediction,
MTP; https://arxiv.org/abs/2404.19737, as in DeepSeek-V3: https://arxiv.org/abs/2412.19437).

Such a layer takes a token and the model's hidden state of the token before it. It has rows of its own, in a
second context on the same weights, so every token that the model evaluates is evaluated here too, by one
layer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.engine.batch.batch import Batch
from mixedkv.engine.draft.draft_model import nearest, sure_guess
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.batch import NO_CELLS
from mixedkv.tokens import Tokens, common_prefix

log = logging.getLogger(__name__)

_LAST = 16  # tokens that are collected before they are evaluated, unless a draft comes first


@dataclass(slots=True, eq=False)
class _Reader:
    """A sequence of the head's context.

    Attributes:
        tokens: the tokens up to the last one that has a row; the first ones may have none.
        states: hidden states of the last one of `tokens` and of those after it, as far as they are known, [n,
            n_embd].
        seen: the tokens of `states`, -1 for one before the first.
    """

    id: int
    states: npt.NDArray[np.float32]
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    seen: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    job: Job | None = None

    def take(self, first: int, tokens: Tokens, states: npt.NDArray[np.float32]) -> bool:
        """Add the states of tokens from position `first` on; return False if earlier ones are missing."""
        begin = len(self.tokens) - 1  # position of the first state
        if not len(self.seen) and first == begin + 1:  # the state before is not known any more, or never was
            states = np.concatenate([np.zeros_like(states[:1]), states])
            tokens = np.concatenate([self.tokens[-1:] if len(self.tokens) else [-1], tokens])
            first = begin
        skip = max(0, begin - first)
        kept = first + skip - begin
        if kept > len(self.seen):
            return False
        self.states = np.concatenate([self.states[:kept], states[skip:]])
        self.seen = np.concatenate([self.seen[:kept], tokens[skip:]]).astype(np.int32)
        return True

    def left(self, job: Job) -> int:
        """Return how many tokens of the job have no row yet and can have one."""
        begin, end = len(self.tokens), len(job.tokens)
        before = min(1, begin)  # the first state is of a token, or of none
        known = common_prefix(self.seen[1 - before :], np.array(job.tokens[begin - before :], np.int32))
        return min(known + 1 - before, len(self.seen), end - begin)

    def take_out(self, tokens: Sequence[int]) -> None:
        """Remove the states of tokens that have rows now."""
        n = len(tokens)
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))
        self.states, self.seen = self.states[n:], self.seen[n:]

    def restart(self, tokens: Sequence[int] | Tokens) -> None:
        """Start again without rows after these tokens."""
        self.tokens = np.array(tokens, np.int32)
        self.states, self.seen = self.states[:0], self.seen[:0]


@dataclass(slots=True, eq=False)
class _Draft:
    """Up to `n` tokens behind the `end` of a job, `made` so far; `read` had no rows before, and
    `row` of the batch says what comes next.
    """

    reader: _Reader
    end: int
    n: int
    made: list[int] = field(default_factory=list)
    read: Sequence[int] = ()
    row: int = -1


class MtpHead:
    """Makes greedy drafts with a model's own MTP layer for many answers at a time, on the engine's thread.

    If there are several such layers, the first one makes all drafts.

    Args:
        llm: loaded with load_mtp=True.
        parallel: answers at a time.

    Raises:
        ValueError: the model was loaded without MTP layers, llama.cpp cannot use them, or there is no memory
            for the context.
    """

    def __init__(self, llm: Llama, parallel: int) -> None:
        if not llm.has_mtp:
            raise ValueError('speculation: "mtp" needs a model with such layers: load it with load_mtp=True')
        if llm.streaming is not None:
            raise ValueError('speculation: "mtp" does not go with streamed layers: leave one out')
        self._target, self._n_vocab, self._n_ctx = llm.ctx, int(llm.n_vocab()), int(llm.n_ctx())
        n_embd = int(llama_cpp.llama_model_n_embd_out(_llama_cpp.model(llm)))
        self._batch = Batch(llm.n_batch, n_state=n_embd)
        self._readers = [_Reader(i, np.empty((0, n_embd), np.float32)) for i in range(parallel)]
        self._ctx: Any = self._make(llm, parallel)
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._threads = _core.Threads(_llama_cpp.address(self._ctx))
        closing = weakref.WeakMethod(self.close)
        llm.at_close(lambda: (close := closing()) and close())
        _core.keep_hidden(_llama_cpp.address(self._ctx), True, True)
        _core.keep_hidden(_llama_cpp.address(self._target), True, False)

    def _make(self, llm: Llama, parallel: int) -> Any:
        params, mine = llama_cpp.llama_context_default_params(), llm.context_params
        params.ctx_type = _MTP
        params.n_ctx, params.n_batch = self._n_ctx, llm.n_batch
        params.n_ubatch = min(llm.n_batch, int(mine.n_ubatch))
        params.n_seq_max, params.kv_unified = parallel, True
        params.n_threads, params.n_threads_batch = mine.n_threads, mine.n_threads_batch
        for name in ("rope_freq_base", "rope_freq_scale", "rope_scaling_type", "offload_kqv"):
            setattr(params, name, getattr(mine, name))
        params.no_perf = True
        assertions = _core.Assertions()
        with assertions:
            ctx = llama_cpp.llama_init_from_model(_llama_cpp.model(llm), params)
        if not ctx:
            why = f" ({assertions.failed})" if assertions.failed else "; verbose shows why"
            raise ValueError(f'speculation: "mtp": llama.cpp could not make a context of these layers{why}')
        return ctx

    def close(self) -> None:
        """Free the context; called by the engine."""
        if self._ctx:
            _core.keep_hidden(_llama_cpp.address(self._target), False, False)
            self._threads.close()
            llama_cpp.llama_free(self._ctx)
            self._ctx = None

    def evaluated(self, step: StepPlan[Job]) -> None:
        """Keep the hidden states of a step that the model has just evaluated."""
        end = 0
        for run in step.runs:
            begin, end = end, end + run.n + len(run.drafts)
            job = run.job
            drafter = job.answer.drafter
            if drafter is None or not drafter.by_model or run.spoiled:
                continue
            first = job.n_rows
            tokens = np.array([*job.tokens[first : first + run.n], *run.drafts], np.int32)
            states = _core.hidden(_llama_cpp.address(self._target), begin, end - begin)
            reader = self._reader(job)
            if not reader.take(first, tokens, states):
                self._remove(reader, 0)
                reader.restart(job.tokens[: first + 1])
                reader.states, reader.seen = states, tokens

    def read(self, jobs: Iterable[Job], n_prompt: int) -> None:
        """Evaluate the tokens of running jobs, except those that `draft` will evaluate."""
        jobs = list(jobs)
        for reader in self._readers:
            if reader.job not in jobs:
                reader.job = None
        self._batch.clear()
        read = []
        for job in jobs:
            reader = self._reader(job)
            n = min(reader.left(job), len(job.tokens) - len(reader.tokens) - 1, self._room)
            if n > _LAST:
                read.append((reader, self._add(reader, job, n, logits=False)))
        if read and self._decode():
            for reader, tokens in read:
                reader.take_out(tokens)

    def draft(self, requested: Sequence[tuple[Job, int]]) -> list[list[int]]:
        """Return up to the given number of drafts for each job; none for a job with tokens that the head has
        still to `read`.

        The first pass evaluates each job's latest tokens with the model's hidden states. Each further pass
        evaluates the newest draft of every job that goes on, with the head's own state.
        """
        drafts = [_Draft(self._reader(job), len(job.tokens), n) for job, n in requested]
        self._batch.clear()
        begun = []
        for draft, (job, n) in zip(drafts, requested, strict=True):
            left = draft.end - len(draft.reader.tokens)
            fits = draft.end + n <= self._n_ctx and left <= self._room // len(requested)
            if n > 0 and fits and 0 < left == draft.reader.left(job):
                draft.read = self._add(draft.reader, job, left, logits=True)
                draft.row = len(self._batch) - 1
                begun.append(draft)
        at_work = begun
        while at_work:
            if not self._decode():
                for draft in begun:  # some may have got rows that are not recorded
                    self._forget(draft.reader)
                return [draft.made for draft in drafts]
            at_work = [draft for draft in at_work if self._guess(draft)]
            states = [_core.hidden(_llama_cpp.address(self._ctx), draft.row, 1) for draft in at_work]
            self._batch.clear()
            for draft, state in zip(at_work, states, strict=True):
                last = draft.end + len(draft.made) - 1
                draft.row = self._batch.add(draft.made[-1:], last, draft.reader.id, logits=True, states=state)
        for draft in begun:
            draft.reader.take_out(draft.read)
            self._remove(draft.reader, draft.end)  # drafts are evaluated again, with the model's own states
        return [draft.made for draft in drafts]

    def _guess(self, draft: _Draft) -> bool:
        """Add the next draft, from the latest batch; return whether to make another one."""
        best = sure_guess(self._ctx, draft.row, self._n_vocab)
        if best is None:
            return False
        draft.made.append(best)
        return len(draft.made) < draft.n

    @property
    def _room(self) -> int:
        return self._batch.n_max - len(self._batch)

    def _add(self, reader: _Reader, job: Job, n: int, logits: bool) -> Sequence[int]:
        """Put a job's next tokens into the batch, each with the state of the one before.

        `logits`: of all of them. Whether hidden states are of all tokens or of those with logits differs by
        model; so it is the same.
        """
        first = len(reader.tokens)
        tokens = job.tokens[first : first + n]
        self._batch.add(tokens, first, reader.id, logits=logits, every=logits, states=reader.states[:n])
        return tokens

    def _reader(self, job: Job) -> _Reader:
        """Return the sequence that reads a job, cut to what it has in common with it."""
        tokens = job.all_tokens
        reader = nearest(self._readers, job)
        if reader.job is not job:
            reader.job = job
            reader.states, reader.seen = reader.states[:0], reader.seen[:0]
        n = common_prefix(reader.tokens, tokens)
        if n < len(reader.tokens):
            self._remove(reader, n)
            reader.restart(tokens[:n])
        return reader

    def _forget(self, reader: _Reader) -> None:
        self._remove(reader, 0)
        reader.restart([])

    def _remove(self, reader: _Reader, first: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, reader.id, first, -1)

    def _decode(self) -> bool:
        """Evaluate the batch; whether that was possible."""
        code, context = self._batch.decode(self._ctx), _llama_cpp.address(self._ctx)
        spoiled = _core.take_not_finite(context)
        if code == 0 and not spoiled:
            return True
        if spoiled:
            log.warning("the MTP layer's values are not numbers: nothing is drafted")
        elif code != NO_CELLS:
            log.warning("llama_decode of the MTP layer returned %d", code)
        for reader in self._readers:
            if code != NO_CELLS or reader.job is None:
                self._forget(reader)
        if spoiled:
            _core.clear_unused(context)
        return False


def make_mtp_head(llm: Llama, draft_model: Llama | None, parallel: int) -> MtpHead:
    """Return what drafts with the model's own MTP layer.

    Raises:
        ValueError: a draft model is given too, or the model has no such layer.
    """
    if draft_model is not None:
        raise ValueError('speculation: "mtp" needs no draft model: leave draft_model out')
    return MtpHead(llm, parallel)


_MTP = 1  # LLAMA_CONTEXT_TYPE_MTP, of llama_context_type
