"""The table of bits: of each body that this machine can run, whether prompts have the same bits in any cut,
by types of rows and of weights. It prints the table as docs/server-guarantees.md has it:

    PYTHONPATH=tests/python python docs/tools/bits_table.py

A process runs with one body. The option `--measure FOLDER PROMPTS` is that process: it
reads rows and writes what it measured as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import Llama, _core
from support import TESTS
from support.models import zoo
from support.models.random_model import RandomModel

# that people use; the scalar twin is test_cuts'
BODIES = ("amx", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon")
CACHES = (
    "mixed",
    "mixed:balanced",
    "mixed:quality",
    "mixed:budget=4.5bit",
    "mixed:cold=lm4",
    "mixed:cold=tc3",
    "mixed:cold=q5_0",
    "q4_1:attention=fused",
    "q5_0:attention=fused",
    "q5_1:attention=fused",
    "mixed:attention=merged",
    "q4_0:attention=fused",
    "q8_0:attention=fused",
    "f16:attention=fused",
    "q8_0",
    "f16",
)
WEIGHTS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "F16", "BF16")
SHAPES = {  # of models with random weights: rows of 256 elements, as K quants need
    "": RandomModel(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, head_size=64, n_ff=512),
    "heads of 80": RandomModel(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, head_size=80, n_ff=512),
    "heads of 96": RandomModel(n_layer=2, n_embd=256, n_head=6, n_head_kv=2, head_size=96, n_ff=512),
    "heads of 128, five to one": RandomModel(
        n_layer=2, n_embd=256, n_head=5, n_head_kv=1, head_size=128, n_ff=512
    ),
    "heads of 256, eight to one": RandomModel(
        n_layer=2, n_embd=256, n_head=8, n_head_kv=1, head_size=256, n_ff=512
    ),
}
ZOO = ("gemma2", "gemma4", "gpt-oss")  # sliding windows, soft caps, sinks
N_PROMPT = 300  # more than a piece of 256 keys
CUTS = ((300,), (200, 100), (1,) * 20 + (280,), (299, 1), (63, 65, 1, 1, 90, 80), (150, 1, 1, 148))


@dataclass(frozen=True)
class Row:
    """A cache over a model with weights of a type, and what was measured and is promised of it."""

    model: str
    weights: str
    kv: str
    isa: str = ""
    problem: str = ""  # `KVStats.bits_problem`
    n_differing: int = -1  # of the cuts
    n_cuts: int = 0
    worst: float = 0.0  # in standard deviations of the logits

    @property
    def same(self) -> bool:
        return self.n_differing == 0


def write_model(name: str, weights: str, folder: Path) -> Path:
    """Write a model of `SHAPES` or of the zoo, with weights of a type, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace(' ', '-') or 'random'}-{weights}.gguf"
    if path.exists():
        return path
    if name in SHAPES:
        source = folder / f"{name.replace(' ', '-') or 'random'}.gguf"
        if not source.exists():
            SHAPES[name].write(source)
    else:
        source = zoo.write(name, folder)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{weights}")
    params.pure = not weights.endswith("_M")
    part = path.with_suffix(".part")
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params))
    assert code == 0, (name, weights)
    part.rename(path)
    return path


def logits(llm: Llama, tokens: list[int], steps: Iterable[int]) -> npt.NDArray[np.float32]:
    """Return the last token's, after steps of these lengths."""
    llm.reset()
    llm.kv.clear()
    at = 0
    for n in steps:
        llm.eval(tokens[at : at + n])
        at += n
    data = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.ctypeslib.as_array(data, (llm.n_vocab(),)).copy()


