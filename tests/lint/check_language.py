"""The language of docstrings, code and pages, as far as a program can see it.

- A docstring begins with a capital or a name of the code, and its first paragraph ends with a period.
- An entry of `Raises:` says when.
- What docs/reference/python.md shows has a docstring.
- A word of our own that the field's word has replaced does not come back.

Whether a sentence is understood, and how long it may be, is for readers to say.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PYTHON = Path(__file__).parents[2] / "python"
PACKAGES = tuple(f"python/{path.name}" for path in sorted(PYTHON.iterdir()) if path.is_dir())
GENERATED = ("split_pb2.py",)
OLD_WORDS = {  # and what is said now
    "doors": "service",
    "follow_each_other": "is_contiguous",
    "lacking": "subtracted bias",
    "lone": "single sequence",
    "piece": "chunk, part, span, or what it is",
    "pieces": "chunks, parts, spans, or what they are",
    "relieve": "preempt",
    "stitch": "assemble",
    "take_lost": "pop_unstartable",
}
"""Words that are gone from code and pages. The decisions, which tell how things came to be, may have them."""
OLD_NAMES = {  # and what they are now
    "asked": "requested",
    "dress": "add_middleware",
    "few": "check_n_fields, or what is counted",
    "gap": "dropped_tokens",
    "tell": "what it does: warn, publish, report",
    "wanted": "expected, requested or needed",
    "worth": "benefit, rank or verdict",
}
"""Words that no name in Python has. In a sentence they may stand."""
KEPT = re.compile(  # names of other programs, and what is stored
    r"token_to_piece|with_pieces|\"piece\"|/piece/|file\.tell\(|few_shot|worth_of_use|worth_building_on"
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_OLD = re.compile(rf"(?<![A-Za-z])({'|'.join(OLD_WORDS)})(?![a-z])")
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


def old_words(text: str) -> list[tuple[int, str]]:
    """Return line and word of each use of a word that has been replaced."""
    lines = enumerate(text.splitlines(), 1)
    return [(number, found) for number, line in lines for found in _OLD.findall(KEPT.sub("", line))]


def old_names(text: str) -> list[tuple[int, str]]:
    """Return line and word of each name in Python that has a replaced word in it."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0], word)
        for token in tokens
        if token.type == tokenize.NAME and not KEPT.search(token.line)
        for word in sorted(OLD_NAMES.keys() & token.string.lower().split("_"))
    ]


def main() -> list[str]:
    """Return what is wrong in the packages and the pages, one line each."""
    problems = []
    for path in sorted(path for each in PACKAGES for path in Path(each).rglob("*.py")):
        if path.name not in GENERATED:
            for line, name, text in docstrings(path):
                problems += [f"{path}:{line} {name}: {problem}" for problem in about_docstring(text)]
    pages = [Path("README.md"), Path("CONTRIBUTING.md"), *sorted(Path("docs").rglob("*.md"))]
    sources = [path for each in (*PACKAGES, "cpp") for path in sorted(Path(each).rglob("*.*"))]
    for path in pages + [path for path in sources if path.suffix in (".py", ".h", ".cpp")]:
        if "decisions" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        problems += [
            f"{path}:{line} says {word!r}: write {OLD_WORDS[word]!r}" for line, word in old_words(text)
        ]
        if path.suffix == ".py":
            problems += [
                f"{path}:{line} has a name with {word!r}: write {OLD_NAMES[word]!r}"
                for line, word in old_names(text)
            ]
    reference = Path("docs/reference/python.md").read_text(encoding="utf-8")
    return problems + [f"{name} is in the reference and has no docstring" for name in undocumented(reference)]


if __name__ == "__main__":
    problems = main()
    print("\n".join(problems) or "language: docstrings are whole, no word that was replaced")
    sys.exit(bool(problems))
