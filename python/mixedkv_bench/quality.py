"""Measures how far a cache moves the next-token distribution, against a reference with an F32 cache.

All contexts read the same text in step, a chunk at a time; of a chunk's distributions only a few numbers
per position are kept, so memory does not grow with the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from mixedkv_bench import plot, tasks
from mixedkv_bench.bench_test import Bench, BenchTest, Options
from mixedkv_bench.harness import sample_text
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, REFERENCE, Setting
from mixedkv_bench.harness.contexts import MICRO_BATCH, CacheFacts, CannotRunError, Context, LoadedModel
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.row import CacheRow, Row, measured
from mixedkv_bench.harness.summary import log_softmax, standard_error
from mixedkv_bench.harness.table import Cells, Table, number

_SEED = 50_000
_CHUNK_FLOATS = 1 << 24  # of one chunk's logits
_MOST = np.float32(80)  # change of a logit, whose exponential single precision still holds

MODE_NAMES = {"batch": "in large batches", "token": "token by token"}
MODES = tuple(MODE_NAMES)

Document = npt.NDArray[np.int32]


class DivergenceRow(Row):
    """A row that says how far next-token distributions are from a reference's."""

    n_positions: int | None = measured("positions the numbers are of")
    kld_mean: float | None = measured("mean KL divergence, nats")
    kld_se: float | None = measured("its standard error, from means of blocks of 32 neighbours")
    kld_median: float | None = measured("median of the divergence, nats")
    kld_p99: float | None = measured("its 99% quantile")
    kld_p999: float | None = measured("its 99.9% quantile")
    kld_max: float | None = measured("its largest value")
    ppl: float | None = measured("perplexity")
    ppl_ratio: float | None = measured("its ratio to the reference's")
    same_top1: float | None = measured("share of positions with the same likeliest token")
    rms_p_change: float | None = measured(
        "root mean square of the change of the following token's probability"
    )


class QualityRow(CacheRow, DivergenceRow):
    """One row per setting and mode.

    The next-token distribution at each position, against that of a reference with an F32 cache and without
    flash attention which reads the same documents. These are parts of `--text`, evenly spaced, or a sample
    generated from the bundled model's corpus, the same on every machine. The numbers of a row are those of
    the second half of each document, as in llama.cpp's perplexity tool. A window of recent tokens would hide
    the damage to old ones early on.
    """

    test: Literal["quality"] = "quality"
    mode: Literal["batch", "token"] = Field(
        description='`"batch"`: micro-batches of up to 512 tokens; `"token"`: one by one, so that errors add '
        "up as in decoding"
    )
    control: bool = Field(
        description="true for the reference measured against itself: its divergence must be 0"
    )
    text: str = Field(default="", description="what was read: kind, source and hash of the text")
    n_documents: int | None = measured("documents that were read")


