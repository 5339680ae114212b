"""Several tokens of an answer in one step: drafts are evaluated with the last token, and those count that the
sampler then chooses.

At each draft the answer's own sampler chooses from the logits there, as it would without drafts, and goes on
as long as it chooses the draft. So the distribution is the model's, a seed makes the same choices, and what
was rejected was never seen by penalties, constraints or stop strings. The rows of rejected drafts are taken
back, which leaves no trace for as many as the cache is made for (`n_draft`).

A draft is made where it is worth its time: where the chance that it comes, for its share of a step's time, is
better than what the step gives without it. Both are measured. With many answers at work a step takes as long
as it has tokens, and there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from mixedkv.config import MixedKVConfig
from mixedkv.engine.drafter import Drafter
from mixedkv.engine.observer import Observer
from mixedkv.engine.scheduler import Run, Step
from mixedkv.llama import Llama

Mode = Literal["off", "prompt-lookup"]

_MOST = 16  # drafts of an answer in a step, where the cache sets no bound
_DECAY = 0.95  # what the steps before the latest one count
_WEIGHTS = 8  # tokens' worth of time that a step is taken to need for reading weights, before it is measured
_DOUBT = 0.1  # drafts squared: how much that counts beside measures
_LEAST = 1 / 64  # of a step's time: no draft costs less
_LATE = 4.0  # a step that takes so many times what was expected says nothing


class StepTime:
    """What drafts cost: a straight line through the times of the latest steps over their drafts.

    Args:
        n_streams: answers in these steps.
    """

    def __init__(self, n_streams: int) -> None:
        self._first = 1 / (n_streams + _WEIGHTS)  # a draft's share of a step
        self._n = self._drafts = self._seconds = self._squares = self._products = 0.0

    def observe(self, n_drafts: int, seconds: float) -> None:
        """Take the measure of a step."""
        if self._n:
            alone, each = self.line()
            seconds = min(seconds, _LATE * (alone + n_drafts * each))
        self._n = self._n * _DECAY + 1
        self._drafts = self._drafts * _DECAY + n_drafts
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + n_drafts * n_drafts
        self._products = self._products * _DECAY + n_drafts * seconds

    def line(self) -> tuple[float, float]:
        """Seconds of a step without drafts, and of each draft; after one step at least."""
        drafts, seconds = self._drafts / self._n, self._seconds / self._n
        spread = self._squares / self._n - drafts * drafts
        slope = self._products / self._n - drafts * seconds
        # where little is known, which it is again after long without drafts, what is taken for granted counts
        each = (slope + _DOUBT * self._share(self._first)) / (spread + _DOUBT)
        each = max(each, self._share(_LEAST))
        return max(seconds - each * drafts, each), each

    def _share(self, share: float) -> float:
        """Seconds of a draft that takes a share of a step without drafts."""
        return self._seconds / self._n * share / (1 + self._drafts / self._n * share)


class Speculation:
    """Drafts of all answers of a context. `drafter` is for any thread, the rest for the engine's.

    Args:
        mode: of answers that do not say.

    Attributes:
        why_off: why this model and cache take no drafts; "" where they do.
    """

    def __init__(self, llm: Llama, mode: Mode, observer: Observer) -> None:
        self.mode, self.why_off = mode, _why_off(llm)
        self.n_drafted = self.n_accepted = 0
        config = llm.kv.config
        self._most = min(_MOST, config.n_draft) if isinstance(config, MixedKVConfig) else _MOST
        self._room = min(llm.n_batch, int(llm.context_params.n_ubatch))  # one micro-batch: see `settle`
        self._kv, self._n_ctx, self._observer = llm.kv, int(llm.n_ctx()), observer
        self._times: dict[int, StepTime] = {}  # by the number of answers in a step

    def drafter(
        self, prompt: Iterable[int], mode: Mode | None = None, prediction: Iterable[int] = ()
    ) -> Drafter | None:
        """For the answer to a prompt; None where nothing is to be drafted.

        Args:
            mode: None for that of the engine.
            prediction: what the answer may be; drafts are then made in any mode.
        """
        prediction = list(prediction)
        if self.why_off or ((mode or self.mode) == "off" and not prediction):
            return None
        return Drafter(map(int, prompt), prediction)

    def stats(self) -> dict[str, str | int]:
        """Tokens that were drafted and that came so far; `why_off` is "" where drafts can be made."""
        return {
            "mode": self.mode,
            "why_off": self.why_off,
            "drafted_tokens": self.n_drafted,
            "accepted_tokens": self.n_accepted,
        }

    def plan(self, step: Step) -> None:
        """Add drafts to a step that has no prompts, which would take the time for themselves."""
        time = self._times.get(step.n_streams)
        if step.n_prompt or time is None:
            return
        runs = [run for run in step.runs if run.job.drafter is not None and run.job.n_answer]
        offers = [self._offer(run) for run in runs]
        gains = sorted(
            ((rate ** (i + 1), k) for k, (drafts, rate) in enumerate(offers) for i in range(len(drafts))),
            reverse=True,
        )
        tokens, (seconds, each) = float(step.n_streams), time.line()
        counts = [0] * len(runs)
        for gain, k in gains[: self._room - step.n_streams]:
            if gain * seconds <= each * tokens:
                break
            tokens, seconds = tokens + gain, seconds + each
            counts[k] += 1
        for run, (drafts, _), n in zip(runs, offers, counts, strict=True):
            run.drafts = drafts[:n]
            step.n_drafts += n

    def _offer(self, run: Run) -> tuple[list[int], float]:
        """What may come in an answer, and how likely each of it is."""
        job = run.job
        assert job.drafter is not None
        assert job.sampler is not None
        left = min(job.max_tokens - job.n_answer, self._n_ctx - len(job.tokens))
        thinks = job.thought is not None and job.thought.open  # a constraint holds for what comes after
        return job.drafter.draft(min(self._most, left - 1), [] if thinks else job.sampler.certain())

    def settle(self, run: Run, n: int) -> None:
        """The first `n` drafts of a job have come: they are part of its sequence, the others leave it.

        They were all in one micro-batch: a sliding window has given up nothing that the token after the last
        one needs.
        """
        job = run.job
        if not run.drafts:
            return
        assert job.seq is not None
        assert job.drafter is not None
        job.seq.tokens.extend(run.drafts[:n])
        if n < len(run.drafts):
            self._kv.remove(job.seq.id, len(job.seq.tokens))
        for counted in (self, job.drafter):
            counted.n_drafted += len(run.drafts)
            counted.n_accepted += n
        self._observer.speculated(len(run.drafts), n)

    def took(self, step: Step, seconds: float) -> None:
        """How long a step was."""
        if step.n_streams and not step.n_prompt:
            time = self._times.setdefault(step.n_streams, StepTime(step.n_streams))
            time.observe(step.n_drafts, seconds)


def _why_off(llm: Llama) -> str:
    if not llm.kv.can_cut:
        return "recurrent layers keep a state of the whole sequence: drafts could not be taken back"
    config = llm.kv.config
    if isinstance(config, MixedKVConfig) and config.n_draft < 1:
        return "n_draft=0: drafts that are rejected would shorten the F16 window"
    return ""
