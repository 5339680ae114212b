"""What may come next in one answer, and how likely that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mixedkv.prompt_lookup import PromptLookup

_FIRST = 0.5  # how often a guess is right, before anything is known
_LEARN = 0.15  # what the latest one counts
_MOST = 0.98


class _Rate:
    """How often the guesses of one kind were right of late."""

    def __init__(self, value: float = _FIRST) -> None:
        self.value = value

    def learn(self, right: bool) -> None:
        self.value += _LEARN * (right * _MOST - self.value)


class Drafter:
    """Drafts of one answer: tokens that its constraint leaves no other choice than, else what followed when
    the same tokens stood there before.

    It guesses at each token, evaluated as a draft or not, so it knows how good drafts would be without
    trying.

    Args:
        lookup: of the prompt and of what the answer is predicted to be.
    """

    def __init__(self, prompt: Iterable[int], prediction: Iterable[int] = ()) -> None:
        self._lookup = PromptLookup(prompt, prediction)
        self._rates = {"lookup": _Rate(), "certain": _Rate(_MOST)}
        self._guesses: dict[str, int] = {}
        self.n_drafted = self.n_accepted = 0

    def copy(self) -> Drafter:
        """For another answer to the same prompt, as it stands before its first token."""
        other = Drafter(())
        other._lookup = self._lookup.copy()
        return other

    def draft(self, most: int, certain: Sequence[int] = ()) -> tuple[list[int], float]:
        """Up to `most` tokens, and how likely each is to come if those before it do.

        Args:
            certain: what a constraint allows alone, as tokens that the model may write otherwise.
        """
        drafts = {"certain": list(certain[:most]), "lookup": self._lookup.draft(most)}
        self._guesses = {kind: tokens[0] for kind, tokens in drafts.items() if tokens}
        kind = "certain" if certain else "lookup"
        return drafts[kind], self._rates[kind].value

    def take(self, token: int) -> None:
        """The answer goes on by this token."""
        for kind, guess in self._guesses.items():
            self._rates[kind].learn(guess == token)
        self._lookup.add(token)
        self._guesses = {"lookup": drafts[0]} if (drafts := self._lookup.draft(1)) else {}
