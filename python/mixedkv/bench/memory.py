"""What a cache takes: bytes as allocated, the peak of a whole process, and the context a budget holds."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mixedkv.bench.harness import context_facts
from mixedkv.bench.harness.cache_settings import Setting, make_settings
from mixedkv.bench.harness.contexts import CannotRunError, Context, Model
from mixedkv.bench.harness.filling import make_fill
from mixedkv.bench.harness.progress import Progress
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.limits import CELLS, INT32_MAX
from mixedkv.model.footprint import ModelShape, footprint

_CLEAR_PEAK = "5"  # proc(5), clear_refs: set the peak to what is resident now

Row = dict[str, Any]


def measure(
    model: Path,
    shape: ModelShape,
    settings: Sequence[Setting],
    contexts: Sequence[int],
    budget: int,
    threads: int,
    progress: Progress,
    add: Callable[[Row], None],
) -> None:
    """Add one row per setting and context, each measured in a process of its own."""
    progress.add(len(settings) * len(contexts))
    for n_ctx in contexts:
        for setting in settings:
            progress.show(f"memory at {n_ctx}: {setting.name}")
            row: Row = {
                "test": "memory",
                "kv": setting.spec,
                "flash_attn": setting.flash_attn,
                "n_ctx": n_ctx,
                "threads": threads,
            }
            if shape.layers:
                row |= {"budget_bytes": budget, "longest_n_ctx": longest_context(shape, setting.kv, budget)}
            add(row | _in_child(model, setting, n_ctx, threads))
            progress.step()


def longest_context(shape: ModelShape, kv: KVSetting, budget: int) -> int:
    """Tokens of the longest context whose cache fits `budget` bytes, by formula; 0 if none does."""
    low, high = 0, INT32_MAX // CELLS + 1  # in units of 256 tokens, as llama.cpp allocates
    while low < high:
        middle = (low + high + 1) // 2
        if footprint(shape, kv, middle * CELLS).bytes <= budget:
            low = middle
        else:
            high = middle - 1
    n_ctx = low * CELLS
    needed = kv.quantization_threshold + kv.sink_tokens if isinstance(kv, MixedKVConfig) else 0
    return n_ctx if n_ctx >= needed else 0


def _in_child(model: Path, setting: Setting, n_ctx: int, threads: int) -> Row:
    """Peaks never go down, so each is taken in a fresh process."""
    command = [sys.executable, "-m", __name__, str(model), setting.spec, str(int(setting.flash_attn))]
    done = subprocess.run([*command, str(n_ctx), str(threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def _child(path: str, spec: str, flash: str, n_ctx: str, threads: str) -> Row:
    """Fills the context but for one micro-batch, then reads a prompt into the rest."""
    (setting,) = make_settings([spec], "on" if flash == "1" else "off")
    model = Model(Path(path))
    try:
        context = Context(model, setting, n_ctx=int(n_ctx), threads=int(threads))
        row = context_facts.of_context(context)
        n_new = min(512, int(n_ctx))
        make_fill(context, int(n_ctx) - n_new).restore()
        _clear_peak()  # the state that filled the cache is no part of it
        context.decode(model.random_tokens(n_new))
    except CannotRunError as error:
        return {"error": str(error)}
    return row | {"peak_rss_bytes": _peak_rss()}


def _clear_peak() -> None:
    with contextlib.suppress(OSError):  # no Linux, or not allowed: the peak then includes the filling
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    print(json.dumps(_child(*sys.argv[1:])))
