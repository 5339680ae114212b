"""docs/bench-schema.md, made from the models of the rows.

python docs/tools/schema_page.py > docs/bench-schema.md
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mixedkv_bench.catalog import TESTS
from mixedkv_bench.harness.row import Row
from mixedkv_bench.output import RunHead

_WIDTH = 120

_HEAD = """\
`mixedkv bench ... --json FILE` writes a line of JSON about the run, and then one for each row as soon as it
is measured, so Ctrl-C leaves what there is. For programs, `mixedkv_bench.output.read_result(path)` reads a
file and checks it. This page is made from the fields, by `python docs/tools/schema_page.py`.

With pandas, `rows = pandas.read_json(FILE, lines=True)` and then `rows[rows.test != "run"]`, or read past the
first line: `with open(FILE) as file: next(file); rows = pandas.read_json(file, lines=True)`.

Numbers are plain JSON numbers; bytes are bytes, times are in seconds, rates are tokens per second,
divergences are in nats. A field that does not apply is left out of its row.
"""


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What `mixedkv bench` writes"
    yield ""
    yield from _paragraphs(_HEAD)
    yield "## The first line"
    yield ""
    yield from _table(RunHead.model_fields.items())
    yield ""
    yield "## Every row"
    yield ""
    yield from _table(Row.model_fields.items())
    for row in (table.row for test in TESTS.values() for table in test.tables):
        title, _, text = inspect.cleandoc(row.__doc__ or "").partition("\n\n")
        yield ""
        yield f"## `{row.model_fields['test'].default}`: {title[0].lower()}{title[1:].rstrip('.')}"
        yield ""
        yield from _paragraphs(text)
        yield from _table(
            (name, field) for name, field in row.model_fields.items() if name not in Row.model_fields
        )


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in filter(None, text.split("\n\n")):
        yield textwrap.fill(
            " ".join(paragraph.split()), _WIDTH, break_long_words=False, break_on_hyphens=False
        )
        yield ""


def _table(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield "| field | meaning |"
    yield "|---|---|"
    for name, field in fields:
        yield f"| `{field.alias or name}` | {field.description}{_parts(field.annotation)} |"


def _parts(kind: Any) -> str:
    """What a field that holds objects has in them."""
    part = next(_models(kind), None)
    if part is None:
        return ""
    items = (f"`{field.alias or name}` ({field.description})" for name, field in part.model_fields.items())
    return (": a list of " if "list" in str(kind) else ": ") + ", ".join(items)


def _models(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel) and not issubclass(kind, Row):
        yield kind
    for argument in get_args(kind):
        yield from _models(argument)


if __name__ == "__main__":
    print(page(), end="")
