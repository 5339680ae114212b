"""Drafts from what was said before: where the last tokens stood already, the same may follow again."""

from __future__ import annotations

from collections.abc import Iterable

_N = 3
_BITS = 21  # of a token in the key of a run: no vocabulary has two millions
_MASK = (1 << _N * _BITS) - 1


class PromptLookup:
    """Holds the tokens so far, and where each run of three of them last ended. This is Saxena's prompt lookup
    decoding: see https://github.com/apoorvumang/prompt-lookup-decoding.

    Args:
        tokens: of the prompt.
        prediction: what the answer may be: looked up as the prompt is, and first of all what may come next.
    """

    def __init__(self, tokens: Iterable[int], prediction: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[int, int] = {}
        self._run = 0  # the last three
        self._found: int | None = None  # where the last run ended before
        for token in tokens:
            self.add(token)
        n_prompt = len(self._tokens)
        if predicted := list(prediction):
            for token in [
                *predicted,
                *self._tokens[-_N:],
            ]:  # the prompt's end again, as if that had followed it
                self.add(token)
            self._found = n_prompt

    def copy(self) -> PromptLookup:
        """Return a copy with the same tokens."""
        other = PromptLookup(())
        other._tokens, other._ends = self._tokens.copy(), self._ends.copy()
        other._run, other._found = self._run, self._found
        return other

    def add(self, token: int) -> None:
        self._tokens.append(token)
        self._run = (self._run << _BITS | token) & _MASK
        if len(self._tokens) >= _N:
            self._found = self._ends.get(self._run)
            self._ends[self._run] = len(self._tokens)

    def draft(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next. What repeats itself right now may go on to do so."""
        if self._found is None or most <= 0:
            return []
        drafts = self._tokens[self._found : self._found + most]
        while len(drafts) < most:
            drafts += drafts[: most - len(drafts)]
        return drafts
