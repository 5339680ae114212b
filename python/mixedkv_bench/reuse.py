"""Passages reused in another place: how soon the first token comes, and what it costs in quality.

Each case is a prompt whose passages were evaluated and stored before, elsewhere. Full evaluation and every
way of repair take turns on it, each from an empty cache; ratios are taken within a case. All work is inside
the times: finding, restoring, turning, the question's own attention, evaluating.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mixedkv.chunks.gate import Deviation, compare, follow
from mixedkv.chunks.repair import Method
from mixedkv.engine import Generation, PromptCache
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import padded
from mixedkv.llama import Llama
from mixedkv.store import Identity, KVStore
from mixedkv_bench.bench_test import Bench, BenchTest, Options
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.reuse_cases import (
    Case,
    CaseMaker,
    DonorKind,
    Workload,
    kinds_of,
)
from mixedkv_bench.harness.row import Row, measured
from mixedkv_bench.harness.summary import ratio_interval
from mixedkv_bench.harness.table import Cells, Table, number

_FOLLOWED = 24  # tokens after a prompt whose distributions are compared
_ANSWER = 28  # tokens at most


class ReuseRow(Row):
    """One row per setting, workload, donor and method.

    A prompt's passages were evaluated and stored before, elsewhere; what reuse of their rows gives is
    compared with full evaluation of the prompt. `"llama.cpp"`'s `--cache-reuse` shifts without repair: that
    is the method `"none"`.
    """

    test: Literal["reuse"] = "reuse"
    workload: Workload = Field(
        description='`"documents"`: in another order; `"edited"`: one passage of a history has changed; '
        '`"system"`: a growing history behind a changed system prompt; `"few_shot"`: examples in another '
        'order; `"prose"`, `"narrative"`, `"code"`, `"dialogue"`: passages of real text, of its second half, '
        "and a question about them"
    )
    donor: DonorKind = Field(
        description='where the rows are from: `"alone"`, `"bos"` (BOS and the passage), or a `"conversation"`'
    )
    method: Literal["full", "none", "seam", "cacheblend", "query"] = Field(
        description='`"full"` evaluates the prompt; otherwise how seams are repaired, see docs/passages.md'
    )
    ratio: float = Field(description="share of the reused tokens that the method chooses")
    overlap_k: int = Field(description="tokens of each seam that are evaluated")
    n_cases: int = Field(description="prompts")
    n_prompt: int | None = measured("tokens of a prompt, median")
    evaluated: float | None = measured(
        "tokens evaluated by those of the prompt, mean; evaluation of some layers counts in part"
    )
    repaired: float | None = measured("the part of that which is the repair's: all but what is in no donor")
    approximate: float | None = measured("share of the rows that are a donor's, mean")
    ttft: float | None = measured("seconds to the first token, median")
    vs_cold: float | None = measured("by the time of full evaluation, median of the ratios within a case")
    cpu_vs_cold: float | None = measured(
        "the same of the CPU time of all threads: what else runs counts less"
    )
    kld_mean: float | None = measured(
        f"KL divergence from full evaluation, nats, mean over the {_FOLLOWED} tokens that full "
        "evaluation goes on with"
    )
    kld_first: float | None = measured("that of the first token alone, mean")
    kld_median: float | None = measured("its median over all of these tokens")
    kld_of_none: float | None = measured(
        '`kld_mean` by that of `"none"` on the same prompts, where both were measured'
    )
    kld_of_none_low: float | None = measured("of its 95% interval: bootstrap over prompts")
    kld_of_none_high: float | None = measured("of the same interval")
    same_top1: float | None = measured("share of them with the same likeliest token")
    correct: int | None = measured("right answers, where full evaluation has any")


@dataclass
class _Results:
    """Results of one workload, donor and method, by case."""

    method: Method | None
    reuses: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    deviations: list[list[Deviation]] = field(default_factory=list)
    correct: int = 0


def check(options: Options) -> None:
    if not kinds_of(options.workloads, options.donors):
        raise ValueError("--donor: the chosen workloads have no rows of this donor: choose another one")
    if options.n_prompt < 256:
        raise ValueError(f"--n-prompt {options.n_prompt} has no room for documents: use 256 or more")


def measure(bench: Bench) -> None:
    """Add a row for every setting, workload, donor and method; what was measured also when it is
    interrupted.
    """
    options = bench.options
    kinds = kinds_of(options.workloads, options.donors)
    bench.progress.add(len(options.settings) * len(kinds) * options.repeats)
    n_ctx = padded(options.n_prompt + options.n_prompt // 4 + _ANSWER + 64)
    for setting in options.settings:
        head = setting.head(options.threads)
        try:
            with _open(bench.model.path, setting, n_ctx, options.threads) as llm:
                _measure_setting(bench, llm, setting, kinds, head)
        except (CannotRunError, UnsupportedModelError) as error:
            bench.add(_refused(*kinds[0], error, head))


def _open(path: Path, setting: Setting, n_ctx: int, threads: int) -> Llama:
    """Raises CannotRunError if the model cannot have this cache, or there is no memory for it."""
    options: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    options["swa_full"] = True  # passages are moved
    try:
        return Llama(path, kv=setting.kv, n_ctx=n_ctx, flash_attn=setting.flash_attn, **options)
    except ValueError as error:
        raise CannotRunError(str(error)) from None


def _refused(workload: Workload, donor: DonorKind, error: Exception, head: dict[str, Any]) -> ReuseRow:
    """Return the row that says why nothing was measured."""
    empty = {"workload": workload, "donor": donor, "method": "full", "n_cases": 0}
    return ReuseRow.model_validate({**empty, "ratio": 0.0, "overlap_k": 0, "error": str(error), **head})


def _measure_setting(
    bench: Bench,
    llm: Llama,
    setting: Setting,
    kinds: Sequence[tuple[Workload, DonorKind]],
    head: dict[str, Any],
) -> None:
    options = bench.options
    methods = [Method(repair=repair) for repair in options.repairs]
    maker = _maker(llm, options)
    for workload, donor in kinds:
        results = [_Results(None), *map(_Results, methods)]
        try:
            for seed in range(options.repeats):
                bench.progress.show(f"reuse: {setting.name}, {workload}, {donor}")
                _measure_case(llm, maker.make(workload, donor, seed), results, seed)
                bench.progress.step()
        except CannotRunError as error:
            bench.add(_refused(workload, donor, error, head))
        finally:
            for each in results:
                if each.seconds:
                    bench.add(_row(each, results, workload, donor, head))


def _maker(llm: Llama, options: Options) -> CaseMaker:
    def encode(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False, special=True) if text else []

    return CaseMaker(encode, llm.tokenize(b"", add_bos=True), options.n_prompt, options.n_documents)


def _measure_case(llm: Llama, case: Case, results: Sequence[_Results], seed: int) -> None:
    """Measure all methods on one prompt, each from an empty cache and the same store. Full evaluation comes
    first, since it says what the others follow; the others take turns in going next.
    """
    with KVStore(None, max_ram_bytes=2**33) as store:
        for tokens in case.stored:
            llm.kv.clear()
            llm.eval(tokens.tolist())
            store.save(llm, identity=Identity.of(llm))
        cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
        cache.refresh()  # as requests do while they are stored: before the clock runs
        full, others = results[0], list(results[1:])
        llm.kv.clear()
        alone = PromptCache(llm)
        _timed(full, lambda: alone.prefill(case.prompt))
        answer, exact = follow(llm, _ANSWER)
        full.deviations.append([Deviation(0.0, True)] * _FOLLOWED)
        full.correct += _is_right(llm, answer, case)
        for i in range(len(others)):
            one = others[(i + seed) % len(others)]
            llm.kv.clear()
            _timed(one, partial(cache.prefill, case.prompt, method=one.method))
            _, logits = follow(llm, _FOLLOWED, answer)
            one.deviations.append([compare(a, b) for a, b in zip(exact[:_FOLLOWED], logits, strict=True)])
            if case.answer:
                llm.kv.remove(0, len(case.prompt) - 1)
                llm.eval([int(case.prompt[-1])])
                one.correct += _is_right(llm, follow(llm, _ANSWER)[0], case)


def _timed(each: _Results, prefill: Callable[[], Generation]) -> None:
    begin, cpu = time.perf_counter(), time.process_time()
    each.reuses.append(prefill())
    each.seconds.append(time.perf_counter() - begin)
    each.cpu.append(time.process_time() - cpu)


def _is_right(llm: Llama, tokens: list[int], case: Case) -> bool:
    """Return whether the answer is the one that was taught, word for word, up to the end of the turn."""
    text = llm.detokenize(tokens, special=True).decode(errors="replace")
    return text.split("<|end|>")[0].strip() == case.answer


def _evaluated(done: Generation) -> float:
    """Return the tokens that were evaluated, by those of the prompt."""
    return (done.chunks.n_evaluated if done.chunks else done.evaluated) / done.prompt_tokens


def _repaired(done: Generation) -> float:
    """Return the part of that which is the repair's."""
    chunks = done.chunks
    return (chunks.n_evaluated - chunks.n_new) / done.prompt_tokens if chunks else 0.0


