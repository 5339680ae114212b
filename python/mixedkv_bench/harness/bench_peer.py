"""A llama-bench, or ik_llama.cpp's llama-sweep-bench, beside this package's library, for the speed table.

The program is run once a round for each setting and depth, and says itself how long it took: it fills its
cache anew each time, which is not timed. What it can do is read from its `--help`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.speed_run import RunFacts, SpeedWork

_SECONDS = 3600.0  # of one run
_HELP_SECONDS = 60.0
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that measures llama.cpp or a relative of it.

    Attributes:
        program: its path.
        arguments: what the user adds to each of its command lines.
        help: what it prints for `--help`.
    """

    program: Path
    arguments: tuple[str, ...]
    help: str

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def is_sweep(self) -> bool:
        """True for a llama-sweep-bench, which measures at each multiple of its prompt."""
        return "--n-prompt" not in self.help

    @property
    def has_depth(self) -> bool:
        """True if it can measure at a depth. The llama-bench of ik_llama.cpp cannot."""
        return self.is_sweep or "--n-depth" in self.help

    def check(self, depths: Sequence[int], n_prompt: int, n_gen: int) -> None:
        """Raise ValueError unless the program can measure this."""
        deep = [depth for depth in depths if depth]
        if deep and not self.has_depth:
            raise ValueError(
                f"--depths {deep[0]}: the --help of {self.program} has no -d: use --depths 0, or give the "
                "llama-sweep-bench that was built beside it"
            )
        if not self.is_sweep:
            return
        if uneven := [depth for depth in depths if depth % n_prompt]:
            raise ValueError(
                f"--depths {uneven[0]}: {self.name} measures at multiples of --n-prompt {n_prompt}: "
                f"use {uneven[0] // n_prompt * n_prompt} or {-(-uneven[0] // n_prompt) * n_prompt}"
            )
        if n_gen > n_prompt:
            raise ValueError(
                f"--n-gen {n_gen}: {self.name} has room for --n-prompt {n_prompt} tokens: use at most as many"
            )

    def runner(self, model: ModelFile, setting: Setting, work: SpeedWork) -> BenchRunner:
        """Return what measures a setting at one depth."""
        command = [str(self.program.resolve()), "-m", str(model.path.resolve()), "-t", str(work.threads)]
        command += ["-ctk", setting.kv.type_k, "-ctv", setting.kv.type_v, "-ngl", "0"]
        command += self._sweep(setting, work) if self.is_sweep else self._bench(setting, work)
        return BenchRunner(self, [*command, *self.arguments], work)

    def _bench(self, setting: Setting, work: SpeedWork) -> list[str]:
        depth = ["-d", str(work.depth)] if work.depth else []
        counts = ["-p", str(work.n_prompt), "-n", str(work.n_gen), *depth]
        return [*counts, "-fa", str(int(setting.flash_attn)), "-r", "1", "-o", "json"]

    def _sweep(self, setting: Setting, work: SpeedWork) -> list[str]:
        """Fill the cache up to the depth in steps of a prompt, of which only some are timed with a stride.

        The cache has room for a step more: the warm-up leaves a token in front of its prompt.
        """
        n_steps, step = work.depth // work.n_prompt, str(work.n_prompt)
        options = ["-c", str(work.depth + 2 * work.n_prompt), "-b", step, "-ub", step, "-n", str(work.n_gen)]
        options += ["-fa", "on" if setting.flash_attn else "off"]
        if "--sweep-stride" in self.help:
            options += ["--sweep-stride", str(n_steps or 2)]
        if "--warmup-batch" in self.help:  # else the first prompt also pays for what is read once
            options += ["-wb"]
        return options


def find_peer(program: Path, arguments: Sequence[str]) -> Peer:
    """Return the peer, with what it prints for `--help`.

    Raises:
        ValueError: this is no program, or neither of the two.
    """
    if not (program.is_file() and os.access(program, os.X_OK)):
        raise ValueError(
            f"--peer {program} is not a program: give the path of a llama-bench or llama-sweep-bench"
        )
    try:
        done = _run([str(program.resolve()), "--help"], _HELP_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--peer {program} cannot be run: {error}") from None
    peer = Peer(program, tuple(arguments), done.stdout + done.stderr)
    if not any(word in peer.help for word in ("--n-prompt", "--sweep-stride", "sweep-bench")):
        raise ValueError(
            f"--peer {program}: its --help is not that of a llama-bench or llama-sweep-bench: give the path "
            "of one of these"
        )
    return peer


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:  # some write a log where they are
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=folder)


class BenchRunner:
    """A setting at one depth, measured by a program; each measurement is a run of it."""

    def __init__(self, peer: Peer, command: Sequence[str], work: SpeedWork) -> None:
        self._peer, self._command, self._work = peer, command, work
        self.facts: RunFacts = {"fill": "real", "attention": "llama.cpp"}

    def measure(self) -> tuple[float, float]:
        try:
            done = _run(self._command, _SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotRunError(f"{self._peer.name}: {error}") from None
        if done.returncode:
            words = " ".join(done.stderr.split()[-30:])
            raise CannotRunError(f"{self._peer.name} ended with status {done.returncode}: {words}")
        if self._peer.is_sweep:
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
    """Return the seconds that llama-sweep-bench measured at the depth for the prompt and for the generated
    tokens.

    Raises:
        CannotRunError: it says something else.
    """
    for n_prompt, n_gen, n_kv, prompt, generated in _sweep_rows(output):
        if (n_prompt, n_gen, n_kv) == (work.n_prompt, work.n_gen, work.depth):
            return prompt, generated
    raise CannotRunError(f"llama-sweep-bench printed no times of what was asked: {output[-200:]!r}")


def _sweep_rows(output: str) -> Iterator[tuple[float, ...]]:
    """Yield PP, TG, N_KV, T_PP s and T_TG s of each row of its table, which has S_PP t/s between the last
    two.
    """
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 6 and all(map(_NUMBER.fullmatch, cells[:6])):
            n_prompt, n_gen, n_kv, prompt, _, generated = map(float, cells[:6])
            yield n_prompt, n_gen, n_kv, prompt, generated
