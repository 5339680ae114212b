"""Between text and tokens: chat templates, tokenizing, grammars from schemas.

Needs the vocabulary, not the context, so it works on any thread while the engine decodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format, llama_grammar

from mixedkv.llama import Llama
from mixedkv.server.sampling import Sampler, Sampling

_MAX_SCHEMA = 1 << 16
_MAX_REPEAT = 2000  # llama.cpp's own limit
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_PATTERN_REPEAT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")


class Language:
    """The tokenizer and the chat template of a model.

    Args:
        chat_format: name of one of llama-cpp-python's formats, for a model that has no template; "" is none.

    Raises:
        ValueError: there is no such format.
    """

    def __init__(self, llm: Llama, chat_format: str = "") -> None:
        self._model = llm._model
        self._vocab = llm._model.vocab
        self.n_ctx = int(llm.n_ctx())
        self.n_vocab = int(llm.n_vocab())
        self._eos = self._piece_text(llm.token_eos())
        self._formatter = self._make_formatter(llm, chat_format)

    @property
    def has_chat(self) -> bool:
        return self._formatter is not None

    def tokenize(self, text: str, *, start: bool = True, special: bool = False) -> list[int]:
        """Tokens of a text; `start`: it begins a sequence, `special`: control tokens are read as such."""
        return list(self._model.tokenize(text.encode("utf-8"), start, special))

    def prompt(self, prompt: str | Sequence[int], *, start: bool = True) -> list[int]:
        """Tokens of a raw prompt, text or tokens.

        Raises:
            ValueError: a token is not of this model.
        """
        if isinstance(prompt, str):
            return self.tokenize(prompt, start=start, special=True)
        if bad := next((token for token in prompt if not 0 <= token < self.n_vocab), None):
            raise ValueError(f"prompt: token {bad} is not one of this model's {self.n_vocab}")
        return list(prompt)

    def chat(self, messages: Sequence[dict[str, Any]], *, start: bool = True) -> tuple[list[int], list[str]]:
        """Tokens of a chat, up to where the answer begins, and strings that end the answer.

        Raises:
            ValueError: the model has no chat template, or its template refuses the messages.
        """
        if self._formatter is None:
            raise ValueError(
                "this model has no chat template: use /v1/completions, or serve it with chat_format"
            )
        try:
            result = self._formatter(messages=list(messages))
        except Exception as error:  # templates are programs of the model's file
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from None
        tokens = self.tokenize(result.prompt, start=start and not result.added_special, special=True)
        stops = [result.stop] if isinstance(result.stop, str) else list(result.stop or ())
        return tokens, [stop for stop in stops if stop and stop != self._eos]

    def sampler(self, sampling: Sampling) -> Sampler:
        """
        Raises:
            ValueError: a token of logit_bias is not of this model, or the grammar cannot be read.
        """
        for token, _ in sampling.logit_bias:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"logit_bias: token {token} is not one of this model's {self.n_vocab}")
        return Sampler(self._vocab, sampling, self.n_ctx)

    def _piece_text(self, token: int) -> str:
        return self._model.token_get_text(token) if token >= 0 else ""

    def _make_formatter(self, llm: Llama, chat_format: str) -> Any:
        if chat_format:
            name = "format_" + chat_format.replace("-", "_")
            formatter = getattr(llama_chat_format, name, None)
            if formatter is None:
                raise ValueError(f"chat_format={chat_format!r} is not one of llama-cpp-python's")
            return formatter
        template = llm.metadata.get("tokenizer.chat_template")
        if not template:
            return None
        bos = self._piece_text(llm.token_bos())
        return llama_chat_format.Jinja2ChatFormatter(template=template, eos_token=self._eos, bos_token=bos)


def json_grammar() -> str:
    """GBNF of any JSON value."""
    return str(llama_grammar.JSON_GBNF)


def schema_grammar(schema: dict[str, Any]) -> str:
    """GBNF of a JSON schema, by llama-cpp-python's converter.

    Raises:
        ValueError: the schema is too large, or uses what the converter does not know.
    """
    try:
        text = json.dumps(schema)
        _check_schema(schema)
        if len(text) > _MAX_SCHEMA:
            raise ValueError(f"it has {len(text)} characters, at most {_MAX_SCHEMA} are taken")
        grammar = str(llama_grammar.json_schema_to_gbnf(text))
        grammar.encode("utf-8")
    except RecursionError:
        raise ValueError("json_schema: nested too deep") from None
    except Exception as error:  # the converter asserts and indexes
        raise ValueError(
            f"json_schema: cannot be turned into a grammar: {str(error)[:500] or 'malformed'}"
        ) from None
    return grammar


def _check_schema(node: Any) -> None:
    """Repetitions are written out, so a large number is a large grammar."""
    if isinstance(node, list):
        for item in node:
            _check_schema(item)
    if isinstance(node, dict):
        for name in _COUNTS:
            value = node.get(name)
            if isinstance(value, (int, float)) and not 0 <= value <= _MAX_REPEAT:
                raise ValueError(f"{name}={value}: at most {_MAX_REPEAT} can be checked")
        if isinstance(pattern := node.get("pattern"), str):
            _check_pattern(pattern)
        for item in node.values():
            _check_schema(item)


def _check_pattern(pattern: str) -> None:
    product = 1
    for low, high in _PATTERN_REPEAT.findall(pattern):
        if len(low) > 6 or len(high) > 6:
            raise ValueError(f"pattern repeats more than {_MAX_REPEAT} times")
        product *= max(int(low or 0), int(high or 0), 1)
    if product > _MAX_REPEAT or len(pattern) > _MAX_REPEAT:
        raise ValueError(f"pattern is longer or repeats more than {_MAX_REPEAT} times")


def silence() -> None:
    """Drop llama.cpp's log: errors reach clients as answers, and some log lines repeat a prompt's text."""
    llama_cpp.llama_log_set(_no_log, None)


@llama_cpp.llama_log_callback
def _no_log(_level: int, _text: bytes, _data: Any) -> None:
    pass
