"""How far a cache moves the next-token distribution, against a reference with an F32 cache.

All contexts read the same text in step, a chunk at a time; of a chunk's distributions only a few numbers
per position are kept, so memory does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.bench.harness import context_facts
from mixedkv.bench.harness.cache_settings import REFERENCE, Setting
from mixedkv.bench.harness.contexts import MICRO_BATCH, CannotRunError, Context, Model
from mixedkv.bench.harness.progress import Progress
from mixedkv.bench.harness.summary import log_softmax, standard_error

MODES = ("batch", "token")

_CHUNK_FLOATS = 1 << 22  # of one chunk's logits
_EDGES = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

Row = dict[str, Any]
Documents = Sequence[npt.NDArray[np.int32]]


def measure(
    model: Model,
    settings: Sequence[Setting],
    documents: Documents,
    modes: Sequence[str],
    threads: int,
    progress: Progress,
    add: Callable[[Row], None],
) -> None:
    """Add one row per setting and mode, the reference against itself first.

    Every document is one sequence of `n_ctx` tokens. "batch" decodes it in micro-batches, "token" one token
    at a time, so that a row is computed from rows that went through the cache before. What was measured is
    added also when this is interrupted.
    """
    n_ctx = len(documents[0])
    progress.add(len(modes) * len(documents) * n_ctx)
    for mode in modes:
        _measure_mode(model, settings, documents, mode, threads, progress, add)


def _measure_mode(
    model: Model,
    settings: Sequence[Setting],
    documents: Documents,
    mode: str,
    threads: int,
    progress: Progress,
    add: Callable[[Row], None],
) -> None:
    n_ctx = len(documents[0])
    with ExitStack() as stack:

        def open_(setting: Setting) -> Context:
            context = Context(model, setting, n_ctx=n_ctx, threads=threads)
            stack.callback(context.close)
            return context

        reference = open_(REFERENCE)
        tests = [_Test(REFERENCE, open_(REFERENCE))]
        for setting in settings:
            try:
                tests.append(_Test(setting, open_(setting)))
            except CannotRunError as error:
                tests.append(_Test(setting, None, str(error)))
        try:
            for document in documents:
                _read(reference, tests, document, mode, progress, f"quality, {mode}")
        finally:
            for i, test in enumerate(tests):
                add(_row(test, mode, n_ctx, threads, control=i == 0))


@dataclass
class _Test:
    """One context beside the reference, and what was kept of each position."""

    setting: Setting
    context: Context | None
    error: str = ""
    facts: Row = field(default_factory=dict)
    kept: list[npt.NDArray[np.float64]] = field(default_factory=list)  # [position, column]
    at: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.context is not None:
            self.facts = context_facts.of_context(self.context)


def _read(
    reference: Context,
    tests: Sequence[_Test],
    document: npt.NDArray[np.int32],
    mode: str,
    progress: Progress,
    what: str,
) -> None:
    """Every context reads the document; the distributions are compared chunk by chunk."""
    chunk = max(32, min(MICRO_BATCH, _CHUNK_FLOATS // reference.model.n_vocab))
    running = [test for test in tests if test.context is not None and not test.error]
    for context in (reference, *(test.context for test in running)):
        assert context is not None
        context.clear()
    for start in range(0, len(document) - 1, chunk):
        tokens = document[start : start + chunk]
        following = document[start + 1 : start + 1 + len(tokens)]  # one short at the document's end
        n = len(following)
        want = log_softmax(_logits(reference, tokens, mode)[:n])
        for test in running:
            progress.show(f"{what}: {test.setting.name}")
            assert test.context is not None
            try:
                got = log_softmax(_logits(test.context, tokens, mode)[:n])
            except CannotRunError as error:
                test.error = str(error)
                continue
            test.kept.append(_compare(want, got, following))
            test.at.append(np.arange(start, start + n))
        running = [test for test in running if not test.error]
        progress.step(len(tokens))


def _logits(context: Context, tokens: npt.NDArray[np.int32], mode: str) -> npt.NDArray[np.float32]:
    if mode == "batch":
        context.decode(tokens, outputs="all")
        return context.logits(len(tokens))
    rows = np.empty((len(tokens), context.model.n_vocab), np.float32)
    for row, token in zip(rows, tokens, strict=True):
        context.decode([token])
        row[:] = context.logits()[0]
    return rows


_KLD, _NLL_WANT, _NLL_GOT, _SAME_TOP, _P_CHANGE = range(5)


def _compare(
    want: npt.NDArray[np.float64], got: npt.NDArray[np.float64], following: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Per position [n, 5]: KL divergence, both negative log-likelihoods, same top-1, change of p."""
    p = np.exp(want)
    rows = np.arange(len(following))
    next_want, next_got = want[rows, following], got[rows, following]
    return np.stack(
        [
            np.maximum(np.einsum("nv,nv->n", p, want - got), 0.0),
            -next_want,
            -next_got,
            want.argmax(axis=1) == got.argmax(axis=1),
            np.exp(next_got) - np.exp(next_want),
        ],
        axis=1,
    )


def _row(test: _Test, mode: str, n_ctx: int, threads: int, control: bool) -> Row:
    row: Row = {
        "test": "quality",
        "kv": test.setting.spec,
        "flash_attn": test.setting.flash_attn,
        "mode": mode,
        "control": control,
        "n_ctx": n_ctx,
        "threads": threads,
        **test.facts,
    }
    if test.error:
        row["error"] = test.error
    if test.kept:
        kept, at = np.concatenate(test.kept), np.concatenate(test.at)
        row |= _summary(kept[at >= n_ctx // 2])
        row["by_position"] = list(_by_position(kept, at, n_ctx))
    return row


def _summary(kept: npt.NDArray[np.float64]) -> Row:
    """The numbers of some positions: a row's own are of the second half of each document."""
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


def _by_position(
    kept: npt.NDArray[np.float64], at: npt.NDArray[np.int64], n_ctx: int
) -> Iterator[dict[str, float]]:
    edges = [edge for edge in _EDGES if edge < n_ctx] + [n_ctx]
    for low, high in pairwise(edges):
        summary = _summary(kept[(at >= low) & (at < high)])
        if summary["n_positions"]:
            keys = ("n_positions", "kld_mean", "kld_median", "ppl_ratio", "same_top1")
            yield {"from": low, "to": high, **{key: summary[key] for key in keys}}
