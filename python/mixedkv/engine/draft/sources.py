"""The table of draft sources. A new one is a file with what drafts, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mixedkv.engine.draft.draft_model import make_draft_model
from mixedkv.engine.draft.mtp_head import make_mtp_head
from mixedkv.engine.jobs.drafter import Guesses
from mixedkv.engine.jobs.job import AnswerState, Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.llama import Llama
from mixedkv.prompts.prompt_lookup import PromptLookup


class DraftingModel(Protocol):
    """Drafts for all answers of an engine together, in decodes of its own. Methods run on the engine's
    thread.
    """

    def read(self, jobs: Iterable[Job], n_prompt: int) -> None:
        """Evaluate further tokens of running jobs, in a step with `n_prompt` tokens of prompts."""

    def draft(self, requested: Sequence[tuple[Job, int]]) -> list[list[int]]:
        """Return up to the given number of drafts for each job."""
        ...

    def evaluated(self, step: StepPlan[Job]) -> None:
        """Note that the answering model has just evaluated a step."""

    def close(self) -> None:
        """Free what was made for drafting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A way of drafting: at least one of `certain`, `guesses` and `model`.

    Attributes:
        certain: returns tokens that must come next in an answer. They are drafted before all guesses, in
            every mode.
        guesses: makes the guesses of one answer, given its prompt and a text that it may contain.
        in_every_mode: `guesses` are made in every mode, and for a request that gives such a text.
        model: makes what drafts for all answers of an engine, given the model that answers, the draft model
            if there is one, and the maximum number of answers. Raises ValueError if it cannot.
        missing: what to do about an engine without that.
    """

    certain: Callable[[AnswerState], Sequence[int]] | None = None
    guesses: Callable[[Iterable[int], Iterable[int]], Guesses] | None = None
    in_every_mode: bool = False
    model: Callable[[Llama, Llama | None, int], DraftingModel] | None = None
    missing: str = ""

    @property
    def is_mode(self) -> bool:
        """True if a request can ask for it, as its mode of speculation."""
        return self.guesses is not None or self.model is not None


def _forced(answer: AnswerState) -> Sequence[int]:
    """Return the tokens that an answer's constraint forces. It holds for what comes after a thought."""
    if answer.sampler is None or (answer.thought is not None and answer.thought.open):
        return ()
    return answer.sampler.certain()


SOURCES: dict[str, Source] = {
    "constraint": Source(certain=_forced),
    "prompt-lookup": Source(guesses=PromptLookup, in_every_mode=True),
    "draft-model": Source(model=make_draft_model, missing="needs one: give the engine a draft_model"),
    "mtp": Source(
        model=make_mtp_head,
        missing="must be set on the engine, since its layers read along from the start",
    ),
}


def modes() -> list[str]:
    """Return the modes of speculation that a request or an engine can name."""
    return ["off", *(name for name, source in SOURCES.items() if source.is_mode)]
