"""Reads chat templates without rendering them.

A model can be opened whose template does not parse: its chats fail, and say why.
"""

from __future__ import annotations

import json

import jinja2
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

_KEY = "tokenizer.chat_template"


def syntax_error(template: str) -> str:
    """Return why a chat template does not parse; "" if it does."""
    try:
        Jinja2ChatFormatter(template=template, eos_token="", bos_token="")
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except (jinja2.TemplateError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


def lexed(template: str) -> list[tuple[int, str, str]]:
    """Return the words of a chat template with their lines and kinds, without white space; none of one that
    does not parse.
    """
    try:
        return [word for word in jinja2.Environment().lex(template) if word[1] != "whitespace"]
    except jinja2.TemplateSyntaxError:
        return []


def readable(metadata: dict[str, str]) -> dict[str, str]:
    """Return a model's metadata with a template that raises the error in place of one that does not parse."""
    out = dict(metadata)
    for name, text in metadata.items():
        if (name == _KEY or name.startswith(f"{_KEY}.")) and (error := syntax_error(text)):
            why = json.dumps(f"it does not parse: {error}")
            out[name] = f"{{{{ raise_exception({why}) }}}}"
    return out
