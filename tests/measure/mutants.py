"""Change one line of the package at a time, and count the changes that a test notices.

    python tests/measure/mutants.py cover DATA            # once: which test file runs which line
    python tests/measure/mutants.py run DATA --n 200 --seed 1 > mutants.jsonl

Sources are changed in place and restored, so use a worktree of its own. Needs `coverage`. A mutant is run
against the test files that run its line, those that run least first, until a test fails or `--limit` is over.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "python"
PACKAGES = ("mixedkv", "mixedkv_server", "mixedkv_service", "mixedkv_split")
OPERATORS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "and": "or", "or": "and", "+": "-", "-": "+", "*": "+", "//": "*",
}  # fmt: skip
CONFIG = """[run]
context = {context}
dynamic_context = test_function
data_file = {data}
parallel = true
patch = subprocess, fork, _exit
source_dirs = {sources}
"""


@dataclass(frozen=True)
class Mutant:
    """One line of a file, as it is and as it becomes."""

    file: str
    line: int
    old: str
    new: str
    kind: str


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield what can be changed in the functions of a file."""
    source = path.read_text()
    lines = source.splitlines()
    name = str(path.relative_to(ROOT))

    def change(line: int, start: int, end: int, new: str, kind: str) -> Iterator[Mutant]:
        old = lines[line - 1]
        changed = old.encode()[:start].decode() + new + old.encode()[end:].decode()
        yield Mutant(name, line, old, changed, kind)

    def between(left: ast.expr, right: ast.expr, kind: str) -> Iterator[Mutant]:
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        text = lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        operator = text.strip(" ()")
        if operator in OPERATORS:
            start = left.end_col_offset + text.index(operator)
            end = start + len(operator)
            yield from change(right.lineno, start, end, OPERATORS[operator], kind)

    functions = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.FunctionDef)]
    inside = {id(x): x for function in functions for part in function.body for x in ast.walk(part)}
    for node in inside.values():
        match node:
            case ast.Compare():
                yield from between(node.left, node.comparators[0], "comparison")
            case ast.BoolOp():
                yield from between(node.values[0], node.values[1], "and/or")
            case ast.BinOp():
                yield from between(node.left, node.right, "arithmetic")
            case ast.UnaryOp(op=ast.Not()):
                yield from change(node.lineno, node.col_offset, node.operand.col_offset, "", "not")
            case ast.Constant(value=bool() | int() as value) if node.end_lineno == node.lineno:
                value = not value if isinstance(value, bool) else value + 1
                yield from change(
                    node.lineno, node.col_offset, node.end_col_offset or 0, str(value), "constant"
                )
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() if node.end_lineno == node.lineno:
                yield from change(node.lineno, node.col_offset, node.end_col_offset or 0, "pass", "statement")


def cover(data: Path, tier: str) -> None:
    """Run each test file alone, and note the lines it runs, also in processes it starts."""
    data.mkdir(parents=True, exist_ok=True)
    sources = " ".join(f"\n    {ROOT / 'python' / name}" for name in PACKAGES)
    for path in sorted(TESTS.rglob("test_*.py")):
        file = str(path.relative_to(TESTS))
        config = data / "coveragerc"
        config.write_text(CONFIG.format(context=f"{file}:{tier}", data=data / "c", sources=sources))
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", file, "--tier", tier]
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", *pytest]
        subprocess.run(command, cwd=TESTS, check=False)


def covering(data: Path) -> dict[str, dict[int, set[str]]]:
    """Return, of each file and line, the test files that run it."""
    combined = Coverage(data_file=str(data / "c"))
    if not (data / "c").exists():
        combined.combine([str(data)], keep=True)
        combined.save()
    found = CoverageData(str(data / "c"))
    found.read()
    result: dict[str, dict[int, set[str]]] = {}
    for file in found.measured_files():
        inner = file.partition("/python/")[2]
        result[f"python/{inner}"] = {
            line: {context.partition(":")[0] for context in contexts if ":" in context}
            for line, contexts in found.contexts_by_lineno(file).items()
        }
    return result


def run(mutant: Mutant, files: list[str], tier: str, limit: float) -> str:
    """Return how it ended: `caught`, `timeout`, `survived`, or `invalid` for no Python."""
    path = ROOT / mutant.file
    source = path.read_text()
    lines = source.split("\n")
    lines[mutant.line - 1] = mutant.new
    changed = "\n".join(lines)
    try:
        compile(changed, mutant.file, "exec")
    except SyntaxError:
        return "invalid"
    times = path.stat()
    pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tier", tier, *files]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    path.write_text(changed)
    process = subprocess.Popen(
        [sys.executable, *pytest], cwd=TESTS, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return "timeout"
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return "survived" if code in (0, 5) else "caught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("cover", "run"))
    parser.add_argument("data", type=Path, help="folder of the measured lines")
    parser.add_argument("--tier", default="core")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=3, help="test files for each mutant")
    parser.add_argument("--limit", type=float, default=90, help="seconds for each mutant")
    args = parser.parse_args()
    if args.what == "cover":
        return cover(args.data, args.tier)
    lines = covering(args.data)
    runs = {file: sum(file in tests for x in lines.values() for tests in x.values()) for file in
            {test for x in lines.values() for tests in x.values() for test in tests}}  # fmt: skip
    sources = sorted(path for name in PACKAGES for path in (ROOT / "python" / name).rglob("*.py"))
    every = [
        mutant for path in sources for mutant in mutants(path) if lines.get(mutant.file, {}).get(mutant.line)
    ]
    for mutant in random.Random(args.seed).sample(every, min(args.n, len(every))):
        files = sorted(lines[mutant.file][mutant.line], key=runs.__getitem__)[: args.files]
        start = time.monotonic()
        ended = run(mutant, files, args.tier, args.limit)
        row = {
            **asdict(mutant),
            "tests": files,
            "ended": ended,
            "seconds": round(time.monotonic() - start, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
