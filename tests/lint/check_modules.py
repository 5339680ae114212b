"""The modules of a package: no name that means two things, and llama_cpp's private parts in one place.

Layers and circles are import-linter's business; see pyproject.toml.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

PRIVATE_IN = ("_llama_cpp.py", "_native.py")
PRIVATE = {
    "_batch",
    "_candidates",
    "_create_completion",
    "_ctx",
    "_init_sampler",
    "_input_ids",
    "_is_hybrid",
    "_is_recurrent",
    "_model",
    "_sampler",
    "_scores",
    "_stack",
}
OWN = ("self", "cls")  # an attribute of one's own may have such a name
MOST_LINES = 500
ROOTS = ("python/mixedkv", "python/mixedkv_bench")


def check(root: Path) -> list[str]:
    """What is wrong, one line each."""
    problems = []
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        if not path.stem.startswith("__"):
            modules[path.stem].append(name)
        if text.count("\n") >= MOST_LINES:
            problems.append(f"{name} has {MOST_LINES} lines or more")
        if path.name not in PRIVATE_IN:
            problems += [f"{name}:{line} uses llama_cpp's private {what}" for line, what in private(text)]
    twice = [names for names in modules.values() if len(names) > 1]
    return problems + [f"one name, two meanings: {', '.join(names)}" for names in twice]


def private(text: str) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in OWN):
                found.append((node.lineno, node.attr))
    return found


if __name__ == "__main__":
    problems = [line for root in ROOTS for line in check(Path(root))]
    print("\n".join(problems) or "python: no name twice, nothing private outside its place")
    sys.exit(bool(problems))
