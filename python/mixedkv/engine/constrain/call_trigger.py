"""Constrains an optional tool call from the moment that the model begins one."""

from __future__ import annotations

from collections.abc import Sequence

from mixedkv.engine.constrain.constraint import Matcher


class CallTrigger:
    """Follows one answer token by token, up to its first call.

    Args:
        words: each of them begins a call.
        matcher: matcher of calls from that word on, used by this answer alone.
    """

    def __init__(self, words: Sequence[str], matcher: Matcher) -> None:
        self._words = tuple(word.encode("utf-8") for word in words)
        self._keep = max(map(len, self._words))
        self._matcher: Matcher | None = matcher
        self._text = b""

    def take(self, piece: bytes) -> Matcher | None:
        """Add the text of the answer's next token. If a call begins in it, return the matcher for the text
        that follows.

        If the rest of the token does not match any known call, the answer stays unconstrained.
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
