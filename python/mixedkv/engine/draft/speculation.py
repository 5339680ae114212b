"""Evaluates several tokens of an answer in one step: drafts are evaluated with the last token, and those that
the sampler chooses are accepted.

At each draft the answer's own sampler chooses from the logits there, as it would without drafts, and
continues as long as it chooses the draft. So the distribution is the model's, a seed gives the same choices,
and penalties, constraints and stop strings never see a rejected draft. The rows of rejected drafts are
removed, which leaves no trace: windows hold their F16 rows that much longer.

A draft is made if it is worth its time: if its chance of being accepted, divided by its share of a step's
time, is better than the rate without it. Both are measured. With many running answers the time of a step is
proportional to its tokens, and there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mixedkv import _core
from mixedkv.engine.draft.sources import SOURCES, DraftingModel, modes
from mixedkv.engine.jobs.drafter import Drafter
from mixedkv.engine.jobs.job import AnswerState, Job
from mixedkv.engine.schedule.contract import Observer, Run, StepPlan
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp

_MOST = _core.DRAFTS_KEPT  # maximum drafts of an answer in a step
_DECAY = 0.95  # weight of earlier steps at each new one
_WEIGHTS = 8  # initial estimate of the time to read the weights, in tokens' worth of time
_DOUBT = 0.1  # weight of the initial estimate, in drafts squared
_LEAST = 1 / 64  # least cost of a draft, as a share of a step's time
_LATE = 4.0  # a step that takes so many times the expected time is ignored


class StepTime:
    """Estimates what drafts cost: a straight line through the times of the latest steps over their drafts.

    Args:
        n_streams: number of answers in these steps.
    """

    def __init__(self, n_streams: int) -> None:
        self._first = 1 / (n_streams + _WEIGHTS)  # a draft's share of a step
        self._n = self._drafts = self._seconds = self._squares = self._products = 0.0

    def observe(self, n_drafts: int, seconds: float) -> None:
        """Learn from the time of a step."""
        if self._n:
            alone, each = self.line()
            seconds = min(seconds, _LATE * (alone + n_drafts * each))
        self._n = self._n * _DECAY + 1
        self._drafts = self._drafts * _DECAY + n_drafts
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + n_drafts * n_drafts
        self._products = self._products * _DECAY + n_drafts * seconds

    def line(self) -> tuple[float, float]:
        """Return the seconds of a step without drafts and of each draft. At least one step must be known."""
        drafts, seconds = self._drafts / self._n, self._seconds / self._n
        spread = self._squares / self._n - drafts * drafts
        slope = self._products / self._n - drafts * seconds
        # with few measurements, as after a long time without drafts, the initial estimate counts
        each = (slope + _DOUBT * self._share(self._first)) / (spread + _DOUBT)
        each = max(each, self._share(_LEAST))
        return max(seconds - each * drafts, each), each

    def _share(self, share: float) -> float:
        """Return the seconds of a draft that takes a share of a step without drafts."""
        return self._seconds / self._n * share / (1 + self._drafts / self._n * share)


@dataclass(frozen=True, slots=True)
class _Offer:
    """An offer of drafts: up to `n` tokens, each with the chance `rate` if those before it are right.

    `drafts` is None where a `DraftingModel` makes them, as many as are requested.
    """

    run: Run[Job]
    n: int
    rate: float
    drafts: list[int] | None


class Speculation:
    """Manages the drafts of all answers of a context. `drafter` is for any thread, the rest for the engine's.

    Args:
        mode: mode for requests that name none: "off", or one of `SOURCES`.
        draft_model: makes drafts that cannot be looked up, for requests in the mode "draft-model".
        parallel: answers at a time.

    Raises:
        ValueError: there is no such mode, or what it needs is missing or cannot draft for this model.

    Attributes:
        why_off: why this model and cache allow no drafts; "" if they do.
    """

    def __init__(
        self,
        llm: Llama,
        mode: str,
        observer: Observer,
        draft_model: Llama | None = None,
        parallel: int = 1,
    ) -> None:
        _check_name(mode)
        self.mode, self.why_off = mode, _why_off(llm)
        drafts = mode != "off" and SOURCES[mode].model is not None
        self._model_mode = mode if drafts else "draft-model" if draft_model is not None else ""
        make = SOURCES[self._model_mode].model if self._model_mode else None
        self._model: DraftingModel | None = make(llm, draft_model, parallel) if make is not None else None
        self.n_drafted = self.n_accepted = 0
        self._most = _most(llm)
        self._together = not llm.kv.can_cut  # snapshots of a state are those of the latest micro-batch
        # one micro-batch: see `record_acceptance`
        self._room = min(llm.n_batch, int(llm.context_params.n_ubatch))
        self._kv, self._n_ctx, self._observer = llm.kv, int(llm.n_ctx()), observer
        self._times: dict[int, StepTime] = {}  # by the number of answers in a step

    def drafter(
        self, prompt: Iterable[int], mode: str | None = None, prediction: Iterable[int] = ()
    ) -> Drafter | None:
        """Return a drafter for the answer to a prompt; None if nothing is to be drafted.

        Args:
            mode: None for that of the engine.
            prediction: tokens that the answer may contain; drafts are then made in any mode.

        Raises:
            ValueError: there is no such mode, or this engine lacks what it needs.
        """
        prediction, mode = list(prediction), mode or self.mode
        _check_name(mode)
        by_model = mode != "off" and SOURCES[mode].model is not None
        if by_model and mode != self._model_mode:
            raise ValueError(f'speculation: "{mode}" {SOURCES[mode].missing}')
        if self.why_off or (mode == "off" and not prediction):
            return None
        tokens = [int(token) for token in prompt]
        guesses = {
            name: source.guesses(tokens, prediction)
            for name, source in SOURCES.items()
            if source.guesses is not None and (source.in_every_mode or name == mode)
        }
        return Drafter(guesses, by_model)

    def stats(self) -> dict[str, str | int]:
        """Return how many tokens were drafted and accepted so far, and `why_off`."""
        return {
            "mode": self.mode,
            "why_off": self.why_off,
            "drafted_tokens": self.n_drafted,
            "accepted_tokens": self.n_accepted,
        }

    def plan(self, step: StepPlan[Job]) -> None:
        """Add drafts to a step without prompts; a step with prompts has no time for them."""
        self._read_along(step)
        time = self._times.get(step.n_streams)
        if step.n_prompt or time is None:
            return
        runs = [run for run in step.runs if run.job.answer.drafter is not None and run.job.n_answer]
        runs = [run for run in runs if not run.job.alone]  # a draft may be what gives no numbers
        offers = [self._offer(run) for run in runs]
        counts = self._profitable_counts(offers, step.n_streams, time)
        if self._together:
            counts = [min(counts) if len(runs) == step.n_streams else 0 for _ in counts]
        self._make([(offer, n) for offer, n in zip(offers, counts, strict=True) if n])
        if self._together:
            n = min((len(run.drafts) for run in runs), default=0)
            for run in runs:
                run.drafts = run.drafts[:n]
        step.n_drafts = sum(len(run.drafts) for run in runs)

    def _read_along(self, step: StepPlan[Job]) -> None:
        """Let the drafting model evaluate the tokens of the step's jobs."""
        if self._model is not None:
            drafted = ((run.job, run.job.answer.drafter) for run in step.runs)
            jobs = [job for job, drafter in drafted if drafter is not None and drafter.by_model]
            self._model.read(jobs, step.n_prompt)

    def _profitable_counts(self, offers: Sequence[_Offer], n_streams: int, time: StepTime) -> list[int]:
        """Return how many drafts to take from each offer, the likeliest first.

        A draft is worth it if it adds tokens at a better rate than the step has without it.
        """
        gains = sorted(
            ((offer.rate ** (i + 1), k) for k, offer in enumerate(offers) for i in range(offer.n)),
            reverse=True,
        )
        tokens, (seconds, each) = float(n_streams), time.line()
        counts = [0] * len(offers)
        for gain, k in gains[: self._room - n_streams]:
            if gain * seconds <= each * tokens:
                break
            tokens, seconds = tokens + gain, seconds + each
            counts[k] += 1
        return counts

    def _offer(self, run: Run[Job]) -> _Offer:
        job, answer = run.job, run.job.answer
        assert answer.drafter is not None
        left = min(job.request.max_tokens - job.n_answer, self._n_ctx - len(job.tokens))
        most = min(self._most, left - 1)
        drafts, rate = answer.drafter.draft(most, _certain(answer))
        if self._model is not None and answer.drafter.model_rate > (rate if drafts else 0.0):
            return _Offer(run, max(0, most), answer.drafter.model_rate, None)
        return _Offer(run, len(drafts), rate, drafts)

    def _make(self, requested: list[tuple[_Offer, int]]) -> None:
        """Add the drafts to their runs."""
        for offer, n in requested:
            if offer.drafts is not None:
                offer.run.drafts = offer.drafts[:n]
        for_model = [(offer.run, n) for offer, n in requested if offer.drafts is None]
        if for_model:
            assert self._model is not None
            made = self._model.draft([(run.job, n) for run, n in for_model])
            for (run, _), drafts in zip(for_model, made, strict=True):
                assert run.job.answer.drafter is not None
                run.drafts = drafts
                run.job.answer.drafter.modelled(drafts)

    def close(self) -> None:
        """Free what was made for drafting; the draft model stays open."""
        if self._model is not None:
            self._model.close()

    def evaluated(self, step: StepPlan[Job]) -> None:
        """Pass on a step that the model has just evaluated."""
        if self._model is not None:
            self._model.evaluated(step)

    def record_acceptance(self, run: Run[Job], n: int) -> None:
        """Keep the rows of a job's first `n` drafts and remove those of the others.

        They were all in one micro-batch, so a sliding window still has all rows that the next token needs.
        """
        job = run.job
        if not run.drafts:
            return
        assert job.seq is not None
        assert job.answer.drafter is not None
        job.seq.tokens.extend(run.drafts[:n])
        if n < len(run.drafts):
            self._kv.remove(job.seq.id, len(job.seq.tokens))
        for counted in (self, job.answer.drafter):
            counted.n_drafted += len(run.drafts)
            counted.n_accepted += n
        self._observer.speculated(len(run.drafts), n)

    def took(self, step: StepPlan[Job], seconds: float) -> None:
        """Learn from the time that a step took."""
        if step.n_streams and not step.n_prompt:
            time = self._times.setdefault(step.n_streams, StepTime(step.n_streams))
            time.observe(step.n_drafts, seconds)


def _check_name(mode: str) -> None:
    if mode not in modes():
        raise ValueError(f"speculation={mode!r}: use one of {', '.join(modes())}")


def _certain(answer: AnswerState) -> Sequence[int]:
    """Return the tokens that must come next in an answer, as the first source that knows some says."""
    for source in SOURCES.values():
        if source.certain is not None and (tokens := source.certain(answer)):
            return tokens
    return ()


def _most(llm: Llama) -> int:
    """The maximum number of drafts of an answer in a step: those that can be removed without a trace."""
    return _MOST if llm.kv.can_cut else min(_MOST, _llama_cpp.n_rollback(llm))


def _why_off(llm: Llama) -> str:
    if _most(llm) < 1:
        return (
            "recurrent layers keep a state of the whole sequence: drafts can be taken back with n_rs_seq only"
        )
    return ""
