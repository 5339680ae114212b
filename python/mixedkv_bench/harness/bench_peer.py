"""A llama-bench or llama-sweep-bench beside this package's library, for the speed table.

The program is run once a round for each setting and depth, and says itself how long it took: it fills its
cache anew each time, which is not timed. `mixedkv bench speed --peer PATH` asks for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.speed_run import RunFacts, SpeedWork

_SECONDS = 3600.0  # of one run


def check_program(path: Path) -> None:
    """Raise ValueError unless it is a program that measures."""
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ValueError(f"--peer {path} is not a program: give the path of a llama-bench")
    if "bench" not in path.name:
        raise ValueError(f"--peer {path}: speed takes a llama-bench or llama-sweep-bench")


class BenchRunner:
    """A setting at one depth, measured by a program; each measurement is a run of it."""

    def __init__(self, program: Path, model: ModelFile, setting: Setting, work: SpeedWork) -> None:
        self._program, self._work = program.resolve(), work
        common = ["-m", str(model.path.resolve()), "-t", str(work.threads)]
        common += ["-ctk", setting.kv.type_k, "-ctv", setting.kv.type_v]
        if self._is_sweep:  # a prompt of `-ub` and `-n` tokens generated, at each multiple of `-ub`
            n_steps = -(-work.depth // work.n_prompt)
            flash = "on" if setting.flash_attn else "off"
            common += ["-fa", flash, "-n", str(work.n_gen), "-ub", str(work.n_prompt)]
            common += ["-c", str((n_steps + 1) * work.n_prompt)]
            common += ["--sweep-stride", str(max(1, n_steps))]  # takes times at 0 and at the last step
        else:
            common += ["-fa", str(int(setting.flash_attn)), "-r", "1", "-ngl", "0", "-o", "json"]
            common += ["-p", str(work.n_prompt), "-n", str(work.n_gen), "-d", str(work.depth)]
        self._command = [str(self._program), *common]
        self.facts: RunFacts = {"fill": "real", "attention": "llama.cpp"}

    @property
    def _is_sweep(self) -> bool:
        return "sweep" in self._program.name

    def measure(self) -> tuple[float, float]:
        try:
            with tempfile.TemporaryDirectory() as folder:  # some write a log where they are
                done = subprocess.run(
                    self._command, capture_output=True, text=True, timeout=_SECONDS, cwd=folder
                )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRunError(f"{self._program.name}: {error}") from None
        if done.returncode:
            words = " ".join(done.stderr.split()[-30:])
            raise CannotRunError(f"{self._program.name} ended with status {done.returncode}: {words}")
        if self._is_sweep:
            return sweep_seconds(done.stdout + done.stderr, self._work)  # some have the table in their log
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


def sweep_seconds(output: str, work: SpeedWork) -> tuple[float, float]:
    """Return the seconds that llama-sweep-bench measured at the first step at `depth` or more, for as many
    tokens as were asked for.

    Raises:
        CannotRunError: it has no such step.
    """
    for n_prompt, n_gen, n_kv, prompt, generated in _sweep_rows(output.splitlines()):
        if n_kv >= work.depth and n_prompt > 0 and n_gen > 0:
            return prompt * work.n_prompt / n_prompt, generated * work.n_gen / n_gen
    raise CannotRunError(f"llama-sweep-bench printed no step at {work.depth} tokens: {output[-200:]!r}")


def _sweep_rows(lines: Sequence[str]) -> Iterator[tuple[float, ...]]:
    """Yield PP, TG, N_KV, T_PP s and T_TG s of each row of a table that also has S_PP t/s between the last
    two.
    """
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 6 and all(re.fullmatch(r"[0-9.]+", cell) for cell in cells[:6]):
            n_prompt, n_gen, n_kv, prompt, _, generated = map(float, cells[:6])
            yield n_prompt, n_gen, n_kv, prompt, generated
