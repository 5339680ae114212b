"""Tokenizes texts: short ones where it is called, long ones in a process that can be ended."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv.errors import ContextLengthError
from mixedkv.llama import Llama
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prompts import content_marks
from mixedkv.work.current import current
from mixedkv.work.processes import EndedError, KilledError, Task, processes

_CHUNK = 1 << 12  # characters
_MAX_SPECIAL = 2000
_PROGRAM = str(Path(__file__).with_name("tokenize_program.py"))
_LONG = 1 << 18  # characters, which take half a second; a process takes longer to start
_SECONDS, _SECONDS_PER_BYTE = 10.0, 4e-6  # of a processor; most texts take a quarter of it
_BYTES = 1 << 30


class TextTokenizer:
    """Tokenizes texts with a model's vocabulary, on any thread."""

    def __init__(self, llm: Llama) -> None:
        self._llm, self._vocab = llm, _llama_cpp.vocab(llm)
        self.n_ctx, self.n_vocab = int(llm.n_ctx()), int(llm.n_vocab())
        self._special = self._special_texts()
        self._longest = self._longest_token()

    def tokenize(
        self, text: str, *, start: bool = True, special: bool = False, n_ctx: int | None = None
    ) -> list[int]:
        """Return the tokens of a text.

        Args:
            start: it begins a sequence.
            special: read the text of control tokens as control tokens.
            n_ctx: refuse a text that is too long for this many tokens before tokenizing it; None: the model's
                context.

        Raises:
            ContextLengthError: the text is too long.
            ValueError: the text has a line that is too long for the tokenizer.
        """
        self._check_size(text, self.n_ctx if n_ctx is None else n_ctx)
        if len(text) > _LONG:
            return self._in_a_process(text, start, special)
        current().check()  # many short ones take long, too
        return self.here(text, start=start, special=special)

    def here(self, text: str, *, start: bool, special: bool) -> list[int]:
        """Return the tokens of a text, which this thread makes."""
        tokens: list[int] = []
        for chunk in self._chunks(text) if special else [text]:
            tokens += self._llm.tokenize(chunk.encode("utf-8"), add_bos=start, special=special)
            start = False
        return tokens

    def _in_a_process(self, text: str, start: bool, special: bool) -> list[int]:
        data = text.encode("utf-8")
        task = Task(_PROGRAM, "tokenized", _SECONDS + _SECONDS_PER_BYTE * len(data), _BYTES)
        fields = {
            "model": os.path.abspath(self._llm.model_path),
            "content_tokens": "special" if self._llm.content_marks is None else "text",
            "first_mark": content_marks.first_mark(),
            "start": start,
            "special": special,
        }
        try:
            _, found = processes.call(task, fields, data)
        except EndedError as error:
            raise ValueError(f"tokenizing it: {error}: shorten it, or break up its longest words") from None
        except KilledError as error:
            raise ValueError(f"tokenizing it: {error}") from None
        tokens: list[int] = np.frombuffer(found, np.int32).tolist()
        return tokens

    def _check_size(self, text: str, n_ctx: int) -> None:
        size, largest = len(text.encode("utf-8")), n_ctx * self._longest
        if self._longest and size > largest and (size := len(self._plain(text).encode("utf-8"))) > largest:
            raise ContextLengthError(
                f"the text has {size} bytes, which exceeds the available context size: {n_ctx} tokens of "
                f"this model have {largest} at most: shorten it",
                -(-size // self._longest),
                n_ctx - 1,
            )

    def _longest_token(self) -> int:
        """Return the largest number of bytes that one token stands for, or 0 if it is unknown: WordPiece and
        Unigram make one token of unknown text of any length.
        """
        if llama_cpp.llama_vocab_type(self._vocab) not in (
            llama_cpp.LLAMA_VOCAB_TYPE_SPM,
            llama_cpp.LLAMA_VOCAB_TYPE_BPE,
        ):
            return 0
        tokens = range(self.n_vocab)  # in the file's spelling, which is never shorter
        return max(len(llama_cpp.llama_vocab_get_text(self._vocab, token)) for token in tokens)

    def _chunks(self, text: str) -> Iterator[str]:
        """Cut a text before special tokens, where tokenizing the parts gives the tokens of the whole.

        llama.cpp searches for all special tokens after each one that it finds: 100,000 of them would take
        hours.
        """
        begin = 0
        while len(text) - begin > _CHUNK and (cut := self._cut(text, begin)) > 0:
            yield text[begin:cut]
            begin = cut
        yield text[begin:]

    def _cut(self, text: str, begin: int) -> int:
        """Return where the last special token in a chunk begins, or the next one after it; -1 if there is
        none.
        """
        if not self._special:
            return -1
        near = [found.start() for found in self._any_special.finditer(text, begin + 1, begin + _CHUNK)]
        later = None if near else self._any_special.search(text, begin + 1)  # of all, in one pass
        cut = near[-1] if near else later.start() if later is not None else -1
        overlap = True
        while overlap and cut > 0:  # if special tokens overlap, the start of the first
            starts = (text.find(t, max(begin, cut - len(t) + 1), cut + len(t) - 1) for t in self._special)
            first = min((at for at in starts if at >= 0), default=cut)
            overlap, cut = first < cut, min(cut, first)
        return cut if cut > begin else -1

    def _special_texts(self) -> list[str]:
        """Return the texts of the tokens a text can be cut at."""
        if llama_cpp.llama_vocab_get_add_eos(self._vocab) or llama_cpp.llama_vocab_get_add_sep(self._vocab):
            return []
        left = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP
        return [text for _, text, attributes in self._llm.special_tokens if not attributes & left][
            :_MAX_SPECIAL
        ]

    def _plain(self, text: str) -> str:
        marks = self._llm.content_marks
        return text if marks is None else marks.plain(text)

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._special))

    def _token_text(self, token: int) -> str:
        return llama_cpp.llama_vocab_get_text(self._vocab, token).decode("utf-8") if token >= 0 else ""


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern that finds any of these texts in one pass: by a tree of their characters, since an
    alternative for each would be tried at each place.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(tree: dict[str, Any]) -> str:
    parts = []
    for character, below in tree.items():
        if not character:
            continue
        text = re.escape(character)
        while len(below) == 1 and "" not in below:  # a stretch without a fork
            ((character, below),) = below.items()
            text += re.escape(character)
        parts.append(text if below == {"": {}} else text + _branches(below))
    inner = f"(?:{'|'.join(parts)})"
    return f"{inner}?" if "" in tree else inner