def _row(
    each: _Results,
    all_results: Sequence[_Results],
    workload: Workload,
    donor: DonorKind,
    head: dict[str, Any],
) -> ReuseRow:
    n, full = len(each.seconds), all_results[0]
    deviations = [deviation for case in each.deviations for deviation in case]
    answers = {"correct": each.correct} if full.correct else {}
    method = each.method
    unrepaired = [
        other for other in all_results if other.method is not None and other.method.repair == "none"
    ]
    of_none = _of_none(each, unrepaired[0]) if unrepaired and method else {}
    return ReuseRow.model_validate(
        {
            "workload": workload,
            "donor": donor,
            "method": method.repair if method else "full",
            "ratio": float(np.mean([done.chunks.ratio if done.chunks else 0.0 for done in each.reuses])),
            "overlap_k": method.overlap if method else 0,
            "n_cases": n,
            "n_prompt": int(np.median([done.prompt_tokens for done in each.reuses])),
            "evaluated": float(np.mean([_evaluated(done) for done in each.reuses])),
            "repaired": float(np.mean([_repaired(done) for done in each.reuses])),
            "approximate": float(np.mean([r.approximate / r.prompt_tokens for r in each.reuses])),
            "ttft": float(np.median(each.seconds)),
            "vs_cold": float(np.median([a / b for a, b in zip(each.seconds, full.seconds, strict=False)])),
            "cpu_vs_cold": float(np.median([a / b for a, b in zip(each.cpu, full.cpu, strict=False)])),
            "kld_mean": float(np.mean([deviation.kld for deviation in deviations])),
            "kld_first": float(np.mean([case[0].kld for case in each.deviations])),
            "kld_median": float(np.median([deviation.kld for deviation in deviations])),
            "same_top1": float(np.mean([deviation.same_top1 for deviation in deviations])),
            **of_none,
            **answers,
            **head,
        }
    )


