"""The engine: one thread owns the context and answers many jobs at once.

Each step evaluates one token of every running answer and a slice of the prompts that wait, all in one
`llama_decode`. Jobs join and leave between steps. The thread talks to the outside through an inbox and
through `post`, which gets the events of a step all at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mixedkv import _llama_cpp
from mixedkv.engine.batch import Batch
from mixedkv.engine.detokenizer import Pieces
from mixedkv.engine.inbox import ClosedError, Inbox
from mixedkv.engine.job import Event, Failed, Job
from mixedkv.engine.observer import Observer
from mixedkv.engine.pacing import Pace, share
from mixedkv.engine.sampler import logits_row, logprob_of
from mixedkv.engine.sequences import NO_MATCH, Match, Sequence, SequencePool
from mixedkv.llama import Llama
from mixedkv.tokens import common_prefix

log = logging.getLogger("mixedkv.engine")

_NO_CELLS = 1  # llama_decode: no free cells for the batch; nothing has changed
_WAIT_FOR = 32  # tokens that another job is about to evaluate and that are worth waiting for
_HEADROOM = 32  # cells an answer needs at the start besides its prompt


class EngineError(RuntimeError):
    """Evaluation failed; the answer is lost, the engine goes on."""


class QueueFullError(RuntimeError):
    """As many jobs wait as may."""


Post = Callable[[list[tuple[Job, Event]]], None]


def _post_directly(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        job.deliver(event)


class Engine:
    """Continuous batching on a `Llama` made with kv_unified=True and n_seq_max sequences.

    Args:
        llm: owned by the engine from now on; closed by `close`.
        parallel: answers at a time, fewer than the context's sequences: the others hold idle prefixes.
        max_queue: jobs that may wait.
        slowdown: how much longer a step of running answers may take because of prompts.
        exact_only: reuse only rows that equal those of an evaluation from the start.
        observe: gets the measures.
        post: gets events; the default calls `job.deliver` on the engine's thread.

    Attributes:
        fetch: called with a new job on the submitting thread; True when it takes care of the job and will
            call `ready` later (a look into the store).
        keep: called on the engine's thread with a job whose rows are complete (to store them).
    """

    def __init__(
        self,
        llm: Llama,
        *,
        parallel: int,
        max_queue: int = 256,
        slowdown: float = 2.0,
        exact_only: bool = True,
        observe: Observer | None = None,
        post: Post = _post_directly,
    ) -> None:
        n_seq = llm.context_params.n_seq_max
        if not 1 <= parallel < min(n_seq, llm.n_batch + 1):
            raise ValueError(
                f"parallel={parallel}: use fewer than the context's {n_seq} sequences, "
                f"and n_batch={llm.n_batch} at most"
            )
        if not llm.context_params.kv_unified:
            raise ValueError("kv_unified=False: sequences can share rows in a unified cache only")
        self.llm, self.parallel, self.max_queue = llm, parallel, max_queue
        self.n_ctx = int(llm.n_ctx())
        self.pieces = Pieces(_llama_cpp.vocab(llm))
        self.observe = observe or Observer()
        self.post = post
        self.fetch: Callable[[Job], bool] | None = None
        self.keep: Callable[[Job], None] | None = None
        self.pool = SequencePool(llm.kv, n_seq, llm.kv.config.window, exact_only=exact_only)
        self._batch = Batch(llm.n_batch)
        self._pace = Pace(llm.n_batch, slowdown)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._events: list[tuple[Job, Event]] = []
        self._inbox = Inbox()
        self._fetching: set[Job] = set()
        self._draining = False
        self.n_steps = 0
        self._thread = threading.Thread(target=self._run, name="mixedkv-engine", daemon=True)

    # --- any thread ---

    def start(self) -> Engine:
        self._thread.start()
        return self

    @property
    def n_queued(self) -> int:
        """Jobs that have no sequence yet, those the store is asked about included."""
        return len(self._inbox) + len(self._waiting) + len(self._fetching)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._inbox.closed

    def submit(self, jobs: list[Job], force: bool = False) -> None:
        """Queue jobs, all or none.

        Raises:
            QueueFullError: max_queue jobs wait; not with `force`.
            ClosedError: the engine is shutting down.
            ValueError: a prompt is empty or does not fit the context.
        """
        for job in jobs:
            if not 1 <= job.n_prompt < self.n_ctx:
                raise ValueError(
                    f"the prompt has {job.n_prompt} tokens, the context takes 1 to {self.n_ctx - 1}: "
                    f"shorten the prompt or serve with a larger n_ctx"
                )
        if self._inbox.closed or self._draining:
            raise ClosedError("the server is shutting down")
        room = self.max_queue + max(0, self.parallel - self.n_running) - self.n_queued
        if not force and len(jobs) > room:
            raise QueueFullError(f"{self.n_queued} requests wait already")
        for job in jobs:
            self._submit(job)

    def _submit(self, job: Job) -> None:
        if self.fetch is not None and job.reuse:
            self._fetching.add(job)
            if self.fetch(job):
                return
            self._fetching.discard(job)
        self._put(job)

    def ready(self, job: Job) -> None:
        """What `fetch` has taken can start."""
        self._put(job)
        self._fetching.discard(job)

    def cancel(self, job: Job) -> None:
        """Stop working on a job; its place is free before the next step. No further event is delivered."""
        job.cancelled = True
        self._inbox.wake()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the engine's thread between two steps."""
        return self._inbox.call(function)

    def drain(self, timeout: float) -> bool:
        """Take no more jobs and wait for those at work; cancel what is left after `timeout` seconds.

        Returns whether all could finish.
        """
        self._draining = True
        end = time.monotonic() + timeout
        while (self._running or self.n_queued) and time.monotonic() < end and self.alive:
            time.sleep(0.01)
        finished = not (self._running or self.n_queued)
        if not finished and self.alive:
            self.call(lambda: self._fail_all(ClosedError("the server is shutting down"))).result()
        return finished

    def close(self) -> None:
        """Stop the thread and free the model. Jobs at work get a ClosedError."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join()
        self.llm.close()

    def _put(self, job: Job) -> None:
        try:
            self._inbox.put(job)
        except ClosedError as error:
            self.post([(job, Failed(error))])

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while not self._inbox.closed:
                self._one_round()
        except BaseException:
            log.exception("the engine stops: this is a bug, please report it")
            self._inbox.close()
            raise
        finally:
            self._fail_all(ClosedError("the server is shutting down"))

    def _one_round(self) -> None:
        if not self._running:  # with jobs waiting only a call can change something: look again soon
            self._inbox.wait(0.01 if self._waiting else None)
        # one call a step while answers run: what a call takes, every stream waits
        while self._inbox.answer_call() and not self._running:
            pass
        began = time.perf_counter()
        self._waiting.extend(self._inbox.take())
        self._sweep()
        self._admit()
        if self._running:
            try:
                self._step(began)
            except Exception as error:
                log.exception("a step failed")
                self._abandon(self._running, error)
        self._flush()

    def _sweep(self) -> None:
        """Let go of cancelled jobs."""
        for job in [job for job in self._running if job.cancelled]:
            self._leave(job)
            self.observe.cancelled(job)
        if any(job.cancelled for job in self._waiting):
            for job in self._waiting:
                if job.cancelled:
                    job.close()
                    self.observe.cancelled(job)
            self._waiting = deque(job for job in self._waiting if not job.cancelled)

    # --- admission ---

    def _admit(self) -> None:
        """Give places to waiting jobs in their order, past those that wait for another's prompt."""
        for job in list(self._waiting):
            if len(self._running) >= self.parallel:
                return
            if job.reuse and self._comes_soon(job):
                continue
            if not self._start(job):
                return
            self._waiting.remove(job)

    def _comes_soon(self, job: Job) -> bool:
        """A running job is about to evaluate what this one can then share."""
        here = self.pool.match(job.tenant, job.prompt).n
        for other in self._running:
            if other.tenant == job.tenant and other.n_rows < other.n_prompt and other.seq is not None:
                n = min(common_prefix(other.prompt, job.prompt), job.n_prompt - 1)
                if n - max(here, other.n_rows, job.n_fetched) >= _WAIT_FOR:
                    return self._worth_it(other, n)
        return False

    def _worth_it(self, other: Job, n: int) -> bool:
        """Only rows that can be shared are worth waiting for: a mixed cache needs a copy at that length."""
        if n >= other.n_prompt - 1:
            return True
        if self.pool.exact_only and not self.pool.window.cut_is_exact(other.n_prompt, n):
            other.snapshot_at = other.snapshot_at or n
            return other.snapshot_at == n
        return True

    def _start(self, job: Job) -> bool:
        """Give a job a sequence and the rows that are there for it; False when there is no room."""
        match = self.pool.match(job.tenant, job.all_tokens) if job.reuse else NO_MATCH
        if job.n_fetched < match.n + _WAIT_FOR:
            job.forget_blocks()
        elif job.n_fetched:
            match = Match(None, 0, job.blocks_exact, 0)
        if not self._make_room(len(job.tokens) - match.n + _HEADROOM, match.source):
            return False
        seq = self.pool.acquire(job.tenant, match)
        if seq is None:
            return False
        job.seq, job.exact = seq, job.exact and seq.exact
        if job.n_cached is None:  # not after a preemption
            job.n_cached = match.n
            if not job.blocks:
                job.cached_tier = "context" if match.n else ""
            job.t_start = time.perf_counter()
            if job.sampler is not None:
                job.sampler.accept_prompt(job.prompt[-64:].tolist())
            self.observe.started(job)
        if match.approximate > match.n:
            job.snapshot_at = match.approximate
        self._running.append(job)
        return True

    def _make_room(self, n_cells: int, spare: Sequence | None) -> bool:
        """Evict idle prefixes until `n_cells` are free besides what running prompts still need."""
        while True:
            promised = sum(job.n_remaining for job in self._running)
            if self.pool.cells_used() + promised + n_cells <= self.n_ctx:
                return True
            if not self.pool.evict(spare):
                # alone it may have what there is; else it waits until another answer is done
                return not self._running
            self.observe.evicted()

    # --- a step ---

    def _step(self, began: float) -> None:
        self._restore()
        outputs = self._fill()
        n_streams = len(self._batch) - self._n_prompt_tokens
        code = self._batch.decode(self.llm.ctx) if len(self._batch) else 0
        while code == _NO_CELLS:
            self._relieve()
            outputs = self._fill()
            code = self._batch.decode(self.llm.ctx) if len(self._batch) else 0
        if not len(self._batch):
            return
        if code != 0:
            self._abandon(self._running, EngineError(f"llama_decode returned {code}"))
            return
        self._account()
        for job, index in outputs:
            try:
                self._choose(job, index)
            except Exception as error:
                self._abandon([job], error)
        self.n_steps += 1
        seconds = time.perf_counter() - began
        self._pace.observe(n_streams, self._n_prompt_tokens, seconds)
        self.observe.step(n_streams, self._n_prompt_tokens, seconds)

    def _fill(self) -> list[tuple[Job, int]]:
        """Compose the batch; which job's next token comes from which of its rows."""
        self._batch.clear()
        outputs, self._runs = [], []
        for job in self._running:
            if job.n_remaining == 1:
                outputs.append((job, self._add(job, 1)))
        n_streams = len(self._batch)
        prompts = [job for job in self._running if job.n_remaining > 1 and not job.blocks]
        budget = min(self._pace.budget(n_streams, len(prompts)), self._batch.room)
        for job, n in zip(prompts, share(budget, [job.n_remaining for job in prompts]), strict=True):
            n = job.up_to_snapshot(n)
            if n:
                index = self._add(job, n)
                if n == job.n_remaining:
                    outputs.append((job, index))
        self._n_prompt_tokens = len(self._batch) - n_streams
        return outputs

    def _add(self, job: Job, n: int) -> int:
        assert job.seq is not None
        first = job.n_rows
        self._runs.append((job, n))
        return self._batch.add(job.tokens[first : first + n], first, job.seq.id, logits=n == job.n_remaining)

    def _account(self) -> None:
        """The batch's tokens have rows now."""
        for job, n in self._runs:
            assert job.seq is not None
            job.seq.tokens.extend(job.tokens[job.n_rows : job.n_rows + n])
            if job.n_rows == job.snapshot_at:
                self.pool.snapshot(job.seq)
                job.snapshot_at = 0

    def _choose(self, job: Job, index: int) -> None:
        """Take a job's next token from the step's logits, or end the job."""
        if not job.evaluated:
            job.evaluated = True
            self.observe.prompt_done(job)
        if job.sampler is None or job.n_answer >= job.max_tokens:
            self._finish(job, "length")
            return
        token = job.sampler.sample(self.llm.ctx, index)
        now = time.perf_counter()
        self.observe.token(job, now)
        job.t_first, job.t_last = job.t_first or now, now
        if self.pieces.is_end(token) and not job.ignore_end:
            self._finish(job, "stop")
            return
        logprob = None
        if job.n_logprobs is not None:
            row = logits_row(self.llm.ctx, index, self.pieces.n_vocab)
            logprob = logprob_of(row, token, job.n_logprobs)
        job.tokens.append(token)
        delta = job.take(self.pieces[token], logprob)
        if delta is not None:
            self._events.append((job, delta))
        if job.text.stopped:
            self._finish(job, "stop")
        elif job.n_answer >= job.max_tokens or len(job.tokens) >= self.n_ctx:
            self._finish(job, "length")

    def _restore(self) -> None:
        """Load one block from the store: a long chain is spread over steps."""
        job = next((job for job in self._running if job.blocks), None)
        if job is None:
            return
        assert job.seq is not None
        block = job.blocks.pop(0)
        try:
            self.llm.kv.load(block, seq=job.seq.id)
            job.seq.tokens.extend(block.tokens.tolist())
        except Exception as error:  # what is not restored is evaluated
            log.warning("a stored block could not be loaded: %s", error)
            self.observe.restore_failed("load")
            job.forget_blocks()
        if not job.evaluated:  # not after a preemption
            job.n_cached = job.n_rows
        if not job.blocks:
            self.observe.restored(job)

    # --- under pressure ---

    def _relieve(self) -> None:
        """Free cells for a step that found none: of an idle prefix, else of the youngest answer."""
        if self.pool.evict():
            self.observe.evicted()
        elif len(self._running) > 1:
            self._preempt(self._running[-1])
        else:
            self._finish(self._running[0], "length")

    def _preempt(self, job: Job) -> None:
        """Take a job's rows and let it go on later from its tokens."""
        assert job.seq is not None
        self._running.remove(job)
        self.pool.drop(job.seq)
        job.seq = None
        self._waiting.appendleft(job)
        self.observe.preempted()

    # --- leaving ---

    def _finish(self, job: Job, reason: str) -> None:
        done = job.finish(reason)
        self._leave(job)
        self._events.append((job, done))
        self.observe.finished(job, reason)
        if self.keep is not None and job.store:
            self.keep(job)

    def _leave(self, job: Job) -> None:
        """A job's place is free; its rows stay as an idle prefix."""
        self._running.remove(job)
        assert job.seq is not None
        if job.seq.tokens:
            self.pool.release(job.seq, job.keep and not job.cancelled, job.session)
        else:
            self.pool.drop(job.seq)
        job.close()

    def _abandon(self, jobs: list[Job], error: Exception) -> None:
        """These jobs cannot go on, and their rows are not to be trusted."""
        for job in list(jobs):
            self._running.remove(job)
            if job.seq is not None:
                self.pool.drop(job.seq)
            job.close()
            self._events.append((job, Failed(error)))
            self.observe.failed(job)

    def _fail_all(self, error: Exception) -> None:
        self._waiting.extend(self._inbox.take())
        for job in [*self._running, *self._waiting]:
            job.close()
            self._events.append((job, Failed(error)))
        self._running, self._waiting = [], deque()
        self._inbox.fail_calls(error)
        self._flush()

    def _flush(self) -> None:
        """Hand out the events of this round."""
        if self._events:
            events, self._events = self._events, []
            events = [(job, event) for job, event in events if not job.cancelled]
            try:
                self.post(events)
            except Exception:
                log.exception("events could not be delivered")
