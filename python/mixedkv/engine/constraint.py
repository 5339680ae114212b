"""Answers that follow a JSON schema, a regular expression or a grammar, by llguidance.

A constraint is compiled for one request, off the engine's thread; there its matcher then says of a token
whether it may come next, or of all. Both are bounded (`_LIMITS`): a constraint that takes too much fails its
own answer.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import llguidance
import numpy as np
import numpy.typing as npt

from mixedkv.engine.detokenizer import Detokenizer
from mixedkv.engine.gbnf import gbnf_to_lark
from mixedkv.engine.json_schema import MAX_SCHEMA, closed_schema

Kind = Literal["json_schema", "regex", "gbnf", "lark"]

_MAX_REGEX = 1 << 15  # characters
_SPECIAL = b"\xff"  # llguidance's mark of tokens that are no text
# At most one space or line break with its indent, as llama.cpp has it: a model that likes spaces gets on.
_SPACE = r"[ ]|\n[ \t]{0,20}"
# Tokens are the model's choice. Else llguidance tokenizes what is certain itself and allows no other tokens.
_HEAD = '%llguidance {"no_forcing": true}\n'
_STACK = 64 << 20  # llguidance compiles by recursion; 8 MB end at a chain of 1,000 references
_LIMITS = {
    # milliseconds in the worker thread
    "initial_lexer_fuel": 200_000,
    "max_grammar_size": 200_000,
    # of one mask, on the engine's thread: 15 ms at most of all that was tried, with 150,000 tokens
    "step_lexer_fuel": 100_000,
    "step_max_items": 5_000,
    "max_lexer_states": 25_000,  # memory: 1 to 2 KB each
    "verbose_errors": False,
}
# Where a text can be read in many ways, each byte takes the square of this. Grammars of schemas have few
# readings, but some items for each property that may come next.
_MAX_ITEMS: dict[Kind, int] = {"json_schema": 2000, "regex": 500, "gbnf": 500, "lark": 500}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must be.

    Attributes:
        kind: the language of `text`. Lark is for authors that are trusted: it can compile for hours.
        name: what error messages call it.
    """

    kind: Kind
    text: str
    name: str = "grammar"


class DeadEndError(ValueError):
    """No token of the model continues the answer, or finding one takes more than is allowed."""


class Matcher:
    """A constraint and how much of an answer it has seen; used by one thread at a time."""

    def __init__(self, inner: Any, name: str, n_vocab: int) -> None:
        self._inner, self._name, self._n_vocab = inner, name, n_vocab

    def copy(self) -> Matcher:
        """Another one at the same place. Both share the lexer's states, and the limit of their number: keep
        copies to one request.
        """
        return Matcher(self._inner.deep_copy(), self._name, self._n_vocab)

    def allows(self, token: int) -> bool:
        """Far quicker than `allowed`; says False where only the end may come."""
        return bool(self._inner.validate_tokens([token]))

    def allowed(self) -> npt.NDArray[np.int32]:
        """The tokens that may come next; when the answer is complete those that end it.

        Raises:
            DeadEndError: there are none.
        """
        mask = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._check()
        return np.flatnonzero(np.unpackbits(mask, bitorder="little")[: self._n_vocab]).astype(np.int32)

    def accept(self, token: int) -> None:
        """Go on by a token that is allowed.

        Raises:
            DeadEndError: that took too much.
        """
        self._inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if not self._inner.is_error():
            return
        error = self._inner.get_error().partition("\n")[0]
        if "NoExtension" in error:
            raise DeadEndError(f"{self._name}: no token of this model can come next here")
        raise DeadEndError(f"{self._name}: following it takes too much: leave less open ({error[:200]})")


class ConstraintCompiler:
    """Makes matchers for one vocabulary, on any thread. Itself takes a second to make for 150,000 tokens."""

    def __init__(self, vocab: Any) -> None:
        pieces = Detokenizer(vocab)
        tokens = [pieces[token] or _named(pieces.name(token)) for token in range(pieces.n_vocab)]
        self._init(tokens, [token for token in range(pieces.n_vocab) if pieces.is_end(token)])

    @classmethod
    def of_tokens(cls, tokens: list[bytes], ends: list[int]) -> ConstraintCompiler:
        """For a vocabulary without a model: each token's bytes, and the tokens that end an answer."""
        self = cls.__new__(cls)
        self._init(tokens, ends)
        return self

    def _init(self, tokens: list[bytes], ends: list[int]) -> None:
        self.ends = ends
        self._n_vocab = len(tokens)
        self._tokenizer = _tokenizer(tokens, ends) if ends else None

    def compile(self, constraint: Constraint) -> Matcher:
        """
        Raises:
            ValueError: it cannot be read or followed, or is too large; the message begins with its name.
        """
        if self._tokenizer is None:
            raise ValueError(f"{constraint.name}: this model has no token that ends an answer")
        try:
            inner = _compile(self._tokenizer, _lark(constraint), _MAX_ITEMS[constraint.kind])
            if inner.is_error():
                raise ValueError(_message(inner.get_error()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{constraint.name}: {str(error)[:500]}") from None
        matcher = Matcher(inner, constraint.name, self._n_vocab)
        matcher.allowed()  # the first mask takes longest, and a dead end shows early
        return matcher


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, [end]

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("nothing is tokenized: see _HEAD")


def _tokenizer(tokens: list[bytes], ends: list[int]) -> Any:
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokens, ends[0]))
    return llguidance.LLTokenizer(wrapper, eos_token=ends)


def _named(name: bytes) -> bytes:
    return _SPECIAL + name if name else b""


_compiling = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mixedkv-constraint")
_starting = threading.Lock()


def _compile(tokenizer: Any, lark: str, max_items: int) -> Any:
    """In a thread with a deep stack; two at a time, so that they do not take all processors."""
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            future = _compiling.submit(_make, tokenizer, lark, max_items)
        finally:
            threading.stack_size(before)
    return future.result()


def _make(tokenizer: Any, lark: str, max_items: int) -> Any:
    limits = llguidance.LLParserLimits(max_items_in_row=max_items, **_LIMITS)
    return llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def _lark(constraint: Constraint) -> str:
    kind, text = constraint.kind, constraint.text
    if kind == "json_schema":
        if len(text) > MAX_SCHEMA:
            raise ValueError(f"it has {len(text)} characters, at most {MAX_SCHEMA} are taken")
        schema = closed_schema(json.loads(text, parse_constant=_refuse_constant))
        schema["x-guidance"] = {"whitespace_pattern": _SPACE}
        return f"{_HEAD}start: %json {json.dumps(schema)}"
    if kind == "regex":
        if len(text) > _MAX_REGEX:
            raise ValueError(f"it has {len(text)} characters, at most {_MAX_REGEX} are taken")
        return f"{_HEAD}start: TEXT\nTEXT: /{llguidance.regex_to_lark(text, 'dw')}/"
    if kind == "gbnf":
        return _HEAD + gbnf_to_lark(text)
    return _HEAD + text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _message(error: str) -> str:
    """The first line: further ones repeat the grammar."""
    first = error.partition("\n")[0]
    if "oneOf constraints are not supported" in first:
        return (
            "oneOf is enforced only where no value fits two of its members: use anyOf, or a required "
            "property with another constant in each"
        )
    return first.removeprefix("at 2(8): ").removeprefix("failed to compile JSON schema: ")
