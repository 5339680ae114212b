"""The layers of cpp/: no circle of includes, of modules or of folders.

A module is a header and the source file of its name. Only an include that names a file of cpp/ is a tie.
"""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PATHS = ("", "include", "llama")  # as CMake gives them to the compiler, besides the file's own folder
ALONE = ("attention", "hot_set", "streaming")  # tested without llama.cpp
HOSTED = "attention/vulkan/nodes"  # but this, which is compiled into ggml-vulkan
# of llama/: each includes those before it alone
LAYERS = ("model", "rows", "graph", "cache", "hooks", "blocks")

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.M)

Graph = dict[str, set[str]]


def find(name: str, file: Path, root: Path) -> Path | None:
    """The file of this tree that an include in `file` means, without its suffix."""
    for folder in (file.parent, *(root / path for path in PATHS)):
        if (folder / name).is_file():
            return (folder / name).resolve().relative_to(root).with_suffix("")
    return None


def circle(graph: Graph, kind: str) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"{kind} include each other: {' <- '.join(error.args[1])}"]
    return []


def above(file: Path, module: Path, others: list[Path]) -> list[str]:
    """What a file in llama/ includes of a later layer than its own."""
    if module.parts[1] not in LAYERS:
        return [f"{file} is in none of the folders {', '.join(LAYERS)} of llama"]
    later = LAYERS[LAYERS.index(module.parts[1]) + 1 :]
    wrong = [other for other in others if other.parts[0] == "llama" and other.parts[1] in later]
    return [f"{file} includes {other}, of a later layer" for other in wrong]


def check(root: Path) -> list[str]:
    """What is wrong, one line each."""
    problems: list[str] = []
    modules: Graph = {}
    folders: Graph = {}
    for file in sorted(path for path in root.rglob("*") if path.suffix in (".h", ".c", ".cpp")):
        module = file.relative_to(root).with_suffix("")
        top = module.parts[0]
        text = file.read_text(encoding="utf-8")
        needs, needed = modules.setdefault(str(module), set()), folders.setdefault(top, set())
        found = {name: find(name, file, root) for name in INCLUDE.findall(text)}
        if top == "llama":
            problems += above(file, module, [other for other in found.values() if other])
        for name, other in found.items():
            if other:
                needs |= {str(other)} - {str(module)}
                needed |= {other.parts[0]} - {top}
            outside = name.startswith(("llama", "ggml")) if other is None else other.parts[0] != top
            if top in ALONE and outside and str(module) != HOSTED:
                problems.append(f"{file} includes {name}: its folder is tested alone")
    return problems + circle(modules, "modules") + circle(folders, "folders")


if __name__ == "__main__":
    found = check(Path(sys.argv[1] if len(sys.argv) > 1 else "cpp").resolve())
    print("\n".join(found) or "cpp: no include circle")
    sys.exit(bool(found))
