"""Prepares a chat for evaluation: what its messages hold is text, and its prompt begins with BOS.
See docs/decisions/110-text-is-text.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.prompts.content_marks import ContentMarks

if TYPE_CHECKING:
    import llama_cpp


class ChatPrompt:
    """Stands in for a `Llama` in llama-cpp-python's chat handlers, which render a chat and tokenize it
    themselves: its tokens begin with BOS where the vocabulary asks for it. All else is the `Llama`'s.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        tokens = self._llm.tokenize(text, add_bos, special)
        return _llama_cpp.with_bos(_llama_cpp.vocab(self._llm), tokens) if special else tokens


def marked_chat(
    marks: ContentMarks,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return the messages and the arguments of `create_chat_completion` with marks in place of the control
    tokens that they hold.

    Args:
        metadata: of the model's file, which has its templates.
    """
    marked = dict(options)
    names = (name for name in metadata if name.startswith("tokenizer.chat_template"))
    template = "".join(map(metadata.__getitem__, names))
    for name in ("tools", "functions"):
        if marked.get(name):
            marked[name] = marks.descriptions(marked[name], template)
    return marks.messages(messages, template), marked


def tokens_of_marked(
    marks: ContentMarks, text: bytes, add_bos: bool, tokenize: Callable[[bytes, bool, bool], list[int]]
) -> list[int]:
    """Return the tokens of a rendered chat that may have marks.

    Args:
        tokenize: as `Llama.tokenize`, for texts without marks.
    """
    tokens = marks.tokens(
        text.decode("utf-8", "surrogateescape"),
        lambda part, special: tokenize(part.encode("utf-8", "surrogateescape"), False, special),
    )
    if not add_bos:
        return tokens
    letter = tokenize(b"a", False, True)
    around = tokenize(b"a", True, True)  # with what begins a sequence, and maybe what ends it
    at = next((i for i in range(len(around)) if around[i : i + len(letter)] == letter), len(around))
    return [*around[:at], *tokens, *around[at + len(letter) :]]
