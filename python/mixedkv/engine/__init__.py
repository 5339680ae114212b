"""Continuous batching on one context, without HTTP: many prompts are answered at once, and a beginning that
they share is evaluated once. See docs/python.md.

What `__init__.pyi` names is all that the server and the command line take of it: tests/lint/check_modules.py
refuses imports of what is inside, and an export too many.

A name is loaded when it is first used: the engine alone needs no store, no chunks and no embeddings
(https://scientific-python.org/specs/spec-0001/).
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULE_OF = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for name in node.names
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
