"""Time to the first token when the prompt's KV was kept, and what keeping it takes.

The same prompt again and again: cold, from memory, from a file that the system has in memory, from one that
it has not, from an encrypted one, and in a process that has just started. All take turns, round by round;
ratios are taken within a round and their median is reported. Then the turns of a chat, each of which finds
the cache emptied, as if others had used it meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.bench.harness.cache_settings import Setting
from mixedkv.bench.harness.contexts import CannotRunError, Model
from mixedkv.bench.harness.kept_kv_run import Place, Run, in_new_process
from mixedkv.bench.harness.page_cache import drop_cached
from mixedkv.bench.harness.progress import Progress
from mixedkv.bench.harness.summary import quartiles
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import padded

TIERS = ("cold", "ram", "disk", "disk_dropped", "encrypted", "new_process")

_SEED = 90_000

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is timed: a prompt of `n_prompt` tokens of which the last `n_new` were never stored, and a chat of
    `turns` messages, the first of half a prompt, the others of `n_new` tokens, with answers of `n_gen`.
    """

    n_prompt: int
    n_new: int
    n_gen: int
    turns: int
    threads: int
    repeats: int
    folder: Path | None = None

    @property
    def n_ctx(self) -> int:
        chat = self.n_prompt // 2 + self.turns * (self.n_new + self.n_gen + 1)
        return padded(max(self.n_prompt + 1, chat))


def measure(
    model: Model, settings: Sequence[Setting], work: Work, progress: Progress, add: Callable[[Row], None]
) -> None:
    """Add a row for every setting and tier, and one for the chat of every setting.

    What was measured is added also when this is interrupted.
    """
    progress.add(len(settings) * (work.repeats + 1 + work.turns))
    f16_bytes = 0
    for setting in settings:
        lanes = {tier: Lane() for tier in TIERS}
        head = {"kv": setting.spec, "flash_attn": setting.flash_attn, "threads": work.threads}
        try:
            with ExitStack() as stack:
                bench = _Bench(model, setting, work, stack, lanes)
                try:
                    bench.take_turns(progress)
                finally:
                    if setting.is_f16:
                        f16_bytes = lanes["disk"].nbytes
                    for row in _rows(lanes, work, f16_bytes):
                        add({**row, **head})
                add({"test": "chat", **bench.chat(progress), **head})
        except (CannotRunError, UnsupportedModelError) as error:
            failed = {"test": "store", "tier": "cold", "n_prompt": work.n_prompt, "n_new": work.n_new}
            add({**failed, "error": str(error), **head})


@dataclass
class Lane:
    """One tier: seconds to the first token, to restore and to save, by round."""

    ttft: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)  # of a new process
    nbytes: int = 0
    error: str = ""


