"""The engine: one thread owns the context and answers many prompts at once.

Each step evaluates one token of every running answer and a slice of the prompts that wait, all in one
`llama_decode`. Jobs join and leave between steps. The thread talks to the outside through an inbox and
through `deliver`, which gets the events of a step all at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import llama_cpp

from mixedkv.engine.answer import Answer
from mixedkv.engine.batch.vector_job import VectorJob, vector_width
from mixedkv.engine.callers_turn import CallersStepper, CallersTurn, sequence_size
from mixedkv.engine.chat.chat_template import Chat, RenderedChat
from mixedkv.engine.chat.message_ends import message_ends
from mixedkv.engine.chat.tokenizer import Prompt, Tokenizer
from mixedkv.engine.connectors.kv_connector import KVConnector, NoConnector
from mixedkv.engine.draft.speculation import Speculation
from mixedkv.engine.inbox import Deliver, Inbox, Outbox, QueueRoom, Turns, deliver_directly
from mixedkv.engine.jobs.job import Failed, Job
from mixedkv.engine.prepare import check_alone, check_model, fit, lend, prepare
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.contract import Observer, StepPlan
from mixedkv.engine.schedule.pacing import SLOWDOWN, Pace
from mixedkv.engine.schedule.request import Request
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.engine.stepping import NotFiniteCount, Stepper
from mixedkv.errors import ClosedError, ContextBusyError, ContextLengthError
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.detokenizer import Detokenizer, stop_strings
from mixedkv.prefix.checkpoints import CheckpointLimits
from mixedkv.prefix.sequences import MIN_SHARED, Reuse, SequencePool
from mixedkv.prefix.sequences import Sequence as PoolSequence
from mixedkv.prompts.overflow import Overflow
from mixedkv.tokens import Tokens
from mixedkv.work.turns import Limits, unlimited

log = logging.getLogger("mixedkv.engine")

_CLOSING = "the engine is shutting down"

_T = TypeVar("_T")


class Engine:
    """Continuous batching on a `Llama` made with kv_unified=True and n_seq_max sequences.

    >>> llm = Llama("model.gguf", kv="mixed", n_ctx=8192, n_seq_max=16, kv_unified=True)
    >>> with Engine(llm) as engine:
    ...     answers = [engine.submit(prompt, max_tokens=64) for prompt in prompts]
    ...     for answer in answers:
    ...         print(answer.text)

    Args:
        llm: used by the engine alone until the engine is closed, and left open then. What its cache holds is
            dropped. Closing the `Llama` closes the engine first, and so does the end of the program.
        parallel: maximum number of answers at a time, fewer than the context's sequences, as the others hold
            idle prefixes. None: half of the sequences.
        max_queue: maximum number of waiting jobs per tenant.
        slowdown: how much longer a step of running answers may take because of prompts.
        exact_only: reuse only rows that equal those of an evaluation from the start.
        connector: fetches the KV of prompts and stores that of answers; closed with the engine.
        observer: gets the measures.
        deliver: gets events; the default calls `job.deliver` on the engine's thread.
        tokenizer: tokenizes texts and renders chats; None makes one from the model's own template.
        limits: returns the limits of a tenant, given its name; called on any thread. By default all tenants
            are equal.
        checkpoints: how many checkpoints are kept (the state of a sequence besides its rows), and where they
            are taken.
        speculation: mode for requests that name none: "prompt-lookup", "draft-model", "mtp" or "off".
        draft_model: model that drafts answers, used by the engine alone; with the same vocabulary and
            `parallel` sequences.
        turns: those of another engine on the same cores (`engine.turns`), so that they step alternately.
        threaded: step on a thread of the engine's own. Otherwise it steps on the threads that wait for its
            answers, one at a time in sequence 0 of any `Llama`, which others may use between two steps: see
            `CallersTurn`.

    Raises:
        ValueError: `llm` or `draft_model` has too few sequences or no unified cache, or they do not match.
    """

    def __init__(
        self,
        llm: Llama,
        *,
        parallel: int | None = None,
        max_queue: int = 256,
        slowdown: float = SLOWDOWN,
        exact_only: bool = True,
        connector: KVConnector | None = None,
        observer: Observer | None = None,
        deliver: Deliver = deliver_directly,
        tokenizer: Tokenizer | None = None,
        limits: Limits = unlimited,
        checkpoints: CheckpointLimits | None = None,
        speculation: str = "off",
        draft_model: Llama | None = None,
        turns: Turns | None = None,
        threaded: bool = True,
    ) -> None:
        parallel = check_model(llm, parallel) if threaded else check_alone(parallel)
        self.llm, self.parallel, self.threaded = llm, parallel, threaded
        self._connector = connector or NoConnector()
        self.n_ctx, self.width = int(llm.n_ctx()) if threaded else sequence_size(llm), vector_width(llm)
        self._n_train = int(llama_cpp.llama_model_n_ctx_train(_llama_cpp.model(llm)))
        if self.width == 0:  # a model without vocabulary takes only `VectorJob`s
            self.detokenizer = Detokenizer(_llama_cpp.vocab(llm))
            self.tokenizer = tokenizer or Tokenizer(llm)
            if threaded:
                self.tokenizer.prepare_constraints()
        self.observer = observer or Observer()
        self.pool = SequencePool(
            llm.kv,
            n_seq := llm.context_params.n_seq_max if threaded else 1,
            llm.kv.cut_rule,
            exact_only=exact_only,
            max_kept=max(1, (n_seq - parallel) // 2),
            limits=checkpoints if threaded else CheckpointLimits(per_sequence=0),
            min_shared=MIN_SHARED if threaded else 1,
            most_kept=lambda tenant: limits(tenant).kept,
            n_windows=llm.n_windows,
        )
        self.speculation = Speculation(llm, speculation, self.observer, draft_model, parallel)
        self.turns = turns or Turns()
        # a caller's step is a micro-batch, which Ctrl-C keeps
        n_batch = llm.n_batch if threaded else min(llm.n_batch, llama_cpp.llama_n_ubatch(llm.ctx))
        self._scheduler: Scheduler[Job] = Scheduler(
            self.pool,
            Pace(n_batch, slowdown),
            n_ctx=self.n_ctx,
            n_batch=n_batch,
            parallel=parallel,
            observer=self.observer,
            limits=limits,
        )
        self._outbox = Outbox(deliver)
        self._stepper = (Stepper if threaded else CallersStepper)(
            llm,
            self._scheduler,
            self._outbox,
            self.observer,
            self.speculation,
            self._connector,
            None if self.width else self.tokenizer,
            None if self.width else self.detokenizer,
            self.width,
            self.n_ctx,
        )
        self.callers_turn: CallersTurn | None = None
        if isinstance(self._stepper, CallersStepper):
            self.callers_turn = self._stepper.turn = CallersTurn(llm, self.pool, self._fail_running)
        self._inbox = Inbox()
        self._fetching: set[Job] = set()
        self.room = QueueRoom(
            self._scheduler, limits, max_queue, lambda: [*self._inbox.jobs(), *self._fetching.copy()]
        )
        self._closing_error: ClosedError | None = None  # the error for new jobs, once no more are taken
        self._submitting = threading.RLock()  # a job is either refused or in the inbox before closing begins
        self._closed, self._closing = False, threading.RLock()
        self._models = [llm] if draft_model is None else [llm, draft_model]
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="mixedkv-engine", daemon=True)
            llm.kv.clear()  # the pool assumes that all sequences are empty
        self._connector.attach(self)
        if self._thread is not None:
            self._thread.start()
            atexit.register(self.close)  # llama.cpp does not outlive the main thread
        lend(self._models, weakref.WeakMethod(self.close), alone=threaded)

    # --- any thread ---

    @property
    def n_queued(self) -> int:
        """Number of jobs without a sequence, including those whose KV is still being looked for."""
        return len(self._inbox) + len(self._scheduler.waiting) + len(self._fetching)

    @property
    def n_running(self) -> int:
        """Number of jobs that have a sequence."""
        return len(self._scheduler.running)

    @property
    def n_steps(self) -> int:
        """Number of steps since the engine began."""
        return self._stepper.n_steps

    @property
    def last_step(self) -> StepPlan[Job]:
        """Return what the latest step evaluated."""
        return self._stepper.last

    @property
    def last_step_seconds(self) -> float:
        """Seconds that the latest step took."""
        return self._stepper.last_seconds

    @property
    def slowest_step_seconds(self) -> float:
        """Seconds that the slowest step took."""
        return self._stepper.slowest_seconds

    @property
    def not_finite(self) -> NotFiniteCount:
        """Answers that ended since the model's values were no numbers."""
        return self._stepper.not_finite

    @property
    def thread_id(self) -> int | None:
        """`ident` of the engine's thread; None where it has none."""
        return self._thread.ident if self._thread is not None else None

    @property
    def has_work(self) -> bool:
        """True if a job runs, or waits for the engine's thread."""
        return bool(self._scheduler.running or self._scheduler.waiting or len(self._inbox))

    @property
    def alive(self) -> bool:
        """True while the engine takes jobs."""
        return (self._thread is None or self._thread.is_alive()) and not self._inbox.closed

    @property
    def idle(self) -> bool:
        """True if no job runs or waits."""
        return not (self.n_running or self.n_queued)

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = 256,
        stop: str | Sequence[str] = (),
        n_logprobs: int | None = None,
        tenant: str = "",
        reuse: bool | Reuse = True,
        reuse_options: object | None = None,
        speculation: str | None = None,
        prediction: str = "",
        overflow: Overflow = "refuse",
        session: str | None = None,
        message_id: str = "",
        named: Sequence[tuple[str, str]] = (),
        **sampling: Any,
    ) -> Answer:
        """Submit a prompt and return its answer, which is generated in the background.

        Args:
            prompt: a text, token ids, the messages of a chat, or a `Chat`, which may have tools and images:
                its answer is read by `Answer.message`.
            max_tokens: maximum length of the answer; None is what the context has room for, or a quarter of
                it where that is more.
            stop: a string that ends it, or several.
            n_logprobs: return logprobs, with this many of the likeliest tokens at each place; None for no
                logprobs.
            tenant: whose prompt it is; rows are shared within a tenant only.
            reuse: which existing rows the prompt may start from, see `Request`; False evaluates everything.
            reuse_options: how the connector finds rows that were computed elsewhere, as a `ChunkChoice` of a
                `ChunkConnector`; None uses its settings.
            speculation: "prompt-lookup", "draft-model", "mtp", "off", or None for the engine's.
            prediction: text that the answer may contain; where it does, tokens are checked instead of
                generated.
            overflow: "slide" drops the middle of a prompt that does not fit the context, see `Request`.
            session: what the stored KV goes away with, see `KVStore.remove`.
            message_id: the stored KV of the answer is found by it.
            named: ids and texts of the chat's messages, by which their stored KV is found; "" for no id.
            **sampling: fields of `Sampling`: temperature, top_p, seed, ...

        Raises:
            ValueError: the prompt is empty or too long, or an argument is invalid.
            QueueFullError: max_queue jobs of this tenant are waiting.
            ClosedError: the engine is shutting down.
        """
        if self.width:
            raise ValueError("a model without vocabulary takes vectors: use `submit_jobs` with a VectorJob")
        self._check_open()
        with self.llm.busy.pin():  # the tokenizer's vocabulary goes with the `Llama`
            tokens, chat = self.tokenizer.encode(prompt, long=overflow == "slide")
        if chat.constraint is not None:
            sampling["constraint"] = chat.constraint
        request = Request(
            prompt=tokens,
            max_tokens=max(self.n_ctx - len(tokens), self.n_ctx // 4) if max_tokens is None else max_tokens,
            sampling=Sampling(**sampling),
            tenant=tenant,
            session=session,
            message_ends=self.message_ends(named, chat.text, tokens),
            stop=[*stop_strings(stop), *chat.stops],
            stream=True,
            n_logprobs=n_logprobs,
            reuse=reuse,
            reuse_options=reuse_options,
            speculation=speculation,
            prediction=prediction,
            overflow=overflow,
            **(self._chat_fields(prompt, chat, len(tokens)) if isinstance(prompt, Chat) else {}),
        )
        (job,) = self.prepare([request])
        job.message_id = message_id
        answer = Answer(self, job, chat)
        self.submit_jobs([job])
        return answer

    def _chat_fields(self, prompt: Chat, chat: RenderedChat, n: int) -> dict[str, Any]:
        return {**self.tokenizer.answer_fields(chat, n), "parts": prompt.parts}

    def message_ends(
        self, messages: Sequence[tuple[str, str]], text: str, tokens: Sequence[int]
    ) -> list[tuple[str, int]]:
        """Return where the messages of a chat end in the tokens of its prompt, as `Request` takes it.

        Args:
            messages: ids and texts of the last messages of the chat; "" for one without an id.
            text, tokens: the prompt; other tokens may come before them.
        """
        return message_ends(messages, text, tokens, self.detokenizer)

    def prepare(self, requests: Sequence[Request], n: int = 1) -> list[Job]:
        """Return `n` jobs for each request, for `submit_jobs`. Each answer has a seed of its own.

        Raises:
            ContextLengthError: a prompt is empty or does not fit the context.
            ValueError: constraint, sampling, speculation, prediction or `reuse_options` cannot be followed;
                the message begins with the field.
        """
        for request in requests:
            self._connector.check(request)
        return prepare(requests, n, self.tokenizer, self.speculation, self.n_ctx, self._fit)

    def _fit(self, job: Job) -> None:
        """Drop the middle of a prompt that does not fit if it may slide, and refuse it otherwise. Called once
        for each job.

        Raises:
            ContextLengthError: a prompt is empty or does not fit the context.
        """
        if not job.fits:
            if not self.width:
                fit(job, self.tokenizer, self.n_ctx)
            self.check_prompt(job.n_cells)
            job.fits = True

    def submit_jobs(self, jobs: Sequence[Job], force: bool = False) -> None:
        """Queue jobs, all or none.

        Raises:
            QueueFullError: too many jobs of this tenant are waiting; never raised with `force`.
            ClosedError: the engine is shutting down.
            ContextLengthError: a prompt is empty or does not fit the context.
            ValueError: a job gives vectors to a model that takes tokens, or tokens to one that takes vectors;
                or it asks for rows that the engine's connector does not find.
        """
        for job in jobs:
            self._fit(job)
            if not self.threaded:
                job.prefix.least = 1  # nobody waits while it is loaded or stored
            if isinstance(job, VectorJob) != bool(self.width):
                raise ValueError("a model without vocabulary takes vectors, and no other one does")
            self._connector.check(job.request)
            if not self.width and not self.pool.rule.anywhere:
                job.boundaries = self.tokenizer.boundaries(job.prompt).tolist()
        with self._submitting:
            self._check_open()
            if not force:
                for tenant, n in Counter(job.tenant for job in jobs).items():
                    self.room.check(tenant, n)
            for job in jobs:
                self._fetch_or_put(job)

    def most_jobs(self, tenant: str) -> int:
        """Return the maximum number of running plus queued jobs per tenant."""
        return self.room.most(tenant)

    @property
    def closing_error(self) -> ClosedError | None:
        """The reason why no more jobs are taken; None while they are."""
        return self._closing_error or (ClosedError(_CLOSING) if self._inbox.closed else None)

    def _check_open(self) -> None:
        if (error := self.closing_error) is not None:
            raise error

    def check_prompt(self, n_tokens: int) -> None:
        """Refuse a prompt that has no room for an answer.

        Raises:
            ContextLengthError: the prompt is empty, or leaves no room for an answer.
        """
        if n_tokens == 0:
            raise ContextLengthError("the prompt is empty")
        if n_tokens >= self.n_ctx:
            longer = n_tokens < self._n_train
            remedy = f"a larger n_ctx, up to {self._n_train}" if longer else "a model with a longer context"
            raise ContextLengthError(
                f"the prompt has {n_tokens} tokens, which exceeds the available context size "
                f"({self.n_ctx - 1} tokens): shorten it, or use {remedy}",
                n_tokens,
                self.n_ctx - 1,
            )

    def connector_stats(self) -> dict[str, Any] | None:
        """Return the numbers that the connector reports about itself; None without one."""
        return self._connector.stats()

    def ready(self, job: Job) -> None:
        """Continue with a job for which the connector has finished looking for KV, or reading it."""
        self._put(job)
        self._fetching.discard(job)

    def cancel(self, job: Job) -> None:
        """Stop working on a job. No further event is delivered; its place is free before the next step."""
        job.cancelled = True
        self._inbox.wake()

    def stop(self, job: Job) -> None:
        """Cancel a job and store what was computed of it; its place is free when this returns."""

        def end() -> None:
            has_rows = job in self._scheduler.running
            self._scheduler.drop_cancelled()
            if has_rows and job.request.store:
                self._connector.offload(job)

        self.cancel(job)
        with contextlib.suppress(ClosedError, ContextBusyError):
            self.call(end).result()

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a function on the engine's thread between two steps; without one here, or after the step that
        is under way.
        """
        if self.callers_turn is None or self.callers_turn.stepping:
            return self._inbox.call(function)
        return self.callers_turn.call(function)

    def drive(self, until: Callable[[], object]) -> None:
        """Step on this thread until a condition holds, where the engine has no thread of its own."""
        if self.callers_turn is None:
            return
        while not until():
            self._check_open()
            had_work = self.has_work or self._inbox.has_calls
            self._one_round()
            if not (had_work or until()):
                raise RuntimeError("the engine has nothing to do, and no answer: please report it")
        if not self.has_work and self._inbox.has_calls:  # what is stored of an answer that has ended
            self._one_round()

    def drop_waiting(
        self, seq: PoolSequence, tenant: str, tokens: Tokens, begin: int, end: int, most_cut: int = 0
    ) -> Future[bool]:
        """Drop tokens [begin, end) of a sequence that waits for its next job, between two steps. The rows
        behind them move down, and keep what they had read of the dropped ones.

        Args:
            seq: where the job before left its rows.
            tenant: whose rows they are.
            tokens: that the sequence must have rows of.
            most_cut: how many rows behind these may be taken away first.

        Returns:
            Whether it was done. False where the rows are not there, or cannot be moved and have gone now.
        """
        scheduler = self._scheduler
        return self.call(lambda: scheduler.drop_waiting(seq, tenant, tokens, begin, end, most_cut))

    def drain(self, timeout: float, error: ClosedError | None = None) -> bool:
        """Refuse new jobs with `error`, wait for the others, and cancel those left after `timeout` seconds.
        Return whether all of them finished.
        """
        with self._submitting:
            error = self._closing_error = self._closing_error or error or ClosedError(_CLOSING)
        end = time.monotonic() + timeout
        while not self.idle and time.monotonic() < end and self.alive:
            time.sleep(0.01)
        if not (finished := self.idle) and self.alive:
            with contextlib.suppress(ClosedError):  # the engine has stopped by itself and failed all jobs
                self.call(lambda: self._fail_all(error)).result()
        return finished

    def close(self) -> None:
        """Cancel running jobs, let the connector finish, and stop the thread. The `Llama` stays open.

        Raises:
            RuntimeError: called on the engine's own thread, which cannot wait for itself.
        """
        if self._thread is not None and threading.current_thread() is self._thread:
            raise RuntimeError("an engine cannot be closed by what it calls: close it on another thread")
        with self._closing:  # a second caller, or one that was interrupted, returns when the thread has ended
            if self._closed:
                return
            try:
                if self._thread is None:
                    self._fail_all(ClosedError(_CLOSING))
                else:
                    self.drain(0)
                self._connector.close()
            finally:
                self._inbox.close()
                if self._thread is not None:
                    self._thread.join()
                    for model in self._models:
                        model.lend(False)
                self.speculation.close()
                self._closed = True
                atexit.unregister(self.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch_or_put(self, job: Job) -> None:
        """Have the connector look for a job's KV first, if it may start from any; else the job begins."""
        if job.prefix.reuse:
            self._fetching.add(job)
            if self._asks(job, lambda: self._connector.fetch(job)):
                return
            self._fetching.discard(job)
        self._put(job)

    def _put(self, job: Job) -> None:
        try:
            self._inbox.put(job)
        except ClosedError as error:
            self._outbox.deliver([(job, Failed(error))])

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
            self._fail_all(ClosedError(_CLOSING))

    def _one_round(self) -> None:
        scheduler, turn = self._scheduler, self.callers_turn
        if turn is None and not scheduler.running:
            # jobs that wait can only be helped by a call: look again soon
            self._inbox.wait(0.01 if scheduler.waiting else None)
        use = self.llm.busy.acquire if turn is None else turn
        with self.turns, use():
            # one call a step while answers run, as all streams wait for it
            while self._inbox.answer_call() and not scheduler.running:
                pass
            self._step([job for job in self._inbox.take() if not self._reads(job)])
        self._outbox.flush()
        if scheduler.to_save:
            with self.turns, use():
                scheduler.save()

    def _step(self, jobs: Sequence[Job]) -> None:
        turn = self.callers_turn
        if turn is None:
            self._stepper.advance(jobs)
            return
        for job in self._scheduler.running:
            if job.request.slides and len(job.tokens) == self.n_ctx - 1 and self._connector is not None:
                self._connector.offload(job)  # before its first tokens are dropped
        turn.stepping = True
        try:
            self._stepper.advance(jobs)
        finally:
            turn.stepping = False

    def _reads(self, job: Job) -> bool:
        """Return whether the connector reads KV that it found for a new job, which the context lacks. The job
        is then added later.
        """
        if job.prefix.offer is None or job.cancelled:
            return False
        self._fetching.add(job)
        if self._asks(job, lambda: self._connector.read(job, self._scheduler.match(job).n)):
            return True
        self._fetching.discard(job)
        return False

    def _asks(self, job: Job, connector: Callable[[], bool]) -> bool:
        """Return what the connector answers; where it fails, False, and the job is evaluated without it."""
        try:
            return connector()
        except Exception as error:
            log.exception("a connector failed, and its job is evaluated without stored KV")
            job.store_failed(error)
            return False

    def _fail_running(self, error: Exception) -> None:
        """Fail the jobs whose rows have gone."""
        for job in self._scheduler.running:
            job.store_problem = str(error)
        self._stepper.fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        self._scheduler.add(self._inbox.take())
        self._stepper.fail_all(error)
        self._inbox.fail_calls(error)
        self._outbox.flush()
