"""Finds where a model's thoughts begin and end in its output, and bounds their length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ThoughtTags:
    """Tags around the thoughts of a family of models.

    Attributes:
        start, ends: the tags' texts; the first of `ends` is the one that closes a thought here.
        open: the prompt ends inside a thought.
    """

    start: str
    ends: tuple[str, ...]
    open: bool = False


class Thought:
    """Follows the thoughts in one answer, token by token.

    Args:
        close: the tokens of `tags.ends[0]`.
        opening: the token of `tags.start`; -1 if it is several tokens.
        budget: tokens after which a thought is closed; None for no bound.
    """

    def __init__(
        self, tags: ThoughtTags, *, close: Sequence[int], opening: int = -1, budget: int | None = None
    ) -> None:
        self._start = tags.start.encode()
        self._ends = tuple(end.encode() for end in tags.ends)
        self._close, self._opening, self._budget = list(close), opening, budget
        self._keep = max(map(len, (self._start, *self._ends)))
        self._tail = b""  # the text since the last tag
        self._closing: list[int] = []
        self._empty = True
        self.open = tags.open
        self.n_tokens = 0  # tokens that belong to thoughts, including tags

    @property
    def may_begin(self) -> int:
        """The token that begins a thought, if the answer is still empty; otherwise -1."""
        return self._opening if self._empty and not self.open else -1

    def forced(self) -> int | None:
        """Return the next token of the closing tag if the thought has used up its budget; otherwise None."""
        if self.open and not self._closing and self._budget is not None and self.n_tokens >= self._budget:
            self._closing = list(self._close)
        return self._closing.pop(0) if self._closing else None

    def close(self) -> int:
        """Begin to close the thought, and return the first token of the closing tag."""
        self._closing = list(self._close)
        return self._closing.pop(0)

    def ends_within(self, token_bytes: bytes) -> bool:
        """Return whether the thought ends in the middle of this token's text."""
        if not self.open:
            return False
        text = self._tail + token_bytes
        found = _first(text, self._ends)
        return found is not None and bool(text[found:].strip())

    def take(self, token_bytes: bytes) -> None:
        """Note the text of the answer's next token."""
        self._empty = False
        self.n_tokens += self.open
        text = self._tail + token_bytes
        while (end := _first(text, self._ends if self.open else (self._start,))) is not None:
            self.open = not self.open
            self.n_tokens += self.open
            text = text[end:]
        self._tail = text[-self._keep :]


def _first(text: bytes, tags: Sequence[bytes]) -> int | None:
    """Return where the first of the tags ends."""
    ends = [at + len(tag) for tag in tags if tag and (at := text.find(tag)) >= 0]
    return min(ends, default=None)
