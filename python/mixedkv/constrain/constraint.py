"""Makes answers follow a JSON schema, a regular expression or a grammar, with llguidance.

A constraint is compiled for one request, off the engine's thread, and before that on trial in a process
that is ended when it takes too long (`trial`). On the engine's thread its matcher then tells whether a token
may come next, or which ones may. Both have limits (`_LIMITS`): a constraint that exceeds them fails its own
answer only.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama, LogitsProcessorList

from mixedkv.constrain import trial
from mixedkv.constrain.constraint_text import Constraint, Kind
from mixedkv.constrain.gbnf import gbnf_to_lark
from mixedkv.constrain.json_schema import MAX_SCHEMA, NumberLength, begin_with_digit, closed_schema
from mixedkv.errors import DeadEndError
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.detokenizer import Detokenizer

log = logging.getLogger("mixedkv.engine")

_MAX_REGEX = 1 << 15  # characters
_SPECIAL = b"\xff"  # llguidance's mark of tokens that are no text
# At most one space or line break with its indent, as llama.cpp has it: a model that likes spaces gets on.
SPACE = r"[ ]|\n[ \t]{0,20}"
# Tokens are the model's choice. Else llguidance tokenizes what is certain itself and allows no other tokens.
_HEAD = '%llguidance {"no_forcing": true}\n'
_STACK = 64 << 20  # llguidance compiles by recursion; 8 MB end at a chain of 1,000 references
_LIMITS: dict[str, Any] = {
    # milliseconds in the worker thread
    "initial_lexer_fuel": 200_000,
    "max_grammar_size": 200_000,
    # of one mask, on the engine's thread: 15 ms at most of all that was tried, with 150,000 tokens
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 25_000,  # memory: 1 to 2 KB each
    "verbose_errors": False,
}
_MASK_SECONDS = 1e-3  # of a processor, that a step of greedy decoding may take longer for its masks
_MOST_EXCESS = 0.02  # seconds beyond that, in all
_SLOWEST_MASK = 2 * trial.STEP_SECONDS  # of a processor; after that one answer ends, so that others go on
# Of the parser, at one byte and in one mask. Where a text can be read in many ways each byte takes the square
# of the first. Schemas have few readings, but some items for each property that may come next.
_MAX_ITEMS: dict[Kind, tuple[int, int]] = {
    "json_schema": (2000, 25_000),
    "regex": (500, 5000),
    "gbnf": (500, 5000),
    "lark": (500, 5000),
    "calls": (2000, 25_000),
}


Mask = npt.NDArray[np.uint32]  # a bit for each token
_WORD = 32


def _bits(mask: Mask) -> npt.NDArray[np.uint8]:
    return np.unpackbits(mask.view(np.uint8), bitorder="little")


def _has(mask: Mask, token: int) -> bool:
    return bool(mask[token // _WORD] >> np.uint32(token % _WORD) & 1)


class _Tokens:
    """The bytes of each token, and whether it begins with a digit."""

    def __init__(self, tokens: list[bytes]) -> None:
        self.bytes, self.digit = tokens, begin_with_digit(tokens)
        bits = np.packbits(self.digit, bitorder="little")
        self.digits: Mask = np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


class Matcher:
    """Follows one answer under a constraint; used by one thread at a time."""

    def __init__(
        self, inner: Any, name: str, vocabulary: _Tokens, tokenizer: Any, numbers: NumberLength | None = None
    ) -> None:
        self._inner, self._name, self._vocabulary, self._tokenizer = inner, name, vocabulary, tokenizer
        self._is_first = True  # the first mask takes longest, and is made off the engine's thread
        self._excess = 0.0  # seconds that masks took beyond what they save
        self._numbers = numbers  # for an answer that is JSON from its first byte

    def copy(self) -> Matcher:
        """Return a copy in the same state. Copies share the lexer's states and the limit on their number, so
        use them for one request only.
        """
        numbers = replace(self._numbers) if self._numbers is not None else None
        other = Matcher(self._inner.deep_copy(), self._name, self._vocabulary, self._tokenizer, numbers)
        other._is_first = self._is_first
        return other

    def allows(self, token: int) -> bool:
        """Return whether a token may come next, far quicker than `allowed`; False if only the end may."""
        if self._numbers is not None and self._numbers.is_full and self._vocabulary.digit[token]:
            return _has(self._mask(), token)
        return bool(self._inner.validate_tokens([token]))

    def allowed(self) -> npt.NDArray[np.int32]:
        """Return the tokens that may come next; once the answer is complete, those that end it.

        Raises:
            DeadEndError: there are none.
        """
        mask = self._mask()
        words = np.flatnonzero(mask)
        if len(words) > len(mask) // 8:
            return np.flatnonzero(_bits(mask)).astype(np.int32)
        at = np.flatnonzero(_bits(mask[words]))
        return (words[at // _WORD] * _WORD + at % _WORD).astype(np.int32)

    def ahead(self, tokens: Sequence[int]) -> Mask | None:
        """Return all tokens that may come next, or after some of `tokens` if these come. None if that takes
        too much time to tell.
        """
        if self._excess > _MOST_EXCESS:
            return None
        other, began = self.copy(), time.thread_time()
        try:
            found = mask = other._mask()
            for token in tokens:
                if not _has(mask, token):
                    break
                other.accept(token)
                mask = other._mask()
                found = found | mask
        except DeadEndError:
            self._excess = math.inf
            return None
        took = time.thread_time() - began
        self._excess = max(0.0, self._excess + took - _MASK_SECONDS * (1 + len(tokens)))
        return found

    def _mask(self) -> Mask:
        """Return the tokens that may come next; once the answer is complete, those that end it.

        Raises:
            DeadEndError: there are none.
        """
        began = time.thread_time()
        mask: Mask = np.frombuffer(self._inner.compute_bitmask(), np.uint32)[: len(self._vocabulary.digits)]
        self._check()
        if not self._is_first and time.thread_time() - began > _SLOWEST_MASK:
            raise DeadEndError(f"{self._name}: following it takes too much: leave less open")
        self._is_first = False
        if self._numbers is not None and self._numbers.is_full:
            others = mask & ~self._vocabulary.digits
            return others if others.any() else mask  # a number that cannot end yet is continued
        return mask

    def certain(self) -> list[int]:
        """Return the longest tokens of the text that must come next. The model may write that text with other
        tokens.
        """
        text = self._inner.compute_ff_bytes().decode("utf-8", "ignore")
        return list(self._tokenizer.greedy_tokenize(text)) if text else []

    def follow(self, text: bytes) -> bool:
        """Advance by a text, whatever its tokens are. Return False if it is not allowed; the matcher is then
        unusable.
        """
        tokens = self._tokenizer.greedy_tokenize(text.decode("utf-8", "replace"))
        if self._numbers is not None:
            self._numbers.read(text)
        return int(self._inner.try_consume_tokens(tokens)) == len(tokens)

    def accept(self, token: int) -> None:
        """Advance by an allowed token.

        Raises:
            DeadEndError: advancing exceeds the limits.
        """
        self._inner.consume_token(token)
        if self._numbers is not None:
            self._numbers.read(self._vocabulary.bytes[token])
        self._check()

    def _check(self) -> None:
        if not self._inner.is_error():
            return
        error = self._inner.get_error().partition("\n")[0]
        if "NoExtension" in error:
            raise DeadEndError(f"{self._name}: no token of this model can come next here")
        raise DeadEndError(f"{self._name}: following it takes too much: leave less open ({error[:200]})")


class ConstraintCompiler:
    """Compiles constraints for one vocabulary, on any thread. Takes a second to make for 150,000 tokens."""

    def __init__(self, vocab: Any) -> None:
        detokenizer = Detokenizer(vocab)
        tokens = [
            detokenizer[token] or _named(detokenizer.name(token)) for token in range(detokenizer.n_vocab)
        ]
        self._init(tokens, [token for token in range(detokenizer.n_vocab) if detokenizer.is_end(token)])

    @classmethod
    def of_tokens(cls, tokens: list[bytes], ends: list[int]) -> ConstraintCompiler:
        """Make a compiler for a vocabulary without a model, from each token's bytes and the tokens that end
        an answer.
        """
        self = cls.__new__(cls)
        self._init(tokens, ends)
        return self

    def _init(self, tokens: list[bytes], ends: list[int]) -> None:
        self.ends = ends
        self._tokens = _Tokens(tokens)
        self._names = {name[1:]: token for token, name in enumerate(tokens) if name[:1] == _SPECIAL}
        self._texts = [name.decode("utf-8", "replace") for name in self._names]
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._making = threading.Lock()

    def compile(self, constraint: Constraint) -> Matcher:
        """Compile a constraint to a matcher that answers start from.

        Raises:
            ValueError: the constraint cannot be read or followed, or is too large; the message begins with
                its name.
        """
        if not self.ends:
            raise ValueError(f"{constraint.name}: this model has no token that ends an answer")
        try:
            tokenizer = self._tokenizer(self.shown(constraint.shown))
            lark, (row, step) = _lark(constraint), _MAX_ITEMS[constraint.kind]
            limits = {"max_items_in_row": row, "step_max_items": step, **_LIMITS}
            trial.check(lark, [name for name in self._texts if name in lark], limits)
            inner = _compile(tokenizer, lark, limits)
            if inner.is_error():
                raise ValueError(_message(inner.get_error()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{constraint.name}: {str(error)[:500]}") from None
        numbers = NumberLength() if constraint.kind == "json_schema" else None
        matcher = Matcher(inner, constraint.name, self._tokens, tokenizer, numbers)
        matcher.allowed()  # shows an immediate dead end
        return matcher

    def shown(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the control tokens of these names, without those that end an answer."""
        tokens = {self._names.get(name.encode("utf-8"), -1) for name in names}
        return tuple(sorted(tokens - {-1} - set(self.ends)))

    def _tokenizer(self, shown: tuple[int, ...]) -> Any:
        with self._making:
            if shown not in self._tokenizers:
                tokens = list(self._tokens.bytes)
                for token in shown:
                    tokens[token] = tokens[token].removeprefix(_SPECIAL)
                self._tokenizers[shown] = _tokenizer(tokens, self.ends)
            return self._tokenizers[shown]


