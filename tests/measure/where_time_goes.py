"""Where the time of prompts and of answers goes, by what the processor was doing, in a table.

python tests/measure/where_time_goes.py a.gguf b.gguf --threads 2 --depth 0

`perf` (Debian: linux-perf) looks a thousand times a second at what each thread of a process does. What a
thread does while it waits for the others counts as waiting. Below the table is what bounds it on the machine:
the rate at which memory is read. For each token of an answer all weights are read.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np

# The first that is found in "symbol dso" says what it was.
_KINDS = (
    (
        "weights",
        r"run_columns|run_panels|multiply<|ggml_vec_dot|ggml_gem[vm]|tinyBLAS|sgemm|tiled|weights_run",
    ),
    ("rounding columns", r"quantize_row|weights_pack|quantize_mat"),
    ("waiting, system", r"\[k\]|barrier|thread_wait|syscall|ggml_graph_compute_.*thread"),
    ("attention, KV rows", r"mixedkv|flash_attn|ggml_compute_forward_(soft_max|set_rows|cpy|dup)"),
    ("norms, RoPE, sums", r"(ggml|geglu|rms_norm_mul)_compute_forward|ggml_vec_|unary|binary_op|apply_"),
    ("Python", r"python|numpy"),
)
_OTHER = "other"

_CHILD = """
import sys, time
from mixedkv import Llama
path, work, n, depth, threads, kv = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]
threads = {"n_threads": threads, "n_threads_batch": threads}
llm = Llama(path, n_ctx=depth + n + 64, n_batch=512, kv=kv, verbose=False, **threads)
tokens = [(i * 7919) % (llm.n_vocab() - 100) + 50 for i in range(depth + n)]
llm.eval(tokens[:max(depth, 1)])
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
if work == "prompt":
    llm.eval(tokens[depth:])
else:
    for token in tokens[depth:]:
        llm.eval([token])
print(n / (time.perf_counter() - start), flush=True)
sys.stdin.readline()
"""


def _kind(symbol: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, symbol)), _OTHER)


def _shares(data: Path) -> dict[str, float]:
    """Read what perf has recorded: percent of all samples, by kind."""
    command = ["perf", "report", "-i", data, "--stdio", "--no-children", "-s", "symbol,dso", "-t", ";", "-q"]
    shares: dict[str, float] = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        if found := re.match(r"\s*([\d.]+)%\s*;(.*)", line):
            kind = _kind(found[2])
            shares[kind] = shares.get(kind, 0.0) + float(found[1])
    return shares


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def measure(model: Path, work: str, n: int, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Return tokens a second, and the shares of a run by kind in percent."""
    arguments = [model, work, n, options.depth, options.threads, options.kv]
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert _line(child.stdout) == "ready\n", f"{model} was not loaded"
        data = Path(folder) / "data"
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "999", "-p", str(child.pid), "-o", data]
        perf = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(0.5)  # until it looks
        print(file=child.stdin, flush=True)
        rate = float(_line(child.stdout))
        perf.send_signal(signal.SIGINT)
        perf.wait()
        child.communicate("\n")
        return rate, _shares(data)


def bytes_a_second(n_threads: int) -> float:
    """Read memory that no cache holds, with so many threads, and return the best rate of five."""
    parts = [np.ones(32 << 20, np.int64) for _ in range(n_threads)]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", metavar="MODEL", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=0, help="tokens in the cache before")
    parser.add_argument("--kv", default="mixed")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of the answer")
    options = parser.parse_args()
    kinds = [*(kind for kind, _ in _KINDS), _OTHER]
    print(f"| model | work | tokens a second | {' | '.join(kinds)} |")
    print("|---" * (len(kinds) + 3) + "|")
    read = bytes_a_second(options.threads)
    bounds = []
    for model in options.models:
        for work, n in (("prompt", options.prompt), ("answer", options.answer)):
            rate, shares = measure(model, work, n, options)
            cells = (f"{shares.get(kind, 0):.1f}%" for kind in kinds)
            print(f"| {model.name} | {work} | {rate:.0f} | {' | '.join(cells)} |", flush=True)
        share = rate * model.stat().st_size / read
        bounds.append(f"{model.name}: answers read {share:.0%} of what memory gives, weights alone")
    print(f"\n{options.threads} threads read {read / 1e9:.1f} GB a second.", *bounds, sep="\n")


if __name__ == "__main__":
    main()
