"""Time products with weights in two environments in turns, and say how far they are from those in F64.

    PYTHONPATH=tests/python python tests/measure/weight_products.py --columns 1,16,64,512
    PYTHONPATH=tests/python python tests/measure/weight_products.py --a MIXEDKV_ISA=avx512 --b "" --types Q4_0

Without --a and --b products of llama.cpp are compared with ours, on one thread. A ratio is b's time by a's,
within a turn.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import gguf
import numpy as np

from support.children import weight_products_child as ggml

TURNS = 12
SECONDS = 0.1  # of a turn


class Plan(ctypes.Structure):
    """Hold ggml_cplan, whose memory is the caller's."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("others", ctypes.c_char * 128),
    )


def product_of(kind: str, n_elements: int, n_rows: int, n_columns: int) -> tuple[Callable[[], object], float]:
    """Return what computes a product of random numbers, and its error against F64."""
    random = np.random.default_rng(1)
    memory = (n_rows + n_columns) * n_elements * 4 + n_rows * n_columns * 4 + (64 << 20)
    context = ctypes.c_void_p(ggml._base.ggml_init(ggml._InitParams(memory, None, False)))
    some = random.standard_normal((min(n_rows, 256), n_elements), np.float32) / 30
    values = random.standard_normal((n_columns, n_elements), np.float32)
    values[:, ::97] *= 20
    few = ggml._tensor(context, ggml.ALL[kind], some.shape)
    ggml._quantise(few, ggml.ALL[kind], some)
    rows = ggml._tensor(context, ggml.ALL[kind], (n_rows, n_elements))
    ggml._array(rows)[:] = np.resize(ggml._array(few), ggml._array(rows).shape)
    columns = ggml._tensor(context, ggml._F32, values.shape)
    ggml._array(columns)[:] = values.view(np.uint8).ravel()
    graph = ctypes.c_void_p(ggml._base.ggml_new_graph(context))
    product = ctypes.c_void_p(ggml._base.ggml_mul_mat(context, rows, columns))
    ggml._base.ggml_build_forward_expand(graph, product)
    ggml._cpu.ggml_graph_plan.restype = Plan
    plan = ggml._cpu.ggml_graph_plan(graph, 1, None)
    work = ctypes.create_string_buffer(plan.work_size + 64)
    plan.work_data = ctypes.addressof(work)

    def compute() -> object:
        return ggml._cpu.ggml_graph_compute(graph, ctypes.byref(plan)), work

    compute()
    got = ggml._array(product).view(np.float32).reshape(n_columns, n_rows)[:, : len(some)].astype(np.float64)
    stored = gguf.quants.dequantize(
        ggml._array(few).reshape(len(some), -1), gguf.GGMLQuantizationType(ggml.ALL[kind])
    )
    exact = values.astype(np.float64) @ stored.astype(np.float64).T
    return compute, float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


def child(kind: str, *shape: str) -> None:
    """Answer each line with the least seconds of a product in one turn; the first line is the error."""
    compute, error = product_of(kind, *(int(n) for n in shape))
    print(error, flush=True)
    for _ in sys.stdin:
        times, end = [], time.perf_counter() + SECONDS
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            compute()
            times.append(time.perf_counter() - start)
        print(min(times), flush=True)


def start(environment: str, *shape: object) -> subprocess.Popen[str]:
    more = dict(entry.split("=", 1) for entry in environment.split(",") if entry)
    command = [sys.executable, __file__, "child", *map(str, shape)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env={**os.environ, **more}, **pipes)


def ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--types", default="Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q4_K,Q5_K,Q6_K,MXFP4")
    parser.add_argument("--columns", default="1")
    parser.add_argument("--n-elements", type=int, default=2048)
    parser.add_argument("--n-rows", type=int, default=512)
    parser.add_argument("--a", default="MIXEDKV_WEIGHTS=llama.cpp")
    parser.add_argument("--b", default="")
    given = parser.parse_args()
    print(
        "| type | columns | a, b: billion products a second | b's time by a's | errors |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for kind in given.types.split(","):
        for n_columns in given.columns.split(","):
            shape = (kind, given.n_elements, given.n_rows, n_columns)
            both = [start(environment, *shape) for environment in (given.a, given.b)]
            errors = [float(process.stdout.readline()) for process in both if process.stdout]
            turns = [[ask(process) for process in both] for _ in range(TURNS)]
            for process in both:
                process.communicate()
            rates = [
                given.n_elements * given.n_rows * int(n_columns) / min(turn[i] for turn in turns) / 1e9
                for i in range(2)
            ]
            ratio = statistics.median(b / a for a, b in turns)
            print(
                f"| {kind} | {n_columns} | {rates[0]:.0f}, {rates[1]:.0f} | {ratio:.2f} "
                f"| {errors[0]:.2e}, {errors[1]:.2e} |",
                flush=True,
            )


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["child"] else main()