class _Vocabulary:
    """The interface of a tokenizer that llguidance expects."""

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


def _compile(tokenizer: Any, lark: str, limits: dict[str, Any]) -> Any:
    """Compile on a thread with a deep stack, at most two at a time, so that other work keeps a processor."""
    with _starting:
        before = threading.stack_size(_STACK)
        try:
            future = _compiling.submit(_make, tokenizer, lark, limits)
        finally:
            threading.stack_size(before)
    return future.result()


def _make(tokenizer: Any, lark: str, limits: dict[str, Any]) -> Any:
    return llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=llguidance.LLParserLimits(**limits))


def _lark(constraint: Constraint) -> str:
    kind, text = constraint.kind, constraint.text
    if kind == "json_schema":
        if len(text) > MAX_SCHEMA:
            raise ValueError(f"it has {len(text)} characters, at most {MAX_SCHEMA} are taken")
        schema = closed_schema(json.loads(text, parse_constant=_refuse_constant))
        schema["x-guidance"] = {"whitespace_pattern": SPACE}
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
    """Return the error's first line, and the reason and place of an error in a regular expression; further
    lines repeat the grammar.
    """
    first, _, rest = error.partition("\n")
    if first.endswith("regex parse error:"):
        lines = rest.split("\n")
        reason = next((line for line in lines if line.startswith("error: ")), "error: it cannot be read")
        first = f"the regular expression {lines[0].strip()[:200]!r}: {reason.removeprefix('error: ')}"
    if "oneOf constraints are not supported" in first:
        return (
            "oneOf is enforced only where no value fits two of its members: use anyOf, or a required "
            "property with another constant in each"
        )
    return first.removeprefix("at 2(8): ").removeprefix("failed to compile JSON schema: ")


