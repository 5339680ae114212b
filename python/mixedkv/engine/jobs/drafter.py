"""Guesses what may come next in one answer, and how likely that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mixedkv.prompts.prompt_lookup import PromptLookup

_FIRST = 0.5  # how often a guess is right, before anything is known
_LEARN = 0.15  # what the latest one counts
_FORGET = 0.01
_MOST = 0.98


class _Rate:
    """Estimates how often the guesses of one kind were right of late."""

    def __init__(self, value: float = _FIRST) -> None:
        self.value = value

    def learn(self, right: bool) -> None:
        self.value += _LEARN * (right * _MOST - self.value)

    def forget(self) -> None:
        """Forget a bad guess little by little: after many tokens it is worth another try."""
        self.value = max(self.value, min(_FIRST, self.value + _FORGET))


class Drafter:
    """Drafts of one answer: tokens that its constraint leaves no other choice than, else what followed when
    the same tokens stood there before.

    It guesses at each token, evaluated as a draft or not, so it knows how good these drafts would be without
    trying. A draft model's guesses cost something, and are known by what was tried.

    Args:
        prompt: what it looks guesses up in.
        prediction: what the answer may be, to be looked up too.
        by_model: a draft model or MTP layer guesses as well.
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
            certain: what a constraint allows alone, as tokens that the model may write otherwise.
        """
        drafts = {"certain": list(certain[:most]), "lookup": self._lookup.draft(most)}
        self._guesses = {kind: tokens[0] for kind, tokens in drafts.items() if tokens}
        kind = "certain" if certain else "lookup"
        return drafts[kind], self._rates[kind].value

    @property
    def model_rate(self) -> float:
        """Probability that a guess of the draft model is right; 0 where it makes none."""
        return self._rates["model"].value if self.by_model else 0.0

    def modelled(self, drafts: Sequence[int]) -> None:
        """Take the drafts that the draft model made; none, where it was not sure, count as a wrong guess."""
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
