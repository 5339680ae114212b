"""Guesses what may come next in one answer, and how likely that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mixedkv.prompts.prompt_lookup import PromptLookup

_FIRST = 0.5  # how often a guess is taken to be right before it is measured
_LEARN = 0.15  # weight of the latest guess in the average
_FORGET = 0.01
_MOST = 0.98


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
    """Drafts the tokens of one answer: those that its constraint forces, else those that followed when the
    last tokens occurred before.

    It guesses at every token, whether drafts are evaluated or not, so it knows how good they would be. The
    guesses of a draft model take time, so only those that were tried are known.

    Args:
        prompt: tokens in which repetitions are looked up.
        prediction: tokens that the answer may contain, looked up as well.
        by_model: a draft model or MTP layer drafts as well.
    """

    def __init__(self, prompt: Iterable[int], prediction: Iterable[int] = (), by_model: bool = False) -> None:
        self._lookup, self.by_model = PromptLookup(prompt, prediction), by_model
        self._rates = {"lookup": _Rate(), "certain": _Rate(_MOST), "model": _Rate()}
        self._guesses: dict[str, int] = {}
        self._modelled: list[int] = []  # what the draft model said comes next
        self.n_drafted = self.n_accepted = 0

    def copy(self) -> Drafter:
        """Return a drafter for another answer to the same prompt, as it stands before its first token."""
        other = Drafter((), by_model=self.by_model)
        other._lookup = self._lookup.copy()
        return other

    def draft(self, most: int, certain: Sequence[int] = ()) -> tuple[list[int], float]:
        """Return up to `most` tokens, and how likely each is to come if those before it do.

        Args:
            certain: tokens of the text that the constraint forces; the model may tokenize it differently.
        """
        drafts = {"certain": list(certain[:most]), "lookup": self._lookup.draft(most)}
        self._guesses = {kind: tokens[0] for kind, tokens in drafts.items() if tokens}
        kind = "certain" if certain else "lookup"
        return drafts[kind], self._rates[kind].value

    @property
    def model_rate(self) -> float:
        """Estimated probability that a draft of the draft model is right; 0 if there is no draft model."""
        return self._rates["model"].value if self.by_model else 0.0

    def modelled(self, drafts: Sequence[int]) -> None:
        """Note the drafts that the draft model made. No draft, as it was not sure, counts as a wrong one."""
        self._modelled = list(drafts)
        if not drafts:
            self._rates["model"].learn(False)

    def take(self, token: int) -> None:
        """Note the answer's next token."""
        if self._modelled:
            right = self._modelled.pop(0) == token
            self._rates["model"].learn(right)
            if not right:
                self._modelled = []
        else:
            self._rates["model"].forget()
        for kind, guess in self._guesses.items():
            self._rates[kind].learn(guess == token)
        self._lookup.add(token)
        self._guesses = {"lookup": drafts[0]} if (drafts := self._lookup.draft(1)) else {}
