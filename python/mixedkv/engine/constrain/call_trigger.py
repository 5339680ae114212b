"""A call that is the model's own choice: once its first words have come, it has to be one."""

from __future__ import annotations

from collections.abc import Sequence

from mixedkv.engine.constrain.constraint import Matcher


class CallTrigger:
    """Follows one answer, token by token, up to its first call.

    Args:
        words: one of them begins a call.
        matcher: of calls from that word on; this answer's own.
    """

    def __init__(self, words: Sequence[str], matcher: Matcher) -> None:
        self._words = tuple(word.encode("utf-8") for word in words)
        self._keep = max(map(len, self._words))
        self._matcher: Matcher | None = matcher
        self._text = b""

    def take(self, piece: bytes) -> Matcher | None:
        """Note the text of the answer's next token; if a call begins in it, return the matcher for what
        follows.

        Where the token itself goes on in another way, this is no call that is known, and nothing holds.
        """
        if self._matcher is None:
            return None
        self._text += piece
        begin = min((at for word in self._words if (at := self._text.find(word)) >= 0), default=-1)
        if begin < 0:
            self._text = self._text[-self._keep :]
            return None
        matcher, self._matcher = self._matcher, None
        return matcher if matcher.follow(self._text[begin:]) else None
