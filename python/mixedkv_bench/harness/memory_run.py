"""Runs the process that `memory` measures: it fills a cache and then reads a prompt.

As a module it is that process, which imports little: its own memory is part of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from mixedkv_bench.harness import context_facts
from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.contexts import CannotRunError, Context, LoadedModel
from mixedkv_bench.harness.filling import make_fill

_CLEAR_PEAK = "5"  # proc(5), clear_refs: set the peak to what is resident now


def in_new_process(model: Path, setting: Setting, n_ctx: int, threads: int) -> dict[str, Any]:
    """Return the fields of a row of one setting. Peaks never go down, so each is taken in a fresh process."""
    command = [sys.executable, "-m", __name__, str(model), setting.spec, str(int(setting.flash_attn))]
    done = subprocess.run([*command, str(n_ctx), str(threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with status {done.returncode}"}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _child(path: str, spec: str, flash: str, n_ctx: str, threads: str) -> dict[str, Any]:
    """Fills the context but for one micro-batch, then reads a prompt into the rest."""
    (setting,) = make_settings([spec], "on" if flash == "1" else "off")
    model = LoadedModel(Path(path))
    try:
        context = Context(model, setting, n_ctx=int(n_ctx), threads=int(threads))
        facts = context_facts.of_context(context)
        n_new = min(512, int(n_ctx))
        make_fill(context, int(n_ctx) - n_new).restore()
        _clear_peak()  # the state that filled the cache is no part of it
        context.decode(model.random_tokens(n_new))
    except CannotRunError as error:
        return {"error": str(error)}
    return {**facts, "peak_rss_bytes": _peak_rss()}


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
