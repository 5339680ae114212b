"""Run a model in less memory than it takes: layers that are streamed, beside plain mmap and the disk itself.

    python tests/measure/streaming.py -m model.gguf --memory 2GiB 4GiB [--modes direct prefetch mmap]

Each mode runs in a process and a control group of its own, without swap; that needs root, or a group that is
delegated. "resident" has no limit: what the others' logits are compared with. The disk's rate is that of
four readers of 4 MiB with O_DIRECT.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv.cli.words import memory
from mixedkv.engine import Engine
from mixedkv.limits import padded
from mixedkv.llama import Llama
from mixedkv.streaming.layer_choice import parse_layers

_GROUPS = Path("/sys/fs/cgroup")
_CHUNK, _READERS, _READING = 4 << 20, 4, 1.5


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Callable[[], None]]:
    """Make a control group of `limit` bytes below this process's own; what puts a process into it."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    is_v1 = "memory" in own
    root = _GROUPS / "memory" if is_v1 else _GROUPS
    folder = root / own["memory" if is_v1 else ""].lstrip("/") / f"mixedkv-{os.getpid()}"
    swap = ("memory.memsw.limit_in_bytes", limit) if is_v1 else ("memory.swap.max", 0)
    try:
        folder.mkdir()
    except OSError as error:
        raise SystemExit(f"a control group cannot be made in {folder.parent}: {error}") from None
    try:
        (folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(limit))
        if (folder / swap[0]).exists():
            (folder / swap[0]).write_text(str(swap[1]))
        yield lambda: (folder / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        folder.rmdir()


def disk_rate(path: Path) -> float:
    """Bytes a second of a file that is read in order, past the page cache where that can be."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    n_chunks, numbers, began = max(1, os.fstat(fd).st_size // _CHUNK), count(), time.perf_counter()

    def read() -> int:
        n = 0
        with mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as buffer:
            while time.perf_counter() < began + _READING:
                n += os.preadv(fd, [buffer], next(numbers) % n_chunks * _CHUNK)
        return n

    try:
        with ThreadPoolExecutor(_READERS) as pool:
            total = sum(each.result() for each in [pool.submit(read) for _ in range(_READERS)])
        return total / (time.perf_counter() - began)
    finally:
        os.close(fd)


def child(request: dict[str, Any]) -> dict[str, Any]:
    """Read a prompt, generate, then answer several prompts at a time."""
    warnings.simplefilter("ignore")  # of memory that cannot be locked
    threads = {"n_threads": request["threads"], "n_threads_batch": request["threads"]}
    layers = request["layers"] if request["mode"] in ("direct", "prefetch") else None
    options = {"kv": request["kv"], "n_ctx": request["n_ctx"], "n_seq_max": request["clients"] + 1}
    options |= {"kv_unified": True, "stream_mode": request["mode"], "stream_layers": layers, **threads}
    llm = Llama(request["model"], verbose=False, **options)
    logits = hashlib.sha256()
    prompt = np.random.default_rng(1).integers(3, llm.n_vocab(), request["n_prompt"]).tolist()
    prefill = timed(llm, prompt, logits)
    before = bytes_read()
    passes = [timed(llm, [token], logits) for token in prompt[: request["n_gen"]]]
    found = {
        "prefill": prefill,
        "passes": passes,
        "read": bytes_read() - before,
        "logits": logits.hexdigest(),
    }
    if llm.streaming:
        stats = llm.streaming.stats()
        found["streamed"] = f", {len(stats.layers)} layers of {stats.bytes_pass / 2**30:.2f} GiB read a pass"
    llm.kv.clear()
    with Engine(llm, parallel=request["clients"]) as engine:
        found["clients"] = at_a_time(engine, request["clients"], request["n_gen"])
    llm.close()
    return found


def timed(llm: Llama, tokens: list[int], logits: Any) -> float:
    began = time.perf_counter()
    llm.eval(tokens)
    seconds = time.perf_counter() - began
    values = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    logits.update(np.ctypeslib.as_array(values, (llm.n_vocab(),)).tobytes())
    return seconds


def at_a_time(engine: Engine, n: int, n_gen: int) -> float:
    """Tokens a second of `n` answers at a time, from when all have their first one."""
    bias = tuple((token, -100.0) for token in engine.detokenizer.ends)
    options: dict[str, Any] = {"max_tokens": n_gen + 1, "temperature": 0.0, "logit_bias": bias}
    answers = [engine.submit([1, 3 + i, 5 + i], **options) for i in range(n)]
    for answer in answers:
        answer.result()
    jobs = [answer.job for answer in answers]
    first, last = max(job.t_first or 0.0 for job in jobs), max(job.t_last or 0.0 for job in jobs)
    return n * n_gen / max(last - first, 1e-9)


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def run(request: dict[str, Any], join: Callable[[], None] | None) -> dict[str, Any]:
    """Run `child` in a process, with the file dropped from the page cache."""
    with open(request["model"], "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=join)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(name: str, found: dict[str, Any], n_prompt: int, disk: float, same: bool) -> None:
    seconds = statistics.median(found["passes"])
    print(
        f"{name}: prompt {n_prompt / found['prefill']:.1f} tokens/s, {seconds:.3f} s a token, read at "
        f"{found['read'] / sum(found['passes']) / disk:.0%} of the disk's {disk / 1e9:.1f} GB/s, "
        f"several answers {found['clients']:.2f} tokens/s, logits {'the same' if same else 'others'}"
        f"{found.get('streamed', '')}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--memory", type=memory, nargs="*", default=[])
    parser.add_argument("--modes", nargs="+", default=["mmap", "prefetch", "direct"])
    parser.add_argument(
        "--layers", type=parse_layers, default="auto", help="as --stream-layers of `mixedkv run`"
    )
    parser.add_argument("--kv", default="f16")
    for name, default in (("clients", 8), ("threads", 2), ("n-prompt", 32), ("n-gen", 8), ("n-ctx", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    request = vars(parser.parse_args())
    limits, modes, model = request.pop("memory"), request.pop("modes"), Path(request["model"])
    if not request["n_ctx"]:
        request["n_ctx"] = padded(request["n_prompt"] + (1 + request["clients"]) * (request["n_gen"] + 16))
    whole = run({**request, "mode": "resident"}, None)
    show("resident", whole, request["n_prompt"], disk_rate(model), True)
    for limit in limits:
        for mode in modes:
            disk = disk_rate(model)
            with memory_group(limit) as join:
                found = run({**request, "mode": mode}, join)
            same = found["logits"] == whole["logits"]
            show(f"{mode} in {limit / 2**30:g} GiB", found, request["n_prompt"], disk, same)


if __name__ == "__main__":
    main()
