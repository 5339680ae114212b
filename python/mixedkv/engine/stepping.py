"""Evaluates the steps that the scheduler plans, and chooses the next tokens, on the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mixedkv.constrain.constraint import Mask
from mixedkv.engine.batch.batch import Batch
from mixedkv.engine.batch.vector_job import take_hidden
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.engine.connectors.kv_connector import KVConnector
from mixedkv.engine.draft.speculation import Speculation
from mixedkv.engine.inbox import Outbox
from mixedkv.engine.jobs.job import AnswerState, Delta, Failed, Job
from mixedkv.engine.restore import Restorer
from mixedkv.engine.sample.sampler import Sampler, logits_row, logprob_of
from mixedkv.engine.schedule.contract import Observer, PartRun, Run, StepPlan
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.engine.text.thought import Thought
from mixedkv.errors import NotFiniteError, RowsGoneError, not_finite_at
from mixedkv.llama import Llama
from mixedkv.native.batch import NO_CELLS
from mixedkv.native.detokenizer import Detokenizer
from mixedkv.prompts.overflow import cut, head_of

log = logging.getLogger("mixedkv.engine")


_MANY = 16  # answers in a row


class NotFiniteCount:
    """Counts answers that ended since the model's values were no numbers, among all that ended.

    Attributes:
        n: since the beginning.
    """

    def __init__(self) -> None:
        self.n = self._n_all = self._n_in_row = 0

    def add(self, value: bool) -> None:
        self.n, self._n_all = self.n + value, self._n_all + 1
        self._n_in_row = self._n_in_row + 1 if value else 0

    @property
    def is_broken(self) -> bool:
        """True if the model seems to give no numbers at all: none of its answers was good, or none of the
        last ones. A single prompt that overflows says nothing of others.
        """
        return self._n_in_row >= min(_MANY, max(1, self._n_all))


class Stepper:
    """Evaluates the steps that the scheduler plans, and chooses the answers' tokens from their logits.

    Args:
        width: size of the vectors that the model takes in place of tokens; 0 for a model that takes tokens.
        n_ctx: tokens that an answer and its prompt may have.
        tokenizer, detokenizer: None for a model without vocabulary.

    Attributes:
        n_steps: since the beginning.
        last, last_seconds: what the latest step evaluated, and how long it took.
        slowest_seconds: how long the slowest step took.
        not_finite: answers that ended since the model's values were no numbers.
    """

    def __init__(
        self,
        llm: Llama,
        scheduler: Scheduler[Job],
        outbox: Outbox,
        observer: Observer,
        speculation: Speculation,
        connector: KVConnector,
        tokenizer: Tokenizer | None,
        detokenizer: Detokenizer | None,
        width: int,
        n_ctx: int,
    ) -> None:
        self._llm, self._scheduler, self._outbox, self._observer = llm, scheduler, outbox, observer
        self._speculation, self._connector = speculation, connector
        self._tokenizer, self._detokenizer = tokenizer, detokenizer
        self._n_ctx, self._width = n_ctx, width
        self._restorer = Restorer(llm.kv, scheduler, observer)
        self._batch = Batch(llm.n_batch, width)
        self.n_steps = 0
        self.last, self.last_seconds = StepPlan[Job](), 0.0
        self.slowest_seconds = 0.0
        self.not_finite = NotFiniteCount()

    def advance(self, jobs: Sequence[Job]) -> None:
        """Admit new jobs and evaluate one step."""
        began = time.perf_counter()
        scheduler = self._scheduler
        scheduler.add(jobs)
        scheduler.drop_cancelled()
        scheduler.admit()
        self._fail_unstartable()
        if scheduler.running:
            try:
                self._step(began)
            except Exception as error:
                log.exception("a step failed")
                self._abandon(scheduler.running, error)

    def fail_all(self, error: Exception) -> None:
        """End every job with this error."""
        self._outbox.put(*((job, Failed(error)) for job in self._scheduler.clear()))

    def _step(self, began: float) -> None:
        self._restorer.restore()
        self._fail_unstartable()
        step, code = self._decode(self._scheduler.plan())
        if code == NO_CELLS and step.n_drafts:  # drafts are given up before any job
            step, code = self._decode(self._scheduler.plan(), drafts=False)
        while code == NO_CELLS:
            self._preempt()
            step, code = self._decode(self._scheduler.plan(), drafts=False)
        if not (step.runs or step.parts):
            return
        if code != 0:
            self._undo(code)
            return
        self._set_spoiled(step)
        if self._width:
            take_hidden(self._llm.ctx, step)
        self._speculation.evaluated(step)
        self._scheduler.evaluated(step)
        for index, run in step.outputs():
            try:
                self._answer(run, index)
            except Exception as error:
                if run.job in self._scheduler.running:
                    self._abandon([run.job], error)
                else:
                    log.exception("an answer is complete, and its rows are not stored")
                    run.job.store_failed(error)
        for part_run in step.parts:  # this overwrites the logits, which have been used by now
            self._evaluate_part(part_run, step)
        self.n_steps += 1
        self.last, self.last_seconds = step, time.perf_counter() - began
        self.slowest_seconds = max(self.slowest_seconds, self.last_seconds)
        self._speculation.took(step, self.last_seconds)
        self._scheduler.took(step, self.last_seconds)

    def _decode(self, step: StepPlan[Job], drafts: bool = True) -> tuple[StepPlan[Job], int]:
        """Evaluate a step; return it with llama_decode's code."""
        if drafts:
            self._speculation.plan(step)
        self._batch.set_runs(step.runs)
        if not step.runs:
            return step, 0
        return step, self._batch.decode(self._llm.ctx, self._llm.kv, needed_logits(step))

    def _undo(self, code: int) -> None:
        """End the answers of a step that llama_decode did not evaluate, with the error for its code."""
        self._abandon(self._scheduler.running, self._llm.decode_error(code))

    def _set_spoiled(self, step: StepPlan[Job]) -> None:
        """Take the rows of jobs for which a step gave values that are no numbers. One that was alone ends
        with an error; where several were spoiled, one may have spoiled the others, which llama.cpp's
        attention does: each is evaluated again by itself.
        """
        found = self._llm.kv.take_not_finite()
        if not found:
            return
        spoiled = [run for run in step.runs if run.job.seq is not None and run.job.seq.id in found]
        for run in spoiled:
            run.spoiled = True
            assert run.job.seq is not None
            if run.job.alone or (len(spoiled) == 1 and not run.drafts):
                error = not_finite_at(found[run.job.seq.id])
                log.error("an answer ends: %s", error)
                self._abandon([run.job], error)
            else:
                self._scheduler.evaluate_alone(run.job)
        self._llm.kv.clear_unused()

    def _answer(self, run: Run[Job], index: int) -> None:
        """Choose a job's next tokens from the step's logits. A draft is accepted if the sampler chooses the
        same token.
        """
        job, n = run.job, 0
        if not job.work.evaluated:
            job.work.evaluated = True
            self._observer.prompt_done(job)
            try:
                self._connector.evaluated(job, index)
            except Exception as error:
                log.exception("a connector failed, and the answer goes on")
                job.store_failed(error)
        if job.answer.sampler is None or job.n_answer >= job.request.max_tokens:
            self._finish(job, "length")
            return
        assert self._tokenizer is not None
        assert self._detokenizer is not None
        while True:
            delta, end = go_on(job, self._llm.ctx, index + n, self._detokenizer, self._observer, self._n_ctx)
            if delta is not None:
                self._outbox.put((job, delta))
            if end or n == len(run.drafts) or job.tokens[-1] != run.drafts[n]:
                break
            n += 1
        job.alone = False
        self._speculation.record_acceptance(run, n)
        if end:
            self._finish(job, end)
        elif job.request.slides:
            make_room(job, self._tokenizer, self._scheduler, self._n_ctx)

    def _evaluate_part(self, run: PartRun[Job], step: StepPlan[Job]) -> None:
        """Evaluate a part of a job's prompt, or a slice of it. The step counts what was evaluated: one that
        only loaded rows must not look as if its tokens took no time.
        """
        job, scheduler = run.job, self._scheduler
        if job.seq is None or job.part is not run.part:  # it gave way to another one
            return
        found = run.part.evaluate(self._llm, job.prompt, job.n_rows, job.seq.id, run.n)
        if found.n_evaluated is not None and run.n:
            step.n_prompt += max(1, found.n_evaluated) - run.n
        if found.state == "done":
            scheduler.part_done(run, found.n_reused)
        elif found.state == "no cells":
            if found.leaves_rows:
                scheduler.pool.clear(job.seq)
            self._preempt()
        elif found.state == "given up":
            log.warning("%s: their tokens are evaluated instead: %s", run.part.kind, found.error)
            self._observer.restore_failed(run.part.kind)
            scheduler.give_up_parts(job)
        elif found.state == "failed":
            assert found.error is not None
            self._abandon([job], found.error)
            if isinstance(found.error, NotFiniteError):
                self._llm.kv.clear_unused()

    def _preempt(self) -> None:
        """Free cells. An answer that is alone and has used them up has to end."""
        if (last := self._scheduler.preempt()) is not None:
            self._finish(last, "length")

    def _finish(self, job: Job, reason: str) -> None:
        done = job.finish(reason)
        try:
            self._scheduler.leave(job)
        finally:
            if job not in self._scheduler.running:  # else it is abandoned, with the error
                self._outbox.put((job, done))
        self._observer.finished(job, reason)
        self.not_finite.add(False)
        if job.request.store:
            self._connector.offload(job)

    def _abandon(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in list(jobs):
            self._outbox.put((job, Failed(error)))
            try:
                self._scheduler.abandon(job)
            except Exception:  # what fails may be the context itself, and the other jobs have to end too
                log.exception("the rows of an answer that failed were not freed")
            self._observer.failed(job, error)
            self.not_finite.add(isinstance(error, NotFiniteError))

    def _fail_unstartable(self) -> None:
        gone = RowsGoneError("the rows before these vectors have gone")
        self._outbox.put(*((job, Failed(gone)) for job in self._scheduler.pop_unstartable()))


def needed_logits(step: StepPlan[Job]) -> Mask | None:
    """Return the tokens that the step's choices can fall on; None if all logits are read."""
    found: Mask | None = None
    for run in step.runs:
        job, answer = run.job, run.job.answer
        tells = job.request.n_logprobs is not None or answer.prompt_logprobs is not None
        if not (run.chooses or tells):
            continue
        # a connector may read a prompt's logits
        if tells or answer.sampler is None or not job.work.evaluated:
            return None
        thought = answer.thought
        if thought is not None and (thought.open or thought.may_begin >= 0 or run.drafts):
            return None
        mask = answer.sampler.possible_tokens(run.drafts)
        if mask is None:
            return None
        found = mask if found is None else found | mask
    return found


def make_room(job: Job, tokenizer: Tokenizer, scheduler: Scheduler[Job], n_ctx: int) -> None:
    """Drop the middle of an answer when the context has no room for its next token."""
    if not job.request.slides or len(job.tokens) < n_ctx:
        return
    starts = tokenizer.message_starts(job.all_tokens)
    head = job.dropped_tokens.begin if job.dropped_tokens is not None else head_of(starts, n_ctx)
    scheduler.drop(job, head, cut(len(job.tokens), head, n_ctx, starts))
    scheduler.give_way(job)


def go_on(
    job: Job, context: Any, index: int, detokenizer: Detokenizer, observer: Observer, n_ctx: int
) -> tuple[Delta | None, str]:
    """Choose a job's next token from the logits of the batch's token `index`. Return the text that is certain
    now, and why the answer ends here, "" if it does not.

    Raises:
        DeadEndError: the job's constraint allows no token.
    """
    answer, request = job.answer, job.request
    n_thought = answer.n_thought
    token = next_token(job, context, index, detokenizer)
    thinks = answer.n_thought > n_thought
    now = time.perf_counter()
    observer.token(job, now)
    job.work.chose(now)
    if token in answer.stop_tokens or (detokenizer.is_end(token) and not request.ignore_end):
        if request.n_logprobs is not None and request.prompt_logprobs is not None:
            row = logits_row(context, index, detokenizer.n_vocab)
            answer.end_by(logprob_of(row, token, request.n_logprobs))
        return None, "stop"
    text = token_bytes(answer, token, detokenizer)
    delta = _add(job, token, text, context, index, detokenizer, thinks)
    if answer.text.stopped:
        return delta, "stop" if answer.text.stopped_by else "length"
    is_full = len(job.tokens) >= n_ctx and not request.slides
    is_late = answer.out_of_time(text, now - (job.work.t_first or now))
    return delta, "length" if job.n_answer >= request.max_tokens or is_full or is_late else ""


def next_token(job: Job, context: Any, index: int, detokenizer: Detokenizer) -> int:
    """Choose from the logits of the batch's token `index`. A constraint applies after a thought only.

    Raises:
        DeadEndError: the job's constraint allows no token.
    """
    answer = job.answer
    assert answer.sampler is not None
    thought = answer.thought
    token = thought.forced() if thought is not None and not answer.text.within_character else None
    if token is not None:
        answer.sampler.accept(token)
    else:
        token = _choose(job, answer.sampler, context, index, detokenizer)
    follow(answer, token_bytes(answer, token, detokenizer))
    return token


def follow(answer: AnswerState, text: bytes) -> None:
    """Update the answer's thought and call trigger with the next text. A call within a thought does not
    count.
    """
    thought, trigger = answer.thought, answer.trigger
    thinks = thought is not None and thought.open
    if thought is not None:
        thought.take(text)
    if trigger is not None and not thinks and (matcher := trigger.take(text)) is not None:
        assert answer.sampler is not None
        answer.sampler.hold_to(matcher)


def _choose(job: Job, sampler: Sampler, context: Any, index: int, detokenizer: Detokenizer) -> int:
    """Draw the answer's next token. Inside a thought the constraint does not apply yet; a token that would
    break off there is replaced by the one that closes the thought.
    """
    answer, never = job.answer, None
    if job.n_answer < job.request.min_tokens:
        never = np.array([*detokenizer.ends, *answer.stop_tokens], np.int32)
    thought = answer.thought
    if thought is None:
        return sampler.sample(context, index, never=never)
    token = sampler.sample(context, index, free=thought.open, also=thought.may_begin, never=never)
    if sampler.constrained and _breaks_off(answer, thought, token, detokenizer):
        return thought.close()
    return token


def _breaks_off(answer: AnswerState, thought: Thought, token: int, detokenizer: Detokenizer) -> bool:
    """Return whether the constrained part would be missing, or begin within this token."""
    if not thought.open:
        return False
    return detokenizer.is_end(token) or thought.ends_within(token_bytes(answer, token, detokenizer))


def _add(
    job: Job, token: int, text: bytes, context: Any, index: int, detokenizer: Detokenizer, thinks: bool
) -> Delta | None:
    """Add a token with its text to the answer and return the text that is certain now. Those of thoughts have
    no log probability: the others are then those of the text, as OpenAI has them.
    """
    answer, n_top, logprob = job.answer, job.request.n_logprobs, None
    if n_top is not None and not thinks and job.request.post_sampling and answer.sampler is not None:
        logprob = answer.sampler.left(token, n_top)
    elif n_top is not None and not thinks:
        logprob = logprob_of(logits_row(context, index, detokenizer.n_vocab), token, n_top)
    job.tokens.append(token)
    if answer.drafter is not None:
        answer.drafter.take(token)
    return answer.add(token, text, logprob)


def token_bytes(answer: AnswerState, token: int, detokenizer: Detokenizer) -> bytes:
    """Return a token's text in this answer."""
    return detokenizer.name(token) if token in answer.shown else detokenizer[token]
