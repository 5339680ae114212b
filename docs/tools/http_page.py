"""docs/reference/http.md, made from the server's own OpenAPI schema.

python docs/tools/http_page.py > docs/reference/http.md
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from mixedkv_server.app import make_app
from mixedkv_server.settings import ServerSettings

_HEAD = """\
# HTTP

Every endpoint of `mixedkv serve` and the fields of its body. A running server has the same, with the limits
of each value, at `/openapi.json`. This page is made from the server's schema, by
`python docs/tools/http_page.py > docs/reference/http.md`.

What the fields do, and what the answers look like, is on [its own page](../server-fields.md).
Each field of OpenAI's API has a line in [its table](../openai-fields.md).
"""
_METHODS = ("get", "post", "patch", "delete")
_MANY = 5  # fields that a body has in common with one before it, and that are not repeated


def page() -> str:
    """Return the whole page."""
    return "\n".join(_lines(_schema())) + "\n"


def _schema() -> dict[str, Any]:
    """The description of a server with default options; only its settings are looked at."""
    settings = ServerSettings(model=("model.gguf",))
    state = SimpleNamespace(settings=settings, keys=None, metrics=SimpleNamespace(http=None))
    return make_app(cast("Any", state)).openapi()


def _lines(schema: dict[str, Any]) -> Iterator[str]:
    yield _HEAD
    bodies: list[str] = []
    yield "| endpoint | | body |"
    yield "|---|---|---|"
    for path, operations in schema["paths"].items():
        for method in _METHODS:
            if method in operations:
                body = _body(operations[method])
                bodies += [body] if body and body not in bodies else []
                link = f"[{body}](#{body.lower()})" if body else _parameters(operations[method])
                yield f"| `{method.upper()} {path}` | {_text(operations[method])} | {link} |"
    named = schema["components"]["schemas"]
    yield "\n## Bodies"
    first: dict[str, str] = {}  # where a line stands already
    for name in [*bodies, *_parts(bodies, named)]:
        yield f"\n### {name}\n"
        lines = dict(_fields(named[name]))
        shared = Counter(first[line] for line in lines.values() if line in first)
        again = [field for field, line in lines.items() if shared[first.get(line, "")] >= _MANY]
        if new := [line for field, line in lines.items() if field not in again]:
            yield from ("| field | type | |", "|---|---|---|", *new)
        for other in dict.fromkeys(first[lines[field]] for field in again):
            same = [field for field in again if first[lines[field]] == other]
            but = [field for field in named[other]["properties"] if field not in same]
            which = f"all but {_names(but)}" if len(but) < len(same) else _names(same)
            yield f"\nAs in [{other}](#{other.lower()}): {which}."
        first |= {line: name for line in lines.values() if line not in first}


def _parts(bodies: list[str], named: dict[str, Any]) -> list[str]:
    """The names of the objects within bodies, each once, in the order in which they are met."""
    found: list[str] = []
    waiting = list(bodies)
    while waiting:
        for name in re.findall(r"#/components/schemas/(\w+)", str(named[waiting.pop(0)])):
            if name not in found and name not in bodies:
                found.append(name)
                waiting.append(name)
    return found


def _names(fields: list[str]) -> str:
    return ", ".join(f"`{field}`" for field in fields)


def _body(operation: dict[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    schema = next(iter(content.values()), {}).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _parameters(operation: dict[str, Any]) -> str:
    names = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
    return "query: " + ", ".join(f"`{name}`" for name in names) if names else ""


def _text(operation: dict[str, Any]) -> str:
    text = operation.get("description") or operation["summary"] + "."
    return _cell(text.split("\n\n")[0])


def _fields(schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each field and its line of the table."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        notes = ["Required."] if name in required else []
        if field.get("default") not in (None, "", [], {}):
            notes.append(f"Default: `{field['default']}`.")
        if field.get("description"):
            notes.append(_cell(field["description"]))
        yield name, f"| `{name}` | {_type(field)} | {' '.join(notes)} |"


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in field:
            kinds = [_type(each) for each in field[several] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array" and field.get("items"):
        return f"list of {_type(field['items'])}"
    return str(field.get("type", "any"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
