"""The language of docstrings and pages, as far as a program can see it.

- The first line of a docstring is a sentence. It begins with a capital or a name of the code, ends
  with a period, and does not begin with a word that makes it a fragment ("What ...", "Whether ...").
- An entry of `Raises:` says when.
- What docs/reference/python.md shows has a docstring.
- A sentence on a page has at most 30 words. Tables, code and the decisions may have longer ones.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PYTHON = Path(__file__).parents[2] / "python"
PACKAGES = tuple(f"python/{path.name}" for path in sorted(PYTHON.iterdir()) if path.is_dir())
GENERATED = ("split_pb2.py",)
MOST_WORDS = 30

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_FRAGMENT = re.compile(r"(What|Whether|How|Which|Who|Whose|Where|That|Of|For|As|None)\b")
_BEGINS = re.compile(r"""[A-Z`"'0-9\[]""")


def docstrings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, name and text of each docstring of a module, its own first."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, Documented) else None
        if text:
            yield node.body[0].lineno, getattr(node, "name", path.stem), text


def undocumented(page: str) -> Iterator[str]:
    """Yield the classes and public methods that a page of mkdocstrings shows and that have no docstring."""
    for name in re.findall(r"^::: ([\w.]+)$", page, re.M):
        module, _, last = name.rpartition(".")
        whole = last.islower()  # a module, of which all classes are shown
        path = Path("python", *(name if whole else module).split(".")).with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (whole or node.name == last):
                shown = [node, *(each for each in node.body if _is_shown(each))]
                yield from (f"{name}: {each.name}" for each in shown if not ast.get_docstring(each))


def _is_shown(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
        return False
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return not any(each == "overload" or each.endswith(".setter") for each in decorators)


def about_docstring(text: str) -> list[str]:
    """Return what is wrong with a docstring."""
    first = " ".join(text.split("\n\n")[0].split())
    problems = []
    if section := re.match(r"(Args|Attributes|Returns|Yields|Raises):", first):
        problems.append(f"begins with {section.group()} say first what it is, or does")
    elif _FRAGMENT.match(first):
        problems.append(f"begins with {first.split()[0]!r}, which makes no sentence: {first[:60]}")
    elif not _BEGINS.match(first):
        problems.append(f"begins with a small letter; put code in backticks: {first[:60]}")
    elif not first.endswith((".", ":", "?")):
        problems.append(f"has no period at the end of its first paragraph: ... {first[-60:]}")
    return problems + [f"does not say when it raises {name}" for name in bare_raises(text)]


def bare_raises(text: str) -> list[str]:
    """Return the names in a docstring's `Raises:` that have no text behind them."""
    _, found, section = text.partition("\nRaises:\n")
    if not found:
        return []
    lines = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    entries = [line for line in lines if line.startswith("    ") and not line.startswith("     ")]
    return [entry.strip() for entry in entries if not re.match(r"    [\w.]+(, [\w.]+)*: \S", entry)]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and words of each sentence of a page that is in no table, list of links or code."""
    lines = text.splitlines()
    paragraph: list[str] = []
    begin, fenced = 0, False
    for number, line in enumerate([*lines, ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        stops = fenced or line.lstrip().startswith(("|", "#", "```", "<!--", "!["))
        item = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if paragraph and (stops or item or not line.strip() or line.startswith("    ")):
            for each in re.split(r"(?<=[.!?:])(?<!e\.g\.)\)?\s+(?=[^a-z])", " ".join(paragraph)):
                yield begin, each
            paragraph = []
        if line.strip() and not stops and not line.startswith("    "):
            begin = begin if paragraph else number
            paragraph.append(line[item.end() :] if item else line.strip())


def long_sentences(text: str) -> list[tuple[int, int, str]]:
    """Return line, number of words and beginning of each sentence that is too long."""
    found = []
    for line, sentence in sentences(text):
        plain = re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", sentence))
        words = len([word for word in plain.split() if re.search(r"\w", word)])
        if words > MOST_WORDS:
            found.append((line, words, sentence[:60]))
    return found


def main() -> list[str]:
    """Return what is wrong in the packages and the pages, one line each."""
    problems = []
    for path in sorted(path for each in PACKAGES for path in Path(each).rglob("*.py")):
        if path.name not in GENERATED:
            for line, name, text in docstrings(path):
                problems += [f"{path}:{line} {name}: {problem}" for problem in about_docstring(text)]
    pages = [Path("README.md"), Path("CONTRIBUTING.md"), *sorted(Path("docs").rglob("*.md"))]
    for path in pages:
        if "decisions" not in path.parts:
            problems += [
                f"{path}:{line} has a sentence of {words} words: {text} ..."
                for line, words, text in long_sentences(path.read_text(encoding="utf-8"))
            ]
    reference = Path("docs/reference/python.md").read_text(encoding="utf-8")
    return problems + [f"{name} is in the reference and has no docstring" for name in undocumented(reference)]


if __name__ == "__main__":
    problems = main()
    print("\n".join(problems) or "language: docstrings begin with sentences, pages have short ones")
    sys.exit(bool(problems))
