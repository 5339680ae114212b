"""Time to the first token when the prompt's KV was kept, and what keeping it takes.

The same prompt again and again: cold, from memory, from a file that the system has in memory, from one that
it has not, from an encrypted one, and in a process that has just started. All take turns, round by round;
ratios are taken within a round and their median is reported. Then the turns of a chat, each of which finds
the cache emptied, as if others had used it meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import Field

from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import padded
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError, LoadedModel
from mixedkv_bench.harness.page_cache import drop_cached
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.row import Row, RowPart
from mixedkv_bench.harness.store_run import StorePlace, StoreRun, in_new_process
from mixedkv_bench.harness.summary import quartiles
from mixedkv_bench.harness.table import Cells, Table, as_bytes, number, spread
from mixedkv_bench.options import Options

Tier = Literal["cold", "ram", "disk", "disk_dropped", "encrypted", "remote", "new_process"]

TIERS: tuple[Tier, ...] = get_args(Tier)

_SEED = 90_000
_SHOWN_TURNS = 10
_STORED_AS: dict[Tier, Tier] = {"disk_dropped": "disk"}


class StoreRow(Row):
    """One row per setting and tier.

    A prompt of random tokens whose KV was kept but for its last ones. All tiers take turns in one process.
    Every round stores the prompt anew and then measures each tier once, every other round in reverse order.
    The first round is thrown away. The cache is emptied before each measurement. A hit must restore
    everything that was stored, exactly and from the tier it is of; anything else is an error.
    """

    test: Literal["store"] = "store"
    tier: Tier = Field(
        description='`"cold"`: nothing is kept, all of the prompt is evaluated; `"ram"`: from memory; '
        '`"disk"`: from a file that the system still has in memory; `"disk_dropped"`: from a file that it '
        'was made to forget (`posix_fadvise`, checked with `mincore`); `"encrypted"`: as disk, with '
        'AES-256-GCM; `"remote"`: from the server of `--remote`, with AES-256-GCM, into memory; '
        '`"new_process"`: as disk, the first answer of a process that has just loaded the model'
    )
    n_prompt: int = Field(description="tokens of the prompt")
    n_new: int = Field(description="how many of them, at its end, were never stored")
    ttft: float | None = Field(
        default=None,
        description="seconds to the first token: finding, restoring, evaluating the rest, choosing; median "
        "of the rounds",
    )
    ttft_low: float | None = Field(default=None, description="lower quartile of the rounds")
    ttft_high: float | None = Field(default=None, description="upper quartile of the rounds")
    ttft_samples: list[float] | None = Field(default=None, description="all rounds, in order")
    vs_cold: float | None = Field(
        default=None,
        description="the time to the first token by that of the cold prompt: median of the ratios within a "
        "round",
    )
    vs_disk: float | None = Field(default=None, description='the same by that of `"disk"`')
    restore: float | None = Field(
        default=None, description="the part of it until the rows are back in the cache, median"
    )
    save: float | None = Field(
        default=None, description="seconds to store the prompt, the flush to the disk included, median"
    )
    start: float | None = Field(
        default=None,
        description="seconds until a new process has loaded the model, median; not part of its `ttft`",
    )
    saved_bytes: int | None = Field(
        default=None, description="bytes of the blocks in memory, or of their files"
    )
    bytes_vs_f16: float | None = Field(
        default=None, description="by those of the F16 cache's file, where that was measured before"
    )


class TimedTurn(RowPart):
    """A turn of a chat."""

    turn: int = Field(description="which, from 1")
    n_prompt: int = Field(description="tokens of the whole prompt")
    n_message: int = Field(description="tokens of the new message")
    n_evaluated: int = Field(
        description="tokens that had to be evaluated: the message and the last token of the answer before, "
        "which was chosen but not evaluated"
    )
    ttft: float = Field(description="seconds to the first token")
    ttft_cold: float = Field(description="the same when all is evaluated anew")


class ChatRow(Row):
    """One row per setting.

    A conversation of random tokens: the first message is half of `--n-prompt`, each further one `--n-new`
    tokens, answers are greedy. The cache is emptied before each turn, as if others had used it meanwhile, and
    restored from the file store.
    """

    test: Literal["chat"] = "chat"
    n_gen: int = Field(description="tokens of an answer")
    turns: list[TimedTurn] = Field(description="the turns, in order")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreWork:
    """Work that is timed: a prompt of `n_prompt` tokens of which the last `n_new` were never stored, and a
    chat of `turns` messages, the first of half a prompt, the others of `n_new` tokens, with answers of
    `n_gen`.
    """

    n_prompt: int
    n_new: int
    n_gen: int
    turns: int
    threads: int
    repeats: int
    folder: Path | None = None
    remote: str | None = None

    @property
    def n_ctx(self) -> int:
        chat = self.n_prompt // 2 + self.turns * (self.n_new + self.n_gen + 1)
        return padded(max(self.n_prompt + 1, chat))


def check(options: Options) -> None:
    if options.n_new >= options.n_prompt:
        raise ValueError(f"--n-new {options.n_new} leaves nothing of --n-prompt {options.n_prompt} to store")


def prepare(bench: Bench) -> Measure:
    options = bench.options
    work = StoreWork(
        n_prompt=options.n_prompt,
        n_new=options.n_new,
        n_gen=options.n_gen,
        turns=options.turns,
        threads=options.threads,
        repeats=options.repeats,
        folder=options.folder,
        remote=options.remote,
    )
    return lambda: measure(bench, work)


def measure(bench: Bench, work: StoreWork) -> None:
    """Add a row for every setting and tier, and one for the chat of every setting.

    What was measured is added also when this is interrupted.
    """
    settings = bench.options.settings
    bench.progress.add(len(settings) * (work.repeats + 1 + work.turns))
    f16_bytes = 0
    for setting in settings:
        times = {tier: TierTimes() for tier in TIERS}
        head = {"kv": setting.spec, "flash_attn": setting.flash_attn, "threads": work.threads}
        try:
            with ExitStack() as stack:
                rounds = _Rounds(bench.model, setting, work, stack, times)
                try:
                    rounds.take_turns(bench.progress)
                finally:
                    if setting.is_f16:
                        f16_bytes = times["disk"].nbytes
                    for row in _rows(times, head, work, f16_bytes):
                        bench.add(row)
                turns = rounds.chat(bench.progress)
                bench.add(ChatRow.model_validate({"n_gen": work.n_gen, "turns": turns, **head}))
        except (CannotRunError, UnsupportedModelError) as error:
            failed = {"tier": "cold", "n_prompt": work.n_prompt, "n_new": work.n_new, "error": str(error)}
            bench.add(StoreRow.model_validate(failed | head))


@dataclass
class TierTimes:
    """Times of one tier: seconds to the first token, to restore and to save, by round."""

    ttft: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)  # of a new process
    nbytes: int = 0
    error: str = ""


class _Rounds:
    """One setting, with a store in memory, one in a folder, and an encrypted one."""

    def __init__(
        self,
        model: LoadedModel,
        setting: Setting,
        work: StoreWork,
        stack: ExitStack,
        times: dict[Tier, TierTimes],
    ) -> None:
        self._work, self._setting, self._times = work, setting, times
        head = [model.bos] if model.adds_bos else []
        text = model.random_tokens(work.n_prompt + work.n_ctx, seed=_SEED)
        self._prompt = np.array([*head, *text], np.int32)[: work.n_prompt]
        self._later = text[work.n_prompt :]
        self._run = stack.enter_context(StoreRun(model.path, setting, work.n_ctx, work.threads))
        scratch = tempfile.TemporaryDirectory(dir=work.folder, prefix="mixedkv-bench-")
        folder = Path(stack.enter_context(scratch))
        self._places: dict[Tier, StorePlace] = {
            "ram": StorePlace(None),
            "disk": StorePlace(folder / "plain"),
            "encrypted": StorePlace(folder / "encrypted", encrypted=True),
        }
        if work.remote is not None:
            self._places["remote"] = StorePlace(None, encrypted=True, remote=work.remote)
        self._tiers = [tier for tier in TIERS if tier != "remote" or work.remote is not None]
        for place in self._places.values():
            stack.enter_context(place)

    # --- one prompt ---

    def take_turns(self, progress: Bar) -> None:
        """Run the rounds. The first one only warms up, and every other one goes backwards, so that no tier
        always follows another.
        """
        for no in range(self._work.repeats + 1):
            progress.show(f"store: {self._setting.name}")
            self._save(keep=no > 0)
            for tier in self._tiers[:: -1 if no % 2 else 1]:
                if not self._times[tier].error:
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
            times = self._times[name]
            times.nbytes = place.nbytes
            if keep:
                times.save.append(seconds)

    def _measure(self, tier: Tier, keep: bool) -> None:
        times = self._times[tier]
        if tier == "new_process":
            start, restore, ttft = in_new_process(self._run, self._places["disk"], self._prompt)
        elif tier == "disk_dropped" and not drop_cached(self._places["disk"].files()):
            times.error = "the system keeps this folder's files in memory: give a --folder on a disk"
            return
        else:
            start = 0.0
            restore, ttft = self._answer(self._places.get(_STORED_AS.get(tier, tier)))
        if keep:
            times.ttft.append(ttft)
            if tier != "cold":
                times.restore.append(restore)
            if tier == "new_process":
                times.start.append(start)

    def _answer(self, place: StorePlace | None) -> tuple[float, float]:
        self._run.clear()
        if place:
            place.forget()
        begin = time.perf_counter()
        n = place.restore(self._run, self._prompt, len(self._prompt) - self._work.n_new) if place else 0
        restored = time.perf_counter()
        self._run.first_token(self._prompt[n:])
        return restored - begin, time.perf_counter() - begin

    # --- a chat ---

    def chat(self, progress: Bar) -> list[TimedTurn]:
        """Time every turn of a chat from the files, with the cache emptied before, and evaluated anew to
        compare.
        """
        place, work = self._places["disk"], self._work
        place.empty()
        turns: list[TimedTurn] = []
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
                TimedTurn(
                    turn=turn,
                    n_prompt=len(history) - work.n_gen,
                    n_message=n_message,
                    n_evaluated=len(history) - work.n_gen - n,
                    ttft=ttft,
                    ttft_cold=cold,
                )
            )
            n_message = work.n_new
            start = (turn - 1) * work.n_new
            history = np.concatenate([history, self._later[start : start + work.n_new]])
            progress.step()
        return turns


def _rows(
    times: dict[Tier, TierTimes], head: dict[str, Any], work: StoreWork, f16_bytes: int
) -> Iterator[StoreRow]:
    for tier, of_tier in times.items():
        if not of_tier.ttft and not of_tier.error:
            continue
        row: dict[str, Any] = {"tier": tier, "n_prompt": work.n_prompt, "n_new": work.n_new, **head}
        if of_tier.error:
            row["error"] = of_tier.error
        if of_tier.nbytes:
            row["saved_bytes"] = of_tier.nbytes
            if f16_bytes and tier == "disk":
                row["bytes_vs_f16"] = of_tier.nbytes / f16_bytes
        for key in ("restore", "save", "start"):
            if samples := getattr(of_tier, key):
                row[key] = float(np.median(samples))
        if of_tier.ttft:
            row["ttft_low"], row["ttft"], row["ttft_high"] = quartiles(of_tier.ttft)
            row["ttft_samples"] = of_tier.ttft
            row["vs_cold"] = _ratio(of_tier, times["cold"])
        if tier in ("encrypted", "remote") and of_tier.ttft:
            row["vs_disk"] = _ratio(of_tier, times["disk"])
        yield StoreRow.model_validate(row)


def _ratio(times: TierTimes, base: TierTimes) -> float:
    """Return the median over rounds of the time to the first token by that of `base` in the same round."""
    return float(np.median([a / b for a, b in zip(times.ttft, base.ttft, strict=False)]))


def _store_cells(rows: Sequence[StoreRow]) -> Cells:
    head = ["cache, where from", "first token", "", "of cold", "of disk"]
    return [[*head, "restoring", "saving", "bytes", "of f16"]] + [
        [
            f"{row.name}, {row.tier.replace('_', ' ')}",
            number(row.ttft, ".4f"),
            spread(row.ttft_low, row.ttft, row.ttft_high, row.ttft_samples),
            number(row.vs_cold, ".1%"),
            number(row.vs_disk, ".0%"),
            number(row.restore, ".4f"),
            number(row.save, ".4f"),
            as_bytes(row.saved_bytes),
            number(row.bytes_vs_f16, ".1%"),
        ]
        for row in rows
    ]


def _chat_cells(rows: Sequence[ChatRow]) -> Cells:
    """Make three lines for each cache: with its KV kept, evaluated anew, and how much was evaluated."""
    last = max(len(row.turns) for row in rows)
    shown = sorted({*np.linspace(1, last, min(last, _SHOWN_TURNS)).astype(int).tolist()}) if last else []
    table = [["cache", "", *(f"turn {turn}" for turn in shown)]]
    for row in rows:
        by_number = {turn.turn: turn for turn in row.turns}
        turns = [by_number.get(i) for i in shown]
        table += [
            [row.name, "kept", *(number(turn.ttft if turn else None, ".4f") for turn in turns)],
            [row.name, "anew", *(number(turn.ttft_cold if turn else None, ".4f") for turn in turns)],
            [
                row.name,
                "tokens evaluated",
                *(number(turn.n_evaluated if turn else None, "d") for turn in turns),
            ],
        ]
    return table


STORE_TABLE = Table(
    row=StoreRow,
    title="Kept KV: a prompt of {} tokens, seconds to the first token",
    by=lambda row: row.n_prompt,
    cells=_store_cells,
)
CHAT_TABLE = Table(
    row=ChatRow,
    title="Chat: seconds to the first token by turn, answers of {} tokens",
    by=lambda row: row.n_gen,
    cells=_chat_cells,
)
TEST = BenchTest(
    name="store",
    measures="stored KV against evaluating again: first tokens, reads and writes",
    flags=(
        "--flash-attn",
        "--n-prompt",
        "--n-new",
        "--n-gen",
        "--turns",
        "--repeats",
        "--folder",
        "--remote",
    ),
    tables=(STORE_TABLE, CHAT_TABLE),
    check=check,
    prepare=prepare,
)
