"""A llama-bench, of llama.cpp or a relative of it, beside this package's library, for the speed table.

The program is run once a round for each setting and depth, and says itself how long it took: it fills its
cache anew each time, which is not timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.speed_run import RunFacts, SpeedWork

_SECONDS = 3600.0  # of one run


def check_program(path: Path) -> None:
    """Raise ValueError unless it is a program."""
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ValueError(f"--peer {path} is not a program: give the path of a llama-bench")


class BenchRunner:
    """A setting at one depth, measured by a program; each measurement is a run of it."""

    def __init__(self, program: Path, model: ModelFile, setting: Setting, work: SpeedWork) -> None:
        self._name, self._work = program.name, work
        self._command = [str(program.resolve()), "-m", str(model.path.resolve()), "-t", str(work.threads)]
        self._command += ["-ctk", setting.kv.type_k, "-ctv", setting.kv.type_v]
        self._command += ["-fa", str(int(setting.flash_attn)), "-r", "1", "-ngl", "0", "-o", "json"]
        self._command += ["-p", str(work.n_prompt), "-n", str(work.n_gen), "-d", str(work.depth)]
        self.facts: RunFacts = {"fill": "real", "attention": "llama.cpp"}

    def measure(self) -> tuple[float, float]:
        try:
            with tempfile.TemporaryDirectory() as folder:  # some write a log where they are
                done = subprocess.run(
                    self._command, capture_output=True, text=True, timeout=_SECONDS, cwd=folder
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRunError(f"{self._name}: {error}") from None
        if done.returncode:
            words = " ".join(done.stderr.split()[-30:])
            raise CannotRunError(f"{self._name} ended with status {done.returncode}: {words}")
        return bench_seconds(done.stdout, self._work)


def bench_seconds(output: str, work: SpeedWork) -> tuple[float, float]:
    """Return the seconds that llama-bench measured for the prompt and for the generated tokens.

    Raises:
        CannotRunError: it says something else.
    """
    try:
        times = {(each["n_prompt"], each["n_gen"]): each["avg_ns"] * 1e-9 for each in json.loads(output)}
        return times[work.n_prompt, 0], times[0, work.n_gen]
    except (ValueError, KeyError, TypeError):
        raise CannotRunError(f"llama-bench printed no times of what was asked: {output[:200]!r}") from None
