"""Drafts from what was said before: where the last tokens stood already, the same may follow again."""

from __future__ import annotations

from collections.abc import Sequence

_N = 3


class PromptLookup:
    """Tokens so far, and where each run of three of them last ended. As in Saxena's prompt lookup decoding,
    https://github.com/apoorvumang/prompt-lookup-decoding
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._found: int | None = None  # where the last run ended before
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self._tokens.append(token)
        run = tuple(self._tokens[-_N:])
        self._found = self._ends.get(run) if len(run) == _N else None
        self._ends[run] = len(self._tokens)

    def draft(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next."""
        if self._found is None or most <= 0:
            return []
        return self._tokens[self._found : self._found + most]
