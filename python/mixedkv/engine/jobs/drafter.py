"""Drafts of one answer, and how often guesses were right lately. Nothing here knows who guesses."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

_FIRST = 0.5  # how often a guess is taken to be right before it is measured
_LEARN = 0.15  # weight of the latest guess in the average
_FORGET = 0.01
_MOST = 0.98


class Guesses(Protocol):
    """Guesses what comes next in one answer, from its tokens alone and in no time, as `PromptLookup` does."""

    def add(self, token: int) -> None:
        """Add the answer's next token."""

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next."""
        ...

    def copy(self) -> Guesses:
        """Return guesses for another answer to the same prompt."""
        ...


class _Rate:
    """Estimates how often recent guesses of one kind were right."""

    def __init__(self, value: float = _FIRST) -> None:
        self.value = value

    def learn(self, right: bool) -> None:
        self.value += _LEARN * (right * _MOST - self.value)

    def forget(self) -> None:
        """Move the estimate towards its first value, so that drafting is tried again after many tokens."""
        self.value = max(self.value, min(_FIRST, self.value + _FORGET))


class Drafter:
    """Drafts the tokens of one answer: those that are certain, else those of the guesses that were right most
    often.

    All guess at every token, whether drafts are evaluated or not, so it is known how good they would be. The
    guesses of a model take time, so only those that were tried are known.

    Args:
        guesses: what guesses, by name.
        by_model: a draft model or MTP layer drafts as well.

    Attributes:
        n_drafted, n_accepted: tokens that were drafted and evaluated, and those of them that were right.
    """

    def __init__(self, guesses: Mapping[str, Guesses] | None = None, by_model: bool = False) -> None:
        self._sources, self.by_model = dict(guesses or {}), by_model
        self._rates = {name: _Rate() for name in self._sources}
        self._certain, self._model = _Rate(_MOST), _Rate()
        self._guesses: dict[str, int] = {}  # the next token, by who guesses it
        self._guessed_certain: int | None = None
        self._modelled: list[int] = []  # what the model said comes next
        self.n_drafted = self.n_accepted = 0

    def copy(self) -> Drafter:
        """Return a drafter for another answer to the same prompt, as it stands before its first token."""
        return Drafter({name: source.copy() for name, source in self._sources.items()}, self.by_model)

    def draft(self, most: int, certain: Seq[int] = ()) -> tuple[list[int], float]:
        """Return up to `most` tokens, and how likely each is to come if those before it do.

        Args:
            certain: tokens of a text that must follow; the model may tokenize it differently.
        """
        drafts = {name: source.draft(most) for name, source in self._sources.items()}
        self._guesses = {name: tokens[0] for name, tokens in drafts.items() if tokens}
        self._guessed_certain = certain[0] if most > 0 and certain else None
        if certain:
            return list(certain[: max(0, most)]), self._certain.value
        best = max(self._guesses, key=lambda name: self._rates[name].value, default=None)
        return ([], 0.0) if best is None else (drafts[best], self._rates[best].value)

    @property
    def model_rate(self) -> float:
        """Estimated probability that a draft of the model is right; 0 if none drafts."""
        return self._model.value if self.by_model else 0.0

    def modelled(self, drafts: Seq[int]) -> None:
        """Note the drafts that the model made. No draft, as it was not sure, counts as a wrong one."""
        self._modelled = list(drafts)
        if not drafts:
            self._model.learn(False)

    def take(self, token: int) -> None:
        """Note the answer's next token."""
        if self._modelled:
            right = self._modelled.pop(0) == token
            self._model.learn(right)
            if not right:
                self._modelled = []
        else:
            self._model.forget()
        if self._guessed_certain is not None:
            self._certain.learn(self._guessed_certain == token)
            self._guessed_certain = None
        for name, guess in self._guesses.items():
            self._rates[name].learn(guess == token)
        self._guesses = {}
        for name, source in self._sources.items():
            source.add(token)
            if drafts := source.draft(1):
                self._guesses[name] = drafts[0]
