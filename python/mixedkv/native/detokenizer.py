"""Turns tokens into text, where characters and stop strings can span several tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import llama_cpp

from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.llama_arguments import texts


class Detokenizer:
    """Maps each token to its bytes, b"" for control tokens. Filled as tokens are looked up."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._known: dict[int, bytes] = {}
        self._named: dict[int, bytes] = {}
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocab))

    def __getitem__(self, token: int) -> bytes:
        token_bytes = self._known.get(token)
        if token_bytes is None:
            token_bytes = self._known[token] = _llama_cpp.token_bytes(self._vocab, token, special=False)
        return token_bytes

    def name(self, token: int) -> bytes:
        """Return a token's text with control tokens written out, as logprobs show them."""
        token_bytes = self._named.get(token)
        if token_bytes is None:
            token_bytes = self._named[token] = _llama_cpp.token_bytes(self._vocab, token, special=True)
        return token_bytes

    def is_end(self, token: int) -> bool:
        """Return whether the model ends its answer with this token."""
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    @cached_property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        return [token for token in range(self.n_vocab) if self.is_end(token)]


def stop_strings(stop: str | Sequence[str]) -> list[str]:
    """Return the stop strings as a list.

    Raises:
        TypeError: it is neither a text nor texts.
        ValueError: a string is empty.
    """
    given = texts("stop", stop)
    if not all(given):
        raise ValueError("stop: an empty string ends every answer at once: leave it out")
    return given


class TextStream:
    """The text of one answer, released as soon as it is certain.

    The bytes of an unfinished UTF-8 character are held back, and so are the longest suffix that may become a
    stop string, and a line whose indentation is not known yet. A stop string and what follows it are never
    released.

    Args:
        stop: strings that end it.
        n_indent: spaces and tabs that each line but the first has to begin with, else the text ends there.
    """

    def __init__(self, stop: Sequence[str] = (), n_indent: int = 0) -> None:
        self._stop, self._n_indent = tuple(stop), n_indent
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.n_released = 0  # characters
        self.stopped_by = ""  # the stop string that ended it
        self.outdented = False  # a line with too little indentation ended it

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by) or self.outdented

    @property
    def n_seen(self) -> int:
        """Number of characters so far, including those held back: the offset of the next token's text."""
        return self.n_released + len(self._held)

    @property
    def within_character(self) -> bool:
        """True if bytes of the last character are missing."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token_bytes: bytes) -> str:
        """Take a token's bytes and return what can be released now; sets `stopped` at a stop string."""
        return self._take(self._decoder.decode(token_bytes))

    def finish(self) -> str:
        """Return the text that is still held when the answer ends without a stop string."""
        if self.stopped:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        return text + self._release(len(self._held))

    def _take(self, text: str) -> str:
        if not (self._stop or self._n_indent):
            self.n_released += len(text)
            return text
        self._held += text
        cuts = [(at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if self._n_indent and (line := self._outdented_line()):
            cuts.append((line.end(), ""))
        if cuts:
            at, self.stopped_by = min(cuts)
            self.outdented = not self.stopped_by
            released = self._release(at)
            self._held = ""
            return released
        return self._release(len(self._held) - max(self._n_undecided(), self._n_of_indentation()))

    def _outdented_line(self) -> re.Match[str] | None:
        """Return the beginning of the first line that is indented too little."""
        lines = re.finditer(r"\n([ \t]*)(?=[^ \t])", self._held)
        return next((line for line in lines if len(line[1]) < self._n_indent), None)

    def _n_of_indentation(self) -> int:
        """Return the length of the last line if it is empty so far, and its indentation may be too small."""
        found = re.search(r"\n[ \t]*\Z", self._held) if self._n_indent else None
        return len(found[0]) if found is not None and len(found[0]) <= self._n_indent else 0

    def _n_undecided(self) -> int:
        """Return the length of the longest suffix that is the start of a stop string."""
        longest = min(len(self._held), max(map(len, self._stop), default=1) - 1)
        for n in range(longest, 0, -1):
            suffix = self._held[-n:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return n
        return 0

    def _release(self, n: int) -> str:
        released, self._held = self._held[:n], self._held[n:]
        self.n_released += len(released)
        return released
