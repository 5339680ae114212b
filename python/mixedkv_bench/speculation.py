"""Measures how fast answers come with drafts, where text repeats itself and where it does not."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mixedkv.engine import Engine
from mixedkv.engine.constrain.constraint_text import Constraint
from mixedkv.engine.schedule.request import SpeculationMode
from mixedkv.limits import padded
from mixedkv.llama import Llama
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.sample_text import passage
from mixedkv_bench.harness.summary import quartiles
from mixedkv_bench.harness.table import NONE, Cells, Table, number, spread
from mixedkv_bench.options import Options

Text = Literal["repeats", "is certain", "goes on", "is unlike"]

_PASSAGE = 200  # tokens, or a few more, of which the prompt is made again and again
_TEMPERATURE: dict[Text, float] = {"repeats": 0.0, "is certain": 0.0, "goes on": 0.0, "is unlike": 3.0}
_BATCH = 512


class SpeculationRow(Row):
    """One row per setting, depth and text.

    The prompt repeats a passage of a journal up to `depth`. The text "repeats" continues it greedily, and the
    bundled model then mostly says it once more. "is certain" is held to the passage by a regular expression,
    which forces the drafts. "goes on" greedily continues another prompt, a journal of `depth` tokens without
    repetitions. "is unlike" is sampled at temperature 3, almost at random. Each text is generated with drafts
    and without in turns, with one seed, from the prompt's rows. Ratios are of tokens per second from the
    first token on, within a turn.
    """

    test: Literal["speculation"] = "speculation"
    depth: int = Field(description="tokens of the prompt")
    text: Text = Field(description='what follows: `"repeats"`, `"is certain"`, `"goes on"` or `"is unlike"`')
    draft_model: bool = Field(default=False, description="a draft model guesses as well")
    n_gen: int = Field(description="tokens of an answer")
    plain_tps: float | None = Field(default=None, description="tokens per second without drafts, median")
    drafted_tps: float | None = Field(default=None, description="tokens per second with drafts, median")
    ratio: float | None = Field(default=None, description="drafted to plain, median of the turns")
    ratio_low: float | None = Field(default=None, description="lower quartile of the turns")
    ratio_high: float | None = Field(default=None, description="upper quartile of the turns")
    ratio_samples: list[float] | None = Field(default=None, description="all turns, in order")
    cpu_ratio: float | None = Field(
        default=None,
        description="the same of CPU time, which others on the machine do not take: plain to drafted",
    )
    steps: float | None = Field(
        default=None, description="steps for each token of the answers with drafts; 1 without"
    )
    drafted: int | None = Field(default=None, description="tokens that were drafted, in all turns")
    accepted: int | None = Field(default=None, description="those that came")
    same_tokens: float | None = Field(
        default=None, description="share of the turns in which both answers are the same tokens"
    )


def prepare(bench: Bench) -> Measure:
    return lambda: measure(bench)


def measure(bench: Bench) -> None:
    """Add a row per setting, depth and text."""
    options = bench.options
    bench.progress.add(
        len(options.settings) * len(options.depths) * len(_TEMPERATURE) * (options.repeats + 1)
    )
    for setting in options.settings:
        row = {"kv": setting.spec, "flash_attn": setting.flash_attn, "threads": options.threads}
        for depth in options.depths:
            try:
                _measure(bench, setting, depth, row)
            except ValueError as error:
                bench.add(_row(row, options, depth, "repeats", {"error": str(error)}))


def _row(
    row: dict[str, Any], options: Options, depth: int, text: Text, found: dict[str, Any]
) -> SpeculationRow:
    return SpeculationRow.model_validate(
        {
            **row,
            "depth": depth,
            "text": text,
            "n_gen": options.n_gen,
            "draft_model": options.draft_model is not None,
            **found,
        }
    )


def _measure(bench: Bench, setting: Setting, depth: int, row: dict[str, Any]) -> None:
    options = bench.options
    with ExitStack() as stack:
        n_ctx = padded(depth + 2 * options.n_gen + 64)
        llm = stack.enter_context(closing(_load(options, options.file.path, setting, n_ctx)))
        draft = None
        if options.draft_model is not None:
            draft = stack.enter_context(closing(_load(options, options.draft_model, setting, n_ctx)))
        engine = stack.enter_context(Engine(llm, parallel=1, draft_model=draft))
        for text in _TEMPERATURE:
            bench.progress.show(f"speculation: {setting.name}, {text} at {depth}")
            turns = _Turns(engine, _prompt(engine, depth, text), options, text)
            for no in range(options.repeats + 1):  # the first one only warms up
                turns.turn(no)
                bench.progress.step()
            bench.add(_row(row, options, depth, text, turns.summary()))


def _load(options: Options, path: Path, setting: Setting, n_ctx: int) -> Llama:
    return Llama(
        path,
        kv=setting.kv,
        flash_attn=setting.flash_attn or None,
        n_ctx=n_ctx,
        n_seq_max=4,  # prompt, the one at work, and answers of before
        kv_unified=True,
        n_batch=_BATCH,
        n_ubatch=_BATCH,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )


def _prompt(engine: Engine, depth: int, text: Text) -> list[int]:
    def tokenize(part: str) -> list[int]:
        return engine.tokenizer.tokenize(part, start=False)

    if text == "goes on":
        return passage(2 * depth, tokenize)[:depth]  # the questions come behind
    once = passage(_PASSAGE, tokenize)
    return (once * (depth // len(once) + 1))[: max(depth, len(once))]


class _Turns:
    """Answers with drafts and without, in turns."""

    def __init__(self, engine: Engine, prompt: list[int], options: Options, text: Text) -> None:
        self._engine, self._prompt, self._n_gen, self._text = engine, prompt, options.n_gen, text
        self._mode: SpeculationMode = "prompt-lookup" if options.draft_model is None else "draft-model"
        self._bias = tuple((token, -100.0) for token in engine.detokenizer.ends)
        self._constraint = None
        if text == "is certain":
            passage = engine.llm.detokenize(prompt[-2 * options.n_gen :]).decode("utf-8", "replace")
            self._constraint = Constraint("regex", re.escape(passage))
        self._rates: list[tuple[float, float]] = []
        self._cpu: list[float] = []
        self._same: list[bool] = []
        self._steps = self._drafted = self._accepted = 0

    def turn(self, no: int) -> None:
        order: Sequence[SpeculationMode] = ("off", self._mode) if no % 2 else (self._mode, "off")
        answers = {mode: self._answer(mode, no) for mode in order}
        plain, plain_cpu, plain_tokens, _ = answers["off"]
        fast, cpu, tokens, steps = answers[self._mode]
        if no:
            self._rates.append((plain, fast))
            self._cpu.append(plain_cpu / cpu)
            self._same.append(tokens == plain_tokens)
            self._steps += steps

    def _answer(self, mode: SpeculationMode, seed: int) -> tuple[float, float, list[int], int]:
        before, began = self._engine.n_steps, time.process_time()
        answer = self._engine.submit(
            self._prompt,
            max_tokens=self._n_gen,
            temperature=_TEMPERATURE[self._text],
            seed=seed,
            logit_bias=self._bias,
            constraint=self._constraint,
            speculation=mode,
        )
        answer.result()
        cpu = time.process_time() - began
        job = answer.job
        assert job.t_first is not None
        assert job.t_last is not None
        if job.answer.drafter is not None and seed:
            self._drafted += job.answer.drafter.n_drafted
            self._accepted += job.answer.drafter.n_accepted
        rate = (job.n_answer - 1) / max(job.t_last - job.t_first, 1e-9)
        return rate, cpu, list(job.tokens[job.n_prompt :]), self._engine.n_steps - before

    def summary(self) -> dict[str, Any]:
        samples = [fast / plain for plain, fast in self._rates]
        low, middle, high = quartiles(samples)
        return {
            "plain_tps": float(np.median([plain for plain, _ in self._rates])),
            "drafted_tps": float(np.median([fast for _, fast in self._rates])),
            "ratio": middle,
            "ratio_low": low,
            "ratio_high": high,
            "ratio_samples": samples,
            "cpu_ratio": float(np.median(self._cpu)),
            "steps": self._steps / (len(self._rates) * self._n_gen),
            "drafted": self._drafted,
            "accepted": self._accepted,
            "same_tokens": sum(self._same) / len(self._same),
        }


def check(options: Options) -> None:
    if options.n_gen < 2:
        raise ValueError("--n-gen 1: the first token comes without drafts: use 2 or more")


def _cells(rows: Sequence[SpeculationRow]) -> Cells:
    return [
        [
            "cache",
            "depth",
            "plain, tokens/s",
            "drafted, tokens/s",
            "ratio",
            "",
            "CPU time",
            "steps a token",
            "accepted",
        ]
    ] + [
        [
            row.name,
            str(row.depth),
            number(row.plain_tps, ".1f"),
            number(row.drafted_tps, ".1f"),
            number(row.ratio, ".2f"),
            spread(row.ratio_low, row.ratio, row.ratio_high, row.ratio_samples),
            number(row.cpu_ratio, ".2f"),
            number(row.steps, ".2f"),
            f"{row.accepted} of {row.drafted}" if row.drafted is not None else NONE,
        ]
        for row in rows
    ]


TABLE = Table(row=SpeculationRow, title="Drafts, text that {}", by=lambda row: row.text, cells=_cells)
TEST = BenchTest(
    name="speculation",
    measures="drafted tokens: how many are accepted, and what they save",
    flags=("--flash-attn", "--depths", "--n-ctx", "--n-gen", "--repeats", "--draft-model"),
    tables=(TABLE,),
    prepare=prepare,
    check=check,
)