def measure(row: Row, folder: Path, n_prompts: int) -> Row:
    """Evaluate random prompts in cuts of all kinds."""
    path, rng = write_model(row.model, row.weights, folder), random.Random(1)
    options = {"n_ctx": 512, "n_batch": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    n_differing, worst = 0, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm = Llama(path, kv=row.kv, **options)
    with llm:
        for _ in range(n_prompts):
            tokens = [rng.randrange(3, llm.n_vocab()) for _ in range(N_PROMPT)]
            whole, *others = (logits(llm, tokens, steps) for steps in CUTS)
            assert np.isfinite(whole).all()
            n_differing += sum(not np.array_equal(x.view(np.uint32), whole.view(np.uint32)) for x in others)
            worst = max(worst, *(float(np.abs(x - whole).max() / whole.std()) for x in others))
        problem, isa = llm.kv.stats().bits_problem, _core.version()["isa"]
    n_cuts = n_prompts * (len(CUTS) - 1)
    return Row(row.model, row.weights, row.kv, isa, problem, n_differing, n_cuts, worst)


def usual_rows() -> list[Row]:
    """Each cache over weights in Q4_1, each type of weights below `mixed`, and models of other shapes."""
    rows = [Row("", "Q4_1", kv) for kv in CACHES]
    rows += [Row("", weights, "mixed") for weights in WEIGHTS if weights != "Q4_1"]
    shapes = [name for name in SHAPES if name and name != "heads of 80"]
    rows += [Row(name, "Q4_1", kv) for name in (*shapes, *ZOO) for kv in ("mixed", "q8_0:attention=fused")]
    return [*rows, Row("heads of 80", "Q4_1", "f16:attention=fused")]


def all_rows() -> list[Row]:
    """Every cache over every type of weights."""
    return [Row("", weights, kv) for weights in WEIGHTS for kv in CACHES]


def measured(body: str, rows: list[Row], folder: Path, n_prompts: int = 2) -> list[Row]:
    """Return what a process with this body measures; nothing where the machine cannot run it."""
    arguments = [sys.executable, __file__, "--measure", str(folder), str(n_prompts)]
    given = json.dumps([asdict(row) for row in rows])
    env = {**os.environ, "MIXEDKV_ISA": body, "PYTHONPATH": str(TESTS)}
    run = subprocess.run(
        arguments,
        input=given,
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if "MIXEDKV_ISA" in run.stderr and run.returncode:
        return []
    assert run.returncode == 0, run.stderr[-2000:]
    return [Row(**row) for row in json.loads(run.stdout.splitlines()[-1])]


def wrong(rows: Iterable[Row]) -> list[str]:
    """Return the rows that are promised and have other bits in some cut."""
    return [
        f"{row.isa} {row.model} {row.weights} {row.kv}: {row.n_differing} of {row.n_cuts} cuts"
        for row in rows
        if not row.problem and not row.same
    ]


def _cell(row: Row) -> str:
    if not row.problem:
        return "same bits" if row.same else f"BROKEN: {row.n_differing} of {row.n_cuts}"
    return f"{row.n_differing} of {row.n_cuts} differ" if row.n_differing else "not promised"


def markdown(by_body: dict[str, list[Row]]) -> str:
    """Return the table: a line for each cache and type of weights, a column for each body."""
    bodies = [body for body, rows in by_body.items() if rows]
    lines = ["| weights | cache | " + " | ".join(bodies) + " |", "|---|---|" + "---|" * len(bodies)]
    for at, row in enumerate(by_body[bodies[0]]):
        cells = [_cell(by_body[body][at]) for body in bodies]
        model = f" ({row.model})" if row.model else ""
        lines.append(f"| {row.weights}{model} | `{row.kv}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "PROMPTS"))
    parser.add_argument("--all", action="store_true", help="every cache over every type of weights")
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    if args.measure:
        folder, n_prompts = Path(args.measure[0]), int(args.measure[1])
        rows = [measure(Row(**row), folder, n_prompts) for row in json.load(sys.stdin)]
        print(json.dumps([asdict(row) for row in rows]))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = all_rows() if args.all else usual_rows()
        print(markdown({body: measured(body, rows, Path(folder), args.prompts) for body in BODIES}))


if __name__ == "__main__":
    main()
