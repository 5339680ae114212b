"""Measures in two minutes which cache to use with a model on this machine: one table, with advice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from mixedkv.context_choice import fitting_context
from mixedkv.limits import CELLS
from mixedkv_bench import plot, quality, speed
from mixedkv_bench.bench_test import Bench, BenchTest, Options
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, REFERENCE, Setting
from mixedkv_bench.harness.contexts import Context, LoadedModel
from mixedkv_bench.harness.real_text import read_text
from mixedkv_bench.harness.row import CacheRow, Row, measured
from mixedkv_bench.harness.table import NONE, Cells, Table, number
from mixedkv_bench.quality import QualityRow

_SECONDS = 50.0  # for each of the two parts
_DOCUMENT = (1024, 2048)  # tokens of the text; fewer hold no window of mixed:quality
_GENERATED = (4, 32)
_ROUNDS = 3
_DEPTH = 4096
_PROMPT = 256
_PROBE = 256  # tokens that say how fast this machine is
_ALIKE, _NEARLY = 0.01, 0.05  # of positions, that may have another likeliest token than with F16
_AS_FAST = 0.9  # of F16's generation
_LATE = 1.5  # times the planned time, after which no further round of the speed begins


_JOINED = {
    "error", "attention", "n_ctx", "kv_bytes", "bits_per_element", "n_positions", "kld_mean", "same_top1",
    "depth", "pp_tps", "tg_tps", "tg_vs_f16",
}  # fmt: skip


class QuickRow(CacheRow):
    """One row per setting: what it takes, how fast it is, what it changes, and when to use it.

    Quality is that of `quality` in large batches, on one part of `--text` (of a model of one's own: prose).
    Speed is that of `speed` at 4,096 tokens, or as many as the model has. How much is read and generated
    depends on how fast the model runs here, so that all takes about two minutes.
    """

    test: Literal["quick"] = "quick"
    longest_n_ctx: int | None = measured(
        "tokens of the longest context that fits this machine's memory, by formula"
    )
    depth: int | None = measured("tokens in the cache where speed was measured")
    pp_tps: float | None = measured("as of `speed`")
    tg_tps: float | None = measured("as of `speed`")
    tg_vs_f16: float | None = measured("as of `speed`")
    n_positions: int | None = measured("positions that the next two are of")
    kld_mean: float | None = measured("as of `quality`")
    same_top1: float | None = measured("as of `quality`")
    advice: Literal["", "use this", "if memory is short"] = Field(
        default="",
        description="`use this`: the smallest cache that keeps the likeliest token as often as F16 does, "
        "less one position in a hundred, and generates at 0.9 of its speed; `if memory is short`: the "
        "smallest that keeps it less five in a hundred",
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """Says how many tokens are read, at which depth speed is measured, and how many are generated."""

    n_text: int
    depth: int
    n_gen: int
    seconds: float


def measure(bench: Bench) -> None:
    """Time the model for a moment, say how long all will take, measure, and add one row per setting.

    Each number is written to stderr when it is there. When this is interrupted, rows are added with what was
    measured until then, without advice.
    """
    options, began = bench.options, time.monotonic()
    plan = make_plan(options, *_rates(bench.model, options.threads))
    say = bench.progress.say
    say(f"this takes about {max(1, round(plan.seconds / 60))} min")
    text, source = options.text, options.text_source
    if text is None and not options.is_bundled:
        text, source = read_text("prose")
    options = replace(
        options,
        text=text,
        text_source=source,
        depths=(plan.depth,),
        n_ctx=plan.n_text,
        n_prompt=_PROMPT,
        n_gen=plan.n_gen,
        repeats=_ROUNDS,
        modes=("batch",),
        peer_settings=(),
    )
    found: list[Row] = []

    def note(row: QualityRow) -> None:
        found.append(row)
        if row.same_top1 is not None:
            bits = number(row.bits_per_element, ".2f")
            say(f"{row.name}: {bits} bits, same top {row.same_top1:.1%}, KLD mean {row.kld_mean:.1e}")

    def report(setting: Setting, prompt: float, generated: float) -> None:
        say(f"{setting.name}: about {prompt:.0f} prompt tok/s, {generated:.1f} text tok/s")

    def count(done: int, total: int) -> None:
        if done % (total // 8) == 0:
            say(f"text read with each of {len(options.settings) + 1} caches: {done} of {total} tokens")

    work = replace(bench, options=options, add=found.append)
    documents = quality.read_documents(bench.model, replace(options, repeats=1))
    work.progress.add(sum(map(len, documents)))
    try:
        quality.measure_settings(work, documents, "batch", options.settings, note, count)
        speed.measure(work, report, until=began + _LATE * max(plan.seconds, 60.0))
    except KeyboardInterrupt:
        for row in _rows(found, options):
            bench.add(row)
        raise
    for row in advise(_rows(found, options)):
        bench.add(row)


def make_plan(options: Options, prompt: float, generated: float) -> Plan:
    """Plan for a model that reads `prompt` and generates `generated` tokens a second on this machine."""
    n_settings = len(options.settings)
    longest = options.shape.n_ctx_train or _DOCUMENT[1]
    n_text = int(_within(_SECONDS * prompt / (n_settings + 1), _DOCUMENT)) // CELLS * CELLS
    n_text = max(CELLS, min(n_text, longest))
    depth = max(0, min(_DEPTH, longest - _PROMPT - _GENERATED[1]))
    rounds = n_settings * (_ROUNDS + 1)
    n_gen = int(_within((_SECONDS - rounds * _PROMPT / prompt) * generated / rounds, _GENERATED))
    seconds = (n_settings + 1) * n_text / prompt + rounds * (_PROMPT / prompt + n_gen / generated)
    return Plan(n_text, depth, n_gen, seconds)


def advise(rows: Sequence[QuickRow]) -> list[QuickRow]:
    """Say of two rows when to use them: see `QuickRow.advice`."""

    base = next((row.same_top1 for row in rows if row.kv == "f16" and row.same_top1), 1.0)

    def smallest(lost: float, rate: float) -> QuickRow | None:
        good = [
            row
            for row in rows
            if (row.same_top1 or 0.0) >= base - lost
            and (row.tg_vs_f16 or 1.0) >= rate
            and row.bits_per_element
        ]
        return min(good, key=lambda row: (round(row.bits_per_element or 0.0, 1), row.kld_mean), default=None)

    alike, small = smallest(_ALIKE, _AS_FAST), smallest(_NEARLY, 0.0)
    advice: dict[int, Literal["use this", "if memory is short"]] = {}
    if small is not None:
        advice[id(small)] = "if memory is short"
    if alike is not None:
        advice[id(alike)] = "use this"
    return [row.model_copy(update={"advice": advice.get(id(row), "")}) for row in rows]


def _rates(model: LoadedModel, threads: int) -> tuple[float, float]:
    """Return the tokens per second of a prompt and of generation, with an F32 cache; what comes first is not
    timed.
    """
    with closing(Context(model, REFERENCE, n_ctx=2 * _PROBE, threads=threads)) as context:
        tokens = model.random_tokens(_PROBE)
        context.feed(tokens[:32])
        began = time.perf_counter()
        context.feed(tokens[32:])
        middle = time.perf_counter()
        for token in tokens[:4]:
            context.decode([int(token)])
        end = time.perf_counter()
    return (_PROBE - 32) / (middle - began), 4 / (end - middle)


def _within(value: float, limits: tuple[int, int]) -> float:
    low, high = limits
    return max(low, min(value, high))


def _rows(found: Sequence[Row], options: Options) -> list[QuickRow]:
    """Join what was measured of each setting."""
    rows = []
    for setting in options.settings:
        own = [row for row in found if (row.kv, row.flash_attn) == (setting.spec, setting.flash_attn)]
        if not own:  # it was interrupted before
            continue
        fields: dict[str, object] = {}
        for row in own:
            part = row.model_dump(include=_JOINED, exclude_unset=True)
            fields.update({name: value for name, value in part.items() if value is not None})
        if options.shape.layers and (longest := fitting_context(options.file, setting.kv)) is not None:
            fields["longest_n_ctx"] = longest.n_ctx
        head = setting.head(options.threads)
        rows.append(QuickRow.model_validate({"n_ctx": options.n_ctx, **head, **fields}))
    return rows


def _cells(rows: Sequence[QuickRow]) -> Cells:
    head = ["--kv", "bits", "same top", "KLD mean", "prompt tok/s", "text tok/s", "x f16"]
    return [[*head, "longest context here", ""]] + [
        [
            row.name,
            number(row.bits_per_element, ".2f"),
            number(row.same_top1, ".1%"),
            number(row.kld_mean, ".1e"),
            number(row.pp_tps, ".0f"),
            number(row.tg_tps, ".1f"),
            number(row.tg_vs_f16, ".2f"),
            number(row.longest_n_ctx, ",") if row.longest_n_ctx is not None else NONE,
            row.advice,
        ]
        for row in rows
    ]


TABLE = Table(row=QuickRow, title="Which cache to use here", by=lambda row: "", cells=_cells)
TEST = BenchTest(
    name="quick",
    measures="which cache to use with a model on this machine, in about two minutes",
    flags=("--text", "--plot"),
    specs=DEFAULT_SPECS,
    tables=(TABLE,),
    measure=measure,
    is_timed=True,
    draw=plot.quick,
)
