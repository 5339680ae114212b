"""The modules of both packages: no public class name that means two things, and llama_cpp's private parts in
one place. Modules may have the same name in two folders, as long as their classes differ. No import of a
module that was moved away. Of the engine only what it exports, and that is little.

Layers and circles are import-linter's business; see pyproject.toml.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

PRIVATE_IN = ("mixedkv/native/llama_cpp.py", "mixedkv/_native.py")
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
OURS = ("mixedkv", "mixedkv_bench", "mixedkv_ray", "mixedkv_server", "mixedkv_service", "mixedkv_split")
TESTS = Path("tests")
ROOTS = tuple(f"python/{name}" for name in OURS)
ENGINE = Path("python/mixedkv/engine/__init__.pyi")
MOST_EXPORTS = 25
BUILT_OF_ITS_PARTS = ("mixedkv/engine/", "mixedkv_split/")  # split inference has jobs of its own


def check(roots: list[Path]) -> list[str]:
    """Return what is wrong, one line each."""
    problems = []
    classes: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.as_posix()
        for each in public_classes(text):
            classes[each].append(name)
        if not name.endswith(PRIVATE_IN):
            problems += [f"{name}:{line} uses llama_cpp's private {what}" for line, what in private(text)]
    for path in sorted(path for root in (*roots, TESTS) for path in root.rglob("*.py")):
        problems += [
            f"{path.as_posix()}:{line} imports {what}, which is no module" for line, what in gone(path)
        ]
    exports = exported(ENGINE.read_text(encoding="utf-8"))
    if len(exports) > MOST_EXPORTS:
        problems.append(
            f"{ENGINE} exports {len(exports)} names, more than {MOST_EXPORTS}: its users need fewer"
        )
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        if not any(folder in path.as_posix() for folder in BUILT_OF_ITS_PARTS):
            text = path.read_text(encoding="utf-8")
            problems += [f"{path.as_posix()}:{line} {what}" for line, what in beyond(text, exports)]
    twice = [(each, names) for each, names in classes.items() if len(names) > 1]
    return problems + [
        f"class {each} means several things, give all but one another name: {', '.join(names)}"
        for each, names in twice
    ]


def gone(path: Path) -> list[tuple[int, str]]:
    """Imports of our own modules that are not there, as a move leaves them behind."""
    named = [
        (node.lineno, node.module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS
    ]
    return [(line, name) for line, name in named if not is_module(Path("python", *name.split(".")))]


def exported(text: str) -> list[str]:
    """The names that a package's stub exports."""
    return [
        name.asname
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname
    ]


def beyond(text: str, exports: list[str]) -> list[tuple[int, str]]:
    """Imports of what the engine does not export."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "mixedkv.engine":
            names = [each.name for each in node.names if each.name not in exports]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if (node.module or "").startswith("mixedkv.engine.") else []
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names if each.name.startswith("mixedkv.engine.")]
        else:
            continue
        found += [
            (node.lineno, f"takes {name}: use what mixedkv.engine exports, or export it") for name in names
        ]
    return found


def is_module(path: Path) -> bool:
    return path.is_dir() or any(path.with_suffix(suffix).is_file() for suffix in (".py", ".pyi"))


def public_classes(text: str) -> list[str]:
    return [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def private(text: str) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in OWN):
                found.append((node.lineno, node.attr))
    return found


if __name__ == "__main__":
    problems = check([Path(root) for root in ROOTS])
    print("\n".join(problems) or "python: no class name twice, nothing private or inner outside its place")
    sys.exit(bool(problems))