def _of_none(each: _Results, none: _Results) -> dict[str, float]:
    """Return what is left of the mean divergence without repair, and the interval of that."""
    n = min(len(each.deviations), len(none.deviations))
    own, others = (
        [float(np.mean([deviation.kld for deviation in case])) for case in results.deviations[:n]]
        for results in (each, none)
    )
    if not any(others):
        return {}
    found = {"kld_of_none": sum(own) / sum(others)}
    if n > 1:
        found["kld_of_none_low"], found["kld_of_none_high"] = ratio_interval(own, others)
    return found


def _share(row: ReuseRow) -> str:
    if row.kld_of_none is None or row.kld_of_none_low is None:
        return number(row.kld_of_none, ".0%")
    return f"{row.kld_of_none:.0%} ({row.kld_of_none_low:.0%} to {row.kld_of_none_high:.0%})"


def _cells(rows: Sequence[ReuseRow]) -> Cells:
    head = ["cache", "workload", "donor", "method", "evaluated", "repair", "first token", "of cold"]
    return [[*head, "CPU", "KLD mean", "of none", "median", "first", "same top-1", "right"]] + [
        [
            row.name,
            row.workload,
            row.donor,
            row.method + (f" {100 * row.ratio:.0f}%" if row.ratio else ""),
            number(row.evaluated, ".1%"),
            number(row.repaired, ".1%"),
            number(row.ttft, ".4f"),
            number(row.vs_cold, ".1%"),
            number(row.cpu_vs_cold, ".1%"),
            number(row.kld_mean, ".1e"),
            _share(row),
            number(row.kld_median, ".1e"),
            number(row.kld_first, ".1e"),
            number(row.same_top1, ".1%"),
            "" if row.correct is None else f"{row.correct}/{row.n_cases}",
        ]
        for row in rows
    ]


TABLE = Table(
    row=ReuseRow,
    title="Passages reused in another place",
    by=lambda row: "",
    cells=_cells,
)
TEST = BenchTest(
    name="reuse",
    measures="passages reused at another place of a prompt: time, divergence, repairs",
    flags=("--workload", "--donor", "--repair", "--documents", "--n-prompt", "--repeats"),
    specs=("mixed:cold=q8_0", "mixed"),
    tables=(TABLE,),
    check=check,
    measure=measure,
    is_timed=True,
)
