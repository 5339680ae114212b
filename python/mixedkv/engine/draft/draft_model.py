"""Drafts with a smaller model of the same vocabulary: speculative decoding (https://arxiv.org/abs/2211.17192)
with greedy drafts.

The draft model evaluates the same tokens as the engine's model: in a step with prompts as many tokens as that
step has of them, otherwise a few, so that catching up with a long history delays nobody.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import llama_cpp
import numpy as np

from mixedkv.engine.batch.batch import Batch
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.sample.sampler import logits_row
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.batch import NO_CELLS
from mixedkv.tokens import Tokens, common_prefix

log = logging.getLogger(__name__)

_CATCH_UP = 64  # tokens in a step without prompts
_LAST = 16  # tokens that an answer may be behind when it is drafted; without drafts nothing is read
_SURE = 0.4  # drafting stops after a draft of lower probability
_MOST_EXTRA = 128  # difference in size that vocabularies may have, as in llama.cpp


@dataclass(slots=True, eq=False)
class _Follower:
    """A sequence of the draft model's context, and the tokens that have rows there."""

    id: int
    tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    job: Job | None = None


class DraftModel:
    """Makes greedy drafts for many answers at a time, on the engine's thread.

    Args:
        llm: the model that answers.
        model: the model that drafts, used by nobody else until the engine is closed.
        parallel: maximum number of answers at a time; `model` needs as many sequences.

    Raises:
        ValueError: `model` has another vocabulary or too few sequences, or cannot take tokens back.
    """

    def __init__(self, llm: Llama, model: Llama, parallel: int) -> None:
        if model is llm:
            raise ValueError("draft_model: it is the model that answers: load a smaller one")
        n_seq = int(model.context_params.n_seq_max)
        if n_seq < parallel or (n_seq > 1 and not model.context_params.kv_unified):
            raise ValueError(
                f"draft_model: it has {n_seq} sequences for {parallel} answers at a time: load it with "
                f"n_seq_max={parallel}, kv_unified=True"
            )
        if not model.kv.can_cut:
            raise ValueError("draft_model: its recurrent layers cannot take drafts back: use another one")
        _check_vocabulary(llm, model)
        self._model, self._n_vocab = model, min(llm.n_vocab(), model.n_vocab())
        self._n_ctx = int(model.n_ctx())
        self._batch = Batch(model.n_batch)
        self._followers = [_Follower(i) for i in range(parallel)]
        model.kv.clear()

    def read(self, jobs: Iterable[Job], n_prompt: int) -> None:
        """Evaluate further tokens of the running jobs: `n_prompt` in all, or a few if that is 0. The last
        tokens of a job are left for `draft`.
        """
        jobs = list(jobs)
        for follower in self._followers:
            if follower.job not in jobs:
                follower.job = None
        room = min(max(n_prompt, _CATCH_UP), self._batch.n_max)
        self._batch.clear()
        read = []
        for job in jobs:
            if len(job.tokens) >= self._n_ctx:
                continue
            follower = self._follower(job)
            first = len(follower.tokens)
            n = min(room, len(job.tokens) - first - _LAST)
            if n > 0:
                self._batch.add(job.tokens[first : first + n], first, follower.id, logits=False)
                room -= n
                read.append((follower, job.tokens[first : first + n]))
        if read and self._decode():
            for follower, tokens in read:
                follower.tokens = np.append(follower.tokens, np.array(tokens, np.int32))

    def draft(self, requested: Sequence[tuple[Job, int]]) -> list[list[int]]:
        """Return up to the given number of drafts for each job; none for a job that was not read yet."""
        drafts: list[list[int]] = [[] for _ in requested]
        at_work = []
        for (job, n), made in zip(requested, drafts, strict=True):
            if len(job.tokens) + n <= self._n_ctx:
                follower = self._follower(job)
                left = job.tokens[len(follower.tokens) :]
                if n > 0 and len(left) <= min(_LAST, self._batch.n_max // len(requested)):
                    at_work.append((follower, left, n, made))
        while at_work:
            self._batch.clear()
            rows = [
                self._batch.add(tokens, len(follower.tokens), follower.id, logits=True)
                for follower, tokens, _, _ in at_work
            ]
            if not self._decode():
                break
            goes_on = []
            for row, (follower, tokens, n, made) in zip(rows, at_work, strict=True):
                follower.tokens = np.append(follower.tokens, np.array(tokens, np.int32))
                best = sure_guess(self._model.ctx, row, self._n_vocab)
                if best is None:
                    continue
                made.append(best)
                if len(made) < n:
                    goes_on.append((follower, array("i", [best]), n, made))
            at_work = goes_on
        return drafts

    def evaluated(self, step: StepPlan[Job]) -> None:
        """Do nothing: `read` has evaluated the tokens."""

    def close(self) -> None:
        """Do nothing: the draft model belongs to who loaded it."""

    def _follower(self, job: Job) -> _Follower:
        """Return the sequence that follows a job, cut to the tokens that they share."""
        tokens = job.all_tokens
        follower = nearest(self._followers, job)
        follower.job = job
        n = min(common_prefix(follower.tokens, tokens), len(tokens) - 1)
        if n < len(follower.tokens):
            self._model.kv.remove(follower.id, n)
            follower.tokens = follower.tokens[:n]
        return follower

    def _decode(self) -> bool:
        """Evaluate the batch; return whether that was possible."""
        code = self._batch.decode(self._model.ctx, self._model.kv)
        spoiled = self._model.kv.take_not_finite()
        if code == 0 and not spoiled:
            return True
        if spoiled:
            log.warning("the draft model's values are not numbers: nothing is drafted")
        elif code != NO_CELLS:  # free the rows of ended answers for the next step
            log.warning("the draft model's llama_decode returned %d", code)
        for follower in self._followers:
            if code != NO_CELLS or follower.job is None:
                self._model.kv.remove(follower.id)
                follower.tokens = follower.tokens[:0]
        if spoiled:
            self._model.kv.clear_unused()
        return False


def make_draft_model(llm: Llama, draft_model: Llama | None, parallel: int) -> DraftModel:
    """Return what drafts with `draft_model`.

    Raises:
        ValueError: there is none, or it cannot draft for `llm`.
    """
    if draft_model is None:
        raise ValueError('speculation: "draft-model" needs one: give the engine a draft_model')
    return DraftModel(llm, draft_model, parallel)


class _ReadsJob(Protocol):
    tokens: Tokens
    job: Job | None


_R = TypeVar("_R", bound=_ReadsJob)


def nearest(readers: Sequence[_R], job: Job) -> _R:
    """Return the sequence that follows the job, or the idle one that shares most tokens with it."""
    reader = next((reader for reader in readers if reader.job is job), None)
    if reader is not None:
        return reader
    tokens = job.all_tokens
    idle = [reader for reader in readers if reader.job is None]
    return max(idle or readers, key=lambda reader: common_prefix(reader.tokens, tokens))


def sure_guess(context: Any, row: int, n_vocab: int) -> int | None:
    """Return the likeliest token after a row of the latest batch; None if it is too unlikely to draft."""
    logits = logits_row(context, row, n_vocab)
    best = int(logits.argmax())
    return None if np.exp(logits - logits[best]).sum() * _SURE > 1.0 else best


def _check_vocabulary(llm: Llama, model: Llama) -> None:
    """Refuse a draft model with another vocabulary.

    Raises:
        ValueError: a token has a different text in the other vocabulary.
    """
    mine, other = _llama_cpp.vocab(llm), _llama_cpp.vocab(model)
    n_mine, n_other = llm.n_vocab(), model.n_vocab()
    kinds = [llama_cpp.llama_vocab_type(vocab) for vocab in (mine, other)]
    same = kinds[0] == kinds[1] and abs(n_mine - n_other) <= _MOST_EXTRA
    text = llama_cpp.llama_vocab_get_text
    if not same or any(text(mine, token) != text(other, token) for token in range(min(n_mine, n_other))):
        raise ValueError(
            f"draft_model: its vocabulary is not that of the model ({n_other} and {n_mine} tokens): use a "
            "smaller model of the same family"
        )
