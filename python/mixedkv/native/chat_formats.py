"""The chat formats of llama-cpp-python, by the names that it has for them: "llama-2", "vicuna", "chatml"."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import llama_cpp
from llama_cpp import llama_chat_format

_FALLBACK = "llama-2"  # what llama_cpp takes for a file without a template


@lru_cache(maxsize=1)
def _formats() -> dict[str, Any]:
    """Return the functions that render chats, by name. The registry has a handler made of each."""
    formats = {}
    registry: Any = llama_chat_format.LlamaChatCompletionHandlerRegistry
    for name, handler in registry()._chat_handlers.items():
        formatter = inspect.getclosurevars(handler).nonlocals.get("chat_formatter")
        if formatter is not None and not name.startswith("chat_template."):  # these are of files
            formats[name] = formatter
    return formats


def format_name(given: str) -> str:
    """Return the name of a format, "" if there is none. Names of functions, as "llama2", are taken too."""
    function = "format_" + given.replace("-", "_")
    names = (name for name, formatter in _formats().items() if formatter.__name__ == function)
    return given if given in _formats() else next(names, "")


def find_format(given: str) -> Any:
    """Return one of the formats, None if no one has this name."""
    return _formats().get(format_name(given))


def chosen_format(llm: llama_cpp.Llama) -> str:
    """Return the chat format that a `Llama` was given; "" for its file's template."""
    name, metadata = llm.chat_format or "", llm.metadata
    has_template = "tokenizer.chat_template" in metadata
    guessed = llama_chat_format.guess_chat_format_from_gguf_metadata(metadata) if has_template else _FALLBACK
    return "" if name == guessed else format_name(name)


def chat_formatter(given: str) -> Any:
    """Return one of the formats.

    Raises:
        ValueError: no one has this name; the message lists them.
    """
    if (formatter := find_format(given)) is not None:
        return formatter
    raise ValueError(
        f"chat_format={given!r} is not one of llama-cpp-python's: use one of {', '.join(sorted(_formats()))}"
    )
