"""Keeps what a chat's messages hold apart from what its template writes.

A message may hold the text of a control token: a page about chat templates, or a tool's result that wants to
end its turn and speak as the system. So before a chat is rendered, each character of such a text is replaced
by a mark, a code point that no Unicode text has. Where the rendered chat has marks, the text is a message's
and is tokenized as text; the control tokens that are still readable are the template's own.

Also marked is a part of a control token where something else may complete it: at either end of a text, and
beside white space and the strings that the template names, since it may take those out ("<|im_/thinkend|>").
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import llama_cpp

from mixedkv.native.templates import lexed

ContentTokens = Literal["special", "text"]
CONTENT_TOKENS: tuple[ContentTokens, ...] = ("text", "special")

T = TypeVar("T")
Tokenize = Callable[[str, bool], list[int]]  # of a text, and whether control tokens in it are read as such

# somewhere in the planes that Unicode has assigned nothing in, elsewhere in each process
_MOST_MARKS = 0x1000
_FIRST_MARK = secrets.choice(range(0x50000, 0xD0000, 0x10000)) + secrets.randbelow(0xF000 - _MOST_MARKS)
_MAY_HAVE_MARKS = re.compile(rb"[\xf1-\xf3]")  # how such planes begin in UTF-8
_ESCAPED = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")

# control tokens in the files of gpt-oss and Solar Open, user-defined in llama.cpp so that answers show them
_SHOWN_IN_ANSWERS = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"})

# llama.cpp reads both only where special tokens are asked for
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_SEEKS = frozenset({"split", "rsplit", "replace", "startswith", "endswith"})
_LONGEST_CUT = 64  # characters
_JSON_STRING = re.compile(
    r'"((?:[^"\\]|\\.)*)"?', re.DOTALL
)  # of JSON: one that is not closed is not looked for
_JSON_CHARACTER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.", re.DOTALL
)
_WHITE_SPACE = " \t\n\v\f\r"  # what llama.cpp strips beside a token that says so


class SpecialToken(NamedTuple):
    """A special token of a vocabulary.

    Attributes:
        control: it is special only where special tokens are asked for; otherwise it is user-defined.
        lstrip, rstrip: it takes the white space before or after it.
    """

    id: int
    text: str
    control: bool
    lstrip: bool = False
    rstrip: bool = False


class _TextEdge(NamedTuple):
    """A control token in a rendered chat, or one of its ends: texts end before it and begin after it."""

    begin: int
    end: int
    lstrip: bool = False
    rstrip: bool = False


class _Cuts:
    """The strings that a template names, which it may look for in messages and take out."""

    def __init__(self, source: str) -> None:
        words = [(kind, word) for _, kind, word in lexed(source)]
        names = {_unescaped(word) for kind, word in words if kind == "string"}
        self.sought = {
            _unescaped(words[i][1])
            for i in range(len(words))
            if words[i][0] == "string"
            and (
                (i > 1 and words[i - 1][1] == "(" and words[i - 2][1] in _SEEKS)
                or [word for _, word in words[i + 1 : i + 3] if word != "not"][:1] == ["in"]
            )
        }
        self._firsts: dict[str, tuple[str, ...]] = {}
        self._lasts: dict[str, tuple[str, ...]] = {}
        for name in names:
            if 0 < len(name) <= _LONGEST_CUT:
                self._firsts[name[0]] = (*self._firsts.get(name[0], ()), name)
                self._lasts[name[-1]] = (*self._lasts.get(name[-1], ()), name)

    def begins(self, text: str, at: int) -> bool:
        """Return whether one begins there."""
        return text.startswith(self._firsts.get(text[at], ()), at)

    def ends(self, text: str, at: int) -> bool:
        """Return whether one ends there."""
        return text.endswith(self._lasts.get(text[at - 1], ()), 0, at)

    def may_go_on(self, text: str, at: int) -> bool:
        """Return whether something else may follow there once the chat is rendered."""
        return at == len(text) or text[at].isspace() or self.begins(text, at)

    def may_come_before(self, text: str, at: int) -> bool:
        """Return whether something else may stand before that place."""
        return at == 0 or text[at - 1].isspace() or self.ends(text, at)


@lru_cache(maxsize=64)
def _cuts_of(source: str) -> _Cuts:
    return _Cuts(source)


def _unescaped(literal: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), literal[1:-1], flags=re.DOTALL)


def first_mark() -> int:
    """Return the code point of this process' first mark."""
    return _FIRST_MARK