class _Bench:
    """One setting, with a store in memory, one in a folder, and an encrypted one."""

    def __init__(
        self, model: Model, setting: Setting, work: Work, stack: ExitStack, lanes: dict[str, Lane]
    ) -> None:
        self._work, self._setting, self._lanes = work, setting, lanes
        head = [model.bos] if model.adds_bos else []
        text = model.random_tokens(work.n_prompt + work.n_ctx, seed=_SEED)
        self._prompt = np.array([*head, *text], np.int32)[: work.n_prompt]
        self._later = text[work.n_prompt :]
        self._run = stack.enter_context(Run(model.path, setting, work.n_ctx, work.threads))
        scratch = tempfile.TemporaryDirectory(dir=work.folder, prefix="mixedkv-bench-")
        folder = Path(stack.enter_context(scratch))
        self._places = {
            "ram": Place(None),
            "disk": Place(folder / "plain"),
            "encrypted": Place(folder / "encrypted", encrypted=True),
        }
        for place in self._places.values():
            stack.enter_context(place)

    # --- one prompt ---

    def take_turns(self, progress: Progress) -> None:
        """The first round only warms up. Every other one goes backwards: no tier always follows another."""
        for no in range(self._work.repeats + 1):
            progress.show(f"store: {self._setting.name}")
            self._save(keep=no > 0)
            for tier in TIERS[:: -1 if no % 2 else 1]:
                if not self._lanes[tier].error:
                    self._measure(tier, keep=no > 0)
            progress.step()

    def _save(self, keep: bool) -> None:
        """Store the prompt but for its end in all places anew."""
        stored = self._prompt[: -self._work.n_new]
        self._run.clear()
        self._run.first_token(stored)
        for name, place in self._places.items():
            place.empty()
            seconds = place.save(self._run, stored)
            lane = self._lanes[name]
            lane.nbytes = place.nbytes
            if keep:
                lane.save.append(seconds)

    def _measure(self, tier: str, keep: bool) -> None:
        lane = self._lanes[tier]
        if tier == "new_process":
            start, restore, ttft = in_new_process(self._run, self._places["disk"], self._prompt)
        elif tier == "disk_dropped" and not drop_cached(self._places["disk"].files()):
            lane.error = "the system keeps this folder's files in memory: give a --folder on a disk"
            return
        else:
            start = 0.0
            restore, ttft = self._answer(tier)
        if keep:
            lane.ttft.append(ttft)
            if tier != "cold":
                lane.restore.append(restore)
            if tier == "new_process":
                lane.start.append(start)

    def _answer(self, tier: str) -> tuple[float, float]:
        place = self._places.get(tier.partition("_")[0])
        self._run.clear()
        begin = time.perf_counter()
        n = place.restore(self._run, self._prompt, len(self._prompt) - self._work.n_new) if place else 0
        restored = time.perf_counter()
        self._run.first_token(self._prompt[n:])
        return restored - begin, time.perf_counter() - begin

    # --- a chat ---

    def chat(self, progress: Progress) -> Row:
        """Every turn with the cache emptied before, from the files; and, to compare, evaluated anew."""
        place, work = self._places["disk"], self._work
        place.empty()
        turns: list[Row] = []
        history = self._prompt[: work.n_prompt // 2]
        n_message, n_known = len(history), 0
        for turn in range(1, work.turns + 1):
            progress.show(f"chat: {self._setting.name}, turn {turn}")
            self._run.clear()
            begin = time.perf_counter()
            self._run.first_token(history)
            cold = time.perf_counter() - begin
            self._run.clear()
            begin = time.perf_counter()
            n = place.restore(self._run, history, n_known) if n_known else 0
            token = self._run.first_token(history[n:])
            ttft = time.perf_counter() - begin
            history = np.concatenate([history, self._run.generate(token, work.n_gen)])
            n_known = len(history) - 1  # the last token was chosen, not evaluated
            place.save(self._run, history[:n_known])
            turns.append(
                {
                    "turn": turn,
                    "n_prompt": len(history) - work.n_gen,
                    "n_message": n_message,
                    "n_evaluated": len(history) - work.n_gen - n,
                    "ttft": ttft,
                    "ttft_cold": cold,
                }
            )
            n_message = work.n_new
            start = (turn - 1) * work.n_new
            history = np.concatenate([history, self._later[start : start + work.n_new]])
            progress.step()
        return {"turns": turns, "n_gen": work.n_gen}


def _rows(lanes: dict[str, Lane], work: Work, f16_bytes: int) -> Iterator[Row]:
    for tier, lane in lanes.items():
        if not lane.ttft and not lane.error:
            continue
        row: Row = {"test": "store", "tier": tier, "n_prompt": work.n_prompt, "n_new": work.n_new}
        if lane.error:
            row["error"] = lane.error
        if lane.nbytes:
            row["saved_bytes"] = lane.nbytes
            if f16_bytes and tier == "disk":
                row["bytes_vs_f16"] = lane.nbytes / f16_bytes
        for key in ("restore", "save", "start"):
            if samples := getattr(lane, key):
                row[key] = float(np.median(samples))
        if lane.ttft:
            row["ttft_low"], row["ttft"], row["ttft_high"] = quartiles(lane.ttft)
            row["ttft_samples"] = lane.ttft
            row["vs_cold"] = _ratio(lane, lanes["cold"])
        if tier == "encrypted" and lane.ttft:
            row["vs_disk"] = _ratio(lane, lanes["disk"])
        yield row


def _ratio(lane: Lane, base: Lane) -> float:
    """Median over rounds of the time of `lane` by that of `base` in the same round."""
    return float(np.median([a / b for a, b in zip(lane.ttft, base.ttft, strict=False)]))