def read_documents(model: LoadedModel, options: Options) -> list[Document]:
    """Read `repeats` documents of `n_ctx` tokens each, fewer if the text has no more."""
    head = [model.bos] if model.adds_bos else []
    n = options.n_ctx - len(head)
    if options.text is None:

        def count(text: str) -> int:
            return len(model.tokenize(text, special=True))

        n_requested, chat = n + n // 16, options.is_bundled  # some more: parts may have fewer tokens together
        texts = (
            sample_text.document(_SEED + i, n_requested, count, chat=chat) for i in range(options.repeats)
        )
        return [np.array(head + model.tokenize(text, special=True)[:n], np.int32) for text in texts]
    tokens = model.tokenize(options.text)
    if len(tokens) < n:
        raise ValueError(
            f"the text has {len(tokens)} tokens, a context of {options.n_ctx} needs {n}: "
            f"use a longer --text or a smaller --n-ctx"
        )
    n_documents = min(options.repeats, len(tokens) // n)
    step = len(tokens) // n_documents
    starts = range(0, n_documents * step, step)
    return [np.array(head + tokens[i : i + n], np.int32) for i in starts]


def measure(bench: Bench) -> None:
    """Add one row per setting and mode, the reference against itself first; with `--task` those of `tasks`.

    Every document is one sequence of `n_ctx` tokens. "batch" decodes it in micro-batches, "token" one token
    at a time, so that a row is computed from rows that went through the cache before. What was measured is
    added also when this is interrupted.

    Raises:
        ValueError: the text is too short for a document.
    """
    if bench.options.tasks:
        tasks.measure(bench)
        return
    documents = read_documents(bench.model, bench.options)
    bench.progress.add(len(bench.options.modes) * sum(map(len, documents)))
    for mode in bench.options.modes:
        measure_settings(bench, documents, mode, (REFERENCE, *bench.options.settings), bench.add)


def measure_settings(
    bench: Bench,
    documents: Sequence[Document],
    mode: str,
    settings: Sequence[Setting],
    add: Callable[[QualityRow], None],
    told: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Add one row per setting; the reference among them is the control.

    Args:
        told: called with the tokens of a document that all have read, and how many it has.
    """
    threads = bench.options.threads
    n_ctx = len(documents[0])
    with ExitStack() as stack:

        def open_(setting: Setting) -> Context:
            context = Context(bench.model, setting, n_ctx=n_ctx, threads=threads)
            stack.callback(context.close)
            return context

        reference = open_(REFERENCE)
        contenders = []
        for setting in settings:
            try:
                contenders.append(_Contender(setting, open_(setting)))
            except CannotRunError as error:
                contenders.append(_Contender(setting, None, str(error)))
        try:
            for document in documents:
                _read(reference, contenders, document, mode, bench.progress, told)
        finally:
            for contender in contenders:
                add(_row(contender, mode, bench.options, documents))


@dataclass
class _Contender:
    """One context beside the reference, and what was kept of each position."""

    setting: Setting
    context: Context | None
    error: str = ""
    facts: CacheFacts = field(default_factory=CacheFacts)
    kept: list[npt.NDArray[np.float64]] = field(default_factory=list)  # [position, column]

    def __post_init__(self) -> None:
        if self.context is not None:
            self.facts = self.context.facts()


def _read(
    reference: Context,
    contenders: Sequence[_Contender],
    document: Document,
    mode: str,
    progress: Bar,
    told: Callable[[int, int], None],
) -> None:
    """Evaluate a document in every context, and compare distributions of its second half chunk by chunk."""
    half = len(document) // 2
    chunk = max(32, min(MICRO_BATCH, _CHUNK_FLOATS // reference.model.n_vocab))
    cuts = [*range(0, half, MICRO_BATCH), *range(half, len(document), chunk), len(document)]
    running = [each for each in contenders if each.context is not None and not each.error]
    for context in (reference, *(each.context for each in running)):
        assert context is not None
        context.clear()
    for start, end in pairwise(cuts):
        tokens = document[start:end]
        following = document[start + 1 : end + 1] if start >= half else document[:0]
        n = len(following)  # one short at the document's end
        want = Distributions.of(_logits(reference, tokens, mode, n))
        for contender in running:
            progress.show(f"quality, {mode}: {contender.setting.name}")
            assert contender.context is not None
            try:
                got = _logits(contender.context, tokens, mode, n)
            except CannotRunError as error:
                contender.error = str(error)
                continue
            if n:
                contender.kept.append(compare(want, got, following))
        running = [each for each in running if not each.error]
        progress.step(len(tokens))
        told(end, len(document))


def _logits(context: Context, tokens: npt.NDArray[np.int32], mode: str, n: int) -> npt.NDArray[np.float32]:
    """Evaluate tokens, and return the logits of the first `n`: of all but one at most, or of none."""
    if mode == "batch":
        context.decode(tokens, outputs="all" if n else "last")
        return context.logits(len(tokens) if n else 1)[:n]
    rows = np.empty((n, context.model.n_vocab), np.float32)
    for i, token in enumerate(tokens):
        context.decode([token])
        if i < n:
            rows[i] = context.logits()[0]
    return rows


_KLD, _NLL_WANT, _NLL_GOT, _SAME_TOP, _P_CHANGE = range(5)


@dataclass(frozen=True, slots=True)
class Distributions:
    """The reference at some positions: logits [n, n_vocab], probabilities, and the logarithm of their sum."""

    logits: npt.NDArray[np.float32]
    p: npt.NDArray[np.float32]
    log_sum: npt.NDArray[np.float64]

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32]) -> Distributions:
        """Compute distributions from logits, a view that the next evaluation overwrites."""
        log_p = log_softmax(logits)
        kept = logits.copy()
        return cls(kept, np.exp(log_p).astype(np.float32), kept[:, 0] - log_p[:, 0])


def compare(
    want: Distributions, got: npt.NDArray[np.float32], following: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Compare two sets of logits by position, [n, 5]: KL divergence, both negative log-likelihoods, same
    top-1, change of p.

    With d the change of a logit, less its mean under p, the divergence is log(1 + sum p (e^d - 1 - d)): no
    term is negative, so single precision is enough for divergences far below its rounding of a logit.
    """
    d = got - want.logits
    mean = (want.p * d).sum(axis=1, dtype=np.float64)
    d -= mean[:, None].astype(np.float32)
    kld = np.log1p((want.p * _beyond_linear(d)).sum(axis=1, dtype=np.float64))
    rows = np.arange(len(following))
    next_want = want.logits[rows, following] - want.log_sum
    next_got = got[rows, following] - (want.log_sum + mean + kld)
    return np.stack(
        [
            kld,
            -next_want,
            -next_got,
            want.logits.argmax(axis=1) == got.argmax(axis=1),
            np.exp(next_got) - np.exp(next_want),
        ],
        axis=1,
    )


def compare_logits(
    want: npt.NDArray[np.float32], got: npt.NDArray[np.float32], following: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Compare logits [n, n_vocab] as `compare` does, some positions at a time."""
    step = max(1, _CHUNK_FLOATS // want.shape[1])
    parts = [slice(i, i + step) for i in range(0, len(following), step)]
    return np.concatenate(
        [compare(Distributions.of(want[part]), got[part].copy(), following[part]) for part in parts]
    )


def _beyond_linear(d: npt.NDArray[np.float32]) -> npt.NDArray[np.floating[Any]]:
    """Return e^d - 1 - d; by its series where the difference would cancel, to 2e-5 of it."""
    second, third, fourth, fifth = (np.float32(1 / math.factorial(n)) for n in (2, 3, 4, 5))
    series: npt.NDArray[np.floating[Any]] = d * d * (second + d * (third + d * (fourth + d * fifth)))
    far = np.abs(d) > 0.3
    series[far] = np.expm1(np.minimum(d[far], _MOST)) - d[far]
    return series


def _row(contender: _Contender, mode: str, options: Options, documents: Sequence[Document]) -> QualityRow:
    n_ctx = len(documents[0])
    row: dict[str, Any] = {
        **contender.setting.head(options.threads),
        "mode": mode,
        "control": contender.setting is REFERENCE,
        "n_ctx": n_ctx,
        "text": options.text_source,
        "n_documents": len(documents),
        **contender.facts,
    }
    if contender.error:
        row["error"] = contender.error
    if contender.kept:
        row |= summarise(np.concatenate(contender.kept))
    return QualityRow.model_validate(row)


def summarise(kept: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the fields of `DivergenceRow` of some positions, which `compare` compared."""
    if not len(kept):
        return {"n_positions": 0}
    kld = kept[:, _KLD]
    median, p99, p999 = np.percentile(kld, (50, 99, 99.9))
    return {
        "n_positions": len(kept),
        "kld_mean": float(kld.mean()),
        "kld_se": standard_error(kld),
        "kld_median": float(median),
        "kld_p99": float(p99),
        "kld_p999": float(p999),
        "kld_max": float(kld.max()),
        "ppl": float(np.exp(kept[:, _NLL_GOT].mean())),
        "ppl_ratio": float(np.exp((kept[:, _NLL_GOT] - kept[:, _NLL_WANT]).mean())),
        "same_top1": float(kept[:, _SAME_TOP].mean()),
        "rms_p_change": float(np.sqrt((kept[:, _P_CHANGE] ** 2).mean())),
    }


def _cells(rows: Sequence[QualityRow]) -> Cells:
    head = ["cache", "bits", "KLD mean", "", "median", "99%", "99.9%", "max"]
    return [[*head, "ppl ratio", "same top", "RMS dp"]] + [
        [
            row.name,
            number(row.bits_per_element, ".2f"),
            number(row.kld_mean, ".2e"),
            "+-" + number(row.kld_se, ".0e"),
            number(row.kld_median, ".2e"),
            *(number(value, ".1e") for value in (row.kld_p99, row.kld_p999, row.kld_max)),
            number(row.ppl_ratio, ".4f"),
            number(row.same_top1, ".2%"),
            number(row.rms_p_change, ".2%"),
        ]
        for row in rows
    ]


TABLE = Table(
    row=QualityRow,
    title="Quality against an F32 cache, {}",
    by=lambda row: MODE_NAMES[row.mode],
    cells=_cells,
)


def check(options: Options) -> None:
    if options.tasks and options.plot is not None:
        raise ValueError("--plot draws divergences, and --task counts answers: leave one of them out")
    if options.tasks:
        tasks.check(options)


TEST = BenchTest(
    name="quality",
    measures="divergence from an F32 cache on real or generated text, or right answers to questions about it",
    flags=("--flash-attn", "--text", "--n-ctx", "--repeats", "--mode", "--task", "--plot"),
    specs=DEFAULT_SPECS,
    tables=(TABLE, tasks.TABLE),
    measure=measure,
    check=check,
    draw=plot.quality,
)