class _Logits:
    """A logits processor for llama-cpp-python, for one answer."""

    def __init__(self, matcher: Matcher, ends: list[int]) -> None:
        self._matcher, self._ends = matcher, ends
        self._n_seen = -1  # number of tokens, including the prompt's

    def __call__(
        self, input_ids: npt.NDArray[np.intc], scores: npt.NDArray[np.single]
    ) -> npt.NDArray[np.single]:
        try:
            for token in input_ids[self._n_seen :].tolist() if self._n_seen >= 0 else []:
                self._matcher.accept(token)
            allowed = self._matcher.allowed()
        except DeadEndError as error:  # an exception raised here, inside llama.cpp, would be lost
            log.warning("the answer ends unfinished: %s", error)
            allowed = np.array(self._ends, np.int32)
        self._n_seen = len(input_ids)
        masked = np.full(len(scores), -np.inf, np.single)
        masked[allowed] = scores[allowed]
        return masked


_compilers: WeakKeyDictionary[Llama, ConstraintCompiler] = WeakKeyDictionary()


def constrain(llm: Llama, kind: Kind, text: str | dict[str, Any], field: str = "") -> LogitsProcessorList:
    """Return a new `logits_processor=` for one answer of a `Llama`.

    Args:
        field: what errors call it, if not by its kind.

    Raises:
        ValueError: the schema or grammar cannot be read, or not be followed.
    """
    if llm not in _compilers:
        _compilers[llm] = ConstraintCompiler(_llama_cpp.vocab(llm))
    compiler = _compilers[llm]
    constraint = Constraint(kind, text if isinstance(text, str) else json.dumps(text), field or kind)
    return LogitsProcessorList([_Logits(compiler.compile(constraint), compiler.ends)])
