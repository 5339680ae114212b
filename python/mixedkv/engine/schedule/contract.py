"""The scheduler's contract: what it is given and what it decides. Nothing here knows a model or a thread.

The engine gives requests at work (`Progress`), the cache's sequences (`SequenceMemory`, by a `SequencePool`),
and how long steps take. One round of the engine is

    scheduler.add(new)           they wait
    scheduler.drop_cancelled()
    scheduler.admit()            who gets a sequence, and from which existing rows it starts
    plan = scheduler.plan()      what the step evaluates: a `StepPlan`
    ... `plan.runs` are evaluated in one llama_decode; without free cells: scheduler.preempt(), and plan again
    scheduler.evaluated(plan)    the tokens have rows now
    ... tokens are chosen; who has its whole answer: scheduler.leave(one)
    ... `plan.parts` are evaluated, each in decodes of its own: scheduler.part_done(...) where one is done
    scheduler.took(plan, seconds)
    scheduler.save()             checkpoints that are due, while the answers are on their way
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mixedkv.engine.schedule.progress import Progress
from mixedkv.prompts.part import PromptPart

P = TypeVar("P", bound=Progress)


@dataclass(slots=True)
class Run(Generic[P]):
    """The next `n` tokens of a job. If it `chooses`, the token after them is sampled from the last one's
    logits. `drafts` may follow them, each with logits too. Where it is `spoiled` the step gave values for it
    that are no numbers, and it has no rows of them.
    """

    job: P
    n: int
    chooses: bool
    drafts: list[int] = field(default_factory=list)
    spoiled: bool = False


@dataclass(frozen=True, slots=True)
class PartRun(Generic[P]):
    """A part of a job's prompt, which may take about `n` tokens of the step's budget."""

    job: P
    part: PromptPart
    n: int


@dataclass(slots=True)
class StepPlan(Generic[P]):
    """The work of a step: one token each of `n_streams` answers, `n_drafts` draft tokens after these, and
    `n_prompt` tokens of prompts, those of `parts` included.
    """

    runs: list[Run[P]] = field(default_factory=list)
    n_streams: int = 0
    n_prompt: int = 0
    n_drafts: int = 0
    parts: list[PartRun[P]] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.n_streams + self.n_prompt + self.n_drafts

    def outputs(self) -> Iterator[tuple[int, Run[P]]]:
        """Yield the runs whose next token can be sampled, each with the row of its logits in the batch. The
        rows of its drafts follow.
        """
        end = 0
        for run in self.runs:
            end += run.n
            if run.chooses and not run.spoiled:
                yield end - 1, run
            end += len(run.drafts)


class Observer:
    """Receives events on the engine's thread. A subclass overrides the methods it needs."""

    def started(self, job: Progress) -> None:
        """Note that a job has a sequence."""

    def prompt_done(self, job: Progress) -> None:
        """Note that the prompt is evaluated; `n_cached` and `cached_tier` are final."""

    def token(self, job: Progress, now: float) -> None:
        """Note that a token was chosen. `t_last` is still the time of the token before it, None for the
        first.
        """

    def finished(self, job: Progress, reason: str) -> None: ...

    def cancelled(self, job: Progress) -> None: ...

    def failed(self, job: Progress, error: Exception) -> None: ...

    def step(self, n_streams: int, n_prompt: int, seconds: float) -> None: ...

    def speculated(self, n_drafted: int, n_accepted: int) -> None:
        """Count the tokens of a job that were drafted in a step, and those that were accepted."""

    def evicted(self) -> None: ...

    def paused(self) -> None:
        """Note that an answer was paused in favour of another tenant's."""

    def preempted(self) -> None: ...

    def restored(self, job: Progress) -> None:
        """Note that the rows fetched for a job are in the context."""

    def restore_failed(self, reason: str) -> None: ...

    def stored(self, n_tokens: int) -> None: ...

    def checked(self, kld: float, is_off: bool) -> None:
        """Note that an answer with reused chunks was also evaluated exactly: its divergence in nats, and
        whether the reuse of chunks is now off. Not called on the engine's thread.
        """

    def store_failed(self, reason: str) -> None: ...

    def rechecked(self, problem: str) -> None:
        """Count tokens of stored rows that were evaluated again, and what is wrong with the rows, "" if
        nothing is.
        """

    # --- embeddings: the first two on the event loop ---

    def embedding_requests(self, n: int) -> None:
        """Change the number of running and waiting requests for vectors."""

    def embedded(self, outcome: str, seconds: float) -> None:
        """Note how a request for vectors ended: "stop", "abort" or "error"."""

    def embedded_span(self, n_tokens: int, ends: bool) -> None:
        """Count evaluated tokens; `ends` says that their input is complete and has its vector."""

    def embedding_slice(self, seconds: float) -> None:
        """Note how long running answers waited for a slice, in seconds."""