def begin_with(mark: int) -> None:
    """Use the marks of another process, whose texts are tokenized here, before there are any."""
    global _FIRST_MARK
    _FIRST_MARK = mark


def special_tokens(special: Iterable[tuple[int, str, int]]) -> Iterator[SpecialToken]:
    """Yield special tokens, given their ids, texts and attributes in llama.cpp."""
    for token, text, attributes in special:
        yield SpecialToken(
            id=token,
            text=text,
            control=bool(attributes & _CONTROL),
            lstrip=bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP),
            rstrip=bool(attributes & llama_cpp.LLAMA_TOKEN_ATTR_RSTRIP),
        )


def may_have_marks(text: bytes) -> bool:
    """Return False if a text has certainly no marks."""
    if b"\\u" in text:  # as JSON has them
        return True
    return not text.isascii() and _MAY_HAVE_MARKS.search(text) is not None


class ContentMarks:
    """Marks texts for one vocabulary.

    Args:
        special: its special tokens.
    """

    def __init__(self, special: Iterable[SpecialToken]) -> None:
        special = list(special)
        # white space cannot be marked: templates strip it
        self._tokens = {
            each.text: each
            for each in special
            if each.text.strip() and (each.control or each.text in _SHOWN_IN_ANSWERS)
        }
        texts = list(self._tokens)
        self._begins = {text[:n] for text in texts for n in range(1, len(text) + 1)}
        self._ends = {text[n:] for text in texts for n in range(len(text))}
        self._first, self._last = _one_of(text[0] for text in texts), _one_of(text[-1] for text in texts)
        self._edge = _one_of(char for text in texts for char in (text[0], text[-1]))
        letters = sorted({char for text in texts for char in text if not char.isspace()})[:_MOST_MARKS]
        self._marks = {char: chr(_FIRST_MARK + i) for i, char in enumerate(letters)}
        self._letters = {mark: char for char, mark in self._marks.items()}
        self._mark = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_FIRST_MARK + _MOST_MARKS - 1)}]")
        self._ids = frozenset(each.id for each in self._tokens.values())
        # user-defined tokens around a control token's text, which llama.cpp looks for first
        joined = "\0".join(each.text for each in special if each.text not in self._tokens)
        within = [text for text in texts if text in joined]
        self._wider = [each for each in joined.split("\0") if any(text in each for text in within)]

    def __bool__(self) -> bool:
        """Return False if the vocabulary has no control tokens."""
        return bool(self._tokens)

    # --- before a chat is rendered ---

    def mark(self, value: T, template: str, *, leave: Sequence[str] = ()) -> T:
        """Return JSON data with marks in its strings; the same object if it needs none.

        Args:
            template: the template that will render it.
            leave: control tokens to leave readable.
        """
        return self._marked(value, _cuts_of(template), frozenset(leave)) if self._tokens else value

    def messages(
        self, messages: Sequence[Mapping[str, Any]], template: str, *, leave: Sequence[str] = ()
    ) -> Sequence[Mapping[str, Any]]:
        """Return messages with marks, as `mark` does; `leave` is for the assistant's only."""
        marked = []
        for message in messages:
            left = leave if message.get("role") == "assistant" else ()
            each = self.mark(message, template, leave=left)
            content = each.get("content")
            if (
                message.get("role") == "tool"
                and isinstance(content, str)
                and "\\" in content
                and _is_json(content)
            ):
                # a template may read a result that is JSON
                each = {**each, "content": self._json(content, _cuts_of(template), frozenset())}
            marked.append(each)
        return messages if all(a is b for a, b in zip(messages, marked, strict=True)) else marked

    def descriptions(self, tools: Any, template: str) -> Any:
        """Return tools with marks in their descriptions only: names and schemas may become grammars."""
        cuts = _cuts_of(template)

        def marked(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {
                    name: self._text(item, cuts, frozenset())
                    if name == "description" and isinstance(item, str)
                    else marked(item)
                    for name, item in value.items()
                }
            return [marked(item) for item in value] if isinstance(value, list) else value

        return marked(tools)

    def sought(self, messages: Sequence[Mapping[str, Any]], template: str) -> list[str]:
        """Return the control tokens in the assistant's messages that the template looks for, as the tags of
        thoughts that it leaves out.
        """
        names = self._tokens.keys() & _cuts_of(template).sought if self._tokens else ()
        if not names:
            return []
        texts = [message.get("content") for message in messages if message.get("role") == "assistant"]
        return [name for name in names if any(name in text for text in texts if isinstance(text, str))]

    def _marked(self, value: Any, cuts: _Cuts, leave: frozenset[str]) -> Any:
        if isinstance(value, str):
            return self._text(value, cuts, leave)
        if isinstance(value, Mapping):
            pairs = {
                self._marked(name, cuts, leave): self._json(item, cuts, leave)
                if name == "arguments" and isinstance(item, str)
                else self._marked(item, cuts, leave)
                for name, item in value.items()
            }
            same = all(a is b for a, b in zip(value, pairs, strict=False)) and all(
                a is b for a, b in zip(value.values(), pairs.values(), strict=False)
            )
            return value if same else pairs
        if isinstance(value, list | tuple):
            items = [self._marked(item, cuts, leave) for item in value]
            return value if all(a is b for a, b in zip(value, items, strict=True)) else items
        return value

    def _text(self, text: str, cuts: _Cuts, leave: frozenset[str]) -> str:
        if self._edge.search(text) is None:
            return text
        spans = [*self._spans(text, cuts, leave), *self._end_spans(text, cuts)]
        if not spans:
            return text
        chars = list(text)
        for begin, end in spans:
            chars[begin:end] = [self._marks.get(char, char) for char in text[begin:end]]
        return "".join(chars)

    def _spans(self, text: str, cuts: _Cuts, leave: frozenset[str]) -> Iterator[tuple[int, int]]:
        """Yield where control tokens are in a text, and where their beginnings are before a place at which
        the template may go on with something else.
        """
        after = 0
        for match in self._first.finditer(text):
            begin = match.start()
            if begin < after:
                continue
            token, reach = self._reach(text, begin)
            if token:
                after = begin + len(token)
                if token not in leave:
                    yield begin, after
            elif not cuts.begins(text, begin) and any(  # what the template looks for stays as it is
                cuts.may_go_on(text, at) for at in range(begin + 1, reach + 1)
            ):
                yield begin, reach

    def _end_spans(self, text: str, cuts: _Cuts) -> Iterator[tuple[int, int]]:
        """Yield where ends of control tokens are after such a place."""
        for match in self._last.finditer(text):
            end = begin = match.end()
            while begin > 0 and text[begin - 1 : end] in self._ends:
                begin -= 1
            if text[begin:end] in self._tokens or cuts.ends(text, end):  # marked by `_spans`, or as above
                continue
            if any(cuts.may_come_before(text, at) for at in range(begin, end)):
                yield begin, end

    def _reach(self, text: str, begin: int) -> tuple[str, int]:
        """Return the longest control token that begins there, "" for none, and how far one could go on."""
        token, end = "", begin
        while end < len(text) and (part := text[begin : end + 1]) in self._begins:
            end += 1
            if part in self._tokens:
                token = part
        return token, end

    def _json(self, text: str, cuts: _Cuts, leave: frozenset[str]) -> str:
        """Return JSON text with marks in its strings, where control tokens may be written with escapes."""
        if "\\" not in text and self._edge.search(text) is None:
            return text
        if not _is_json(text):
            return self._text(text, cuts, leave)

        def marked(match: re.Match[str]) -> str:
            chars = _JSON_CHARACTER.findall(match[1])  # each as it is written, which stays
            said = match[1] if len(chars) == len(match[1]) else json.loads(match[0])
            new = self._text(said, cuts, leave)
            return match[0] if new is said else f'"{"".join(map(_written, chars, said, new))}"'

        return _JSON_STRING.sub(marked, text)

    # --- after it was rendered ---

    def plain(self, text: str) -> str:
        """Return a text without marks."""
        if not self._has_marks(text := self._unescaped(text)):
            return text
        return self._mark.sub(lambda match: self._letters.get(match[0], match[0]), text)

    def _has_marks(self, text: str) -> bool:
        return not text.isascii() and self._mark.search(text) is not None

    def _unescaped(self, text: str) -> str:
        """Return a text with the marks that a template's tojson escaped, as it does with all that is not
        ASCII.
        """

        def mark(match: re.Match[str]) -> str:
            char = chr(0x10000 + ((int(match[1], 16) - 0xD800) << 10) + int(match[2], 16) - 0xDC00)
            return char if char in self._letters else match[0]

        return _ESCAPED.sub(mark, text) if "\\u" in text else text

    def count(self, text: str, names: Iterable[str]) -> int:
        """Return how often control tokens are readable in a text."""
        return sum(text.count(name) for name in names)

    def tokens(self, text: str, tokenize: Tokenize) -> list[int]:
        """Return the tokens of a rendered chat: of its marked parts without control tokens, of the others
        with.
        """
        if not self._has_marks(text := self._unescaped(text)):
            return tokenize(text, True)
        tokens: list[int] = []
        done = 0  # what comes after it is still to be tokenized
        mark = self._mark.search(text)
        edges = pairwise([_TextEdge(0, 0), *self._found(text), _TextEdge(len(text), len(text))])
        for before, after in edges:
            if mark is None:
                break
            if mark.start() >= after.begin:
                continue
            if done < before.end:
                tokens += tokenize(text[done : before.end], True)
            part = text[before.end : after.begin]
            part = part.lstrip(_WHITE_SPACE) if before.rstrip else part
            part = part.rstrip(_WHITE_SPACE) if after.lstrip else part
            tokens += self._of_content(part, tokenize)
            done = after.begin
            mark = self._mark.search(text, done)
        return tokens + tokenize(text[done:], True) if done < len(text) else tokens

    def _found(self, text: str) -> Iterator[_TextEdge]:
        """Yield the control tokens that the template wrote."""
        wider = [match.span() for name in self._wider for match in re.finditer(re.escape(name), text)]
        after = 0
        for match in self._first.finditer(text):
            begin = match.start()
            if begin < after:
                continue
            name, _ = self._reach(text, begin)
            end = begin + len(name)
            if name and not any(first <= begin and end <= last for first, last in wider):
                after = end
                token = self._tokens[name]
                yield _TextEdge(begin, end, token.lstrip, token.rstrip)

    def _of_content(self, text: str, tokenize: Tokenize) -> list[int]:
        tokens = tokenize(self.plain(text), False)
        if self._ids.isdisjoint(tokens):
            return tokens
        # user-defined in llama.cpp, or made of letters as a word is: cut after its first letter
        firsts = (m.end() for m in self._mark.finditer(text) if self._first.match(self._letters[m[0]]))
        cuts = [0, *firsts, len(text)]
        return [
            token for begin, end in pairwise(cuts) for token in tokenize(self.plain(text[begin:end]), False)
        ]


def _one_of(chars: Iterable[str]) -> re.Pattern[str]:
    unique = "".join(map(re.escape, sorted(set(chars))))
    return re.compile(f"[{unique}]" if unique else "(?!)")


def _written(char: str, said: str, new: str) -> str:
    """Return a character of a JSON string: as it was written, or its mark."""
    return char if new == said else new


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
