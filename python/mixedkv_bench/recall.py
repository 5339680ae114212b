"""Facts asked for far below where they stand, and how long greedy text stays the reference's.

A journal is read once; each question then starts from the state at its end. The answer is right when it is
word for word the one the model was taught.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
from pydantic import Field

from mixedkv.bundled import model_path
from mixedkv.config import MixedKVConfig
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness import context_facts, sample_text
from mixedkv_bench.harness.cache_settings import REFERENCE, Setting
from mixedkv_bench.harness.contexts import CannotRunError, Context, LoadedModel
from mixedkv_bench.harness.row import CacheRow, RowPart
from mixedkv_bench.harness.summary import wilson
from mixedkv_bench.harness.table import NONE, Cells, Table, number
from mixedkv_bench.options import Options

PER_SLOT = 4  # questions of each variant at each depth of a journal
_ANSWER = 28  # tokens at most
_ROOM = 96  # tokens for a question and its answer
_GREEDY = 64
_STARTS = ("", " On", " The", " In")  # of the greedy texts that go on from a journal
_SEED = 70_000
_MIN_N_CTX = 1024  # a journal with all its questions


class SharePart(RowPart):
    n: int = Field(description="questions")
    correct: int = Field(description="right answers")
    low: float = Field(description="of the 95% Wilson interval of their share")
    high: float = Field(description="of the 95% Wilson interval of their share")


class DepthPart(SharePart):
    """Questions about facts at one depth."""

    depth: int = Field(description="median number of tokens from the fact to the question's end")
    cold: bool = Field(description="whether the facts are out of the F16 window")


class VariantPart(SharePart):
    """The same answers by the kind of question."""

    variant: Literal["plain", "rivals"] = Field(
        description='`"plain"`, or `"rivals"` where three facts about the same name or object stand beside it'
    )


class AgreementPart(RowPart):
    """Length of the greedy text after a journal that is the reference's."""

    n: int = Field(description="texts")
    tokens: int = Field(description="tokens of a text")
    mean: float = Field(description="tokens that agree, mean")
    median: float = Field(description="tokens that agree, median")
    whole: float = Field(description="share of the texts that agree to the end")


class RecallRow(CacheRow):
    """One row per setting.

    Journals of the bundled model's corpus fill the context; each is read once, and each question starts from
    the state at its end. An answer is right if it is word for word the one the model was taught.
    """

    test: Literal["recall"] = "recall"
    control: bool = Field(description="true for the reference with the F32 cache, which comes first")
    recall: list[DepthPart] | None = Field(default=None, description="right answers by depth")
    recall_variants: list[VariantPart] | None = Field(
        default=None, description="the same answers by the kind of question"
    )
    agreement: AgreementPart | None = Field(
        default=None, description="how long greedy text after a journal stays the reference's"
    )


@dataclass(frozen=True)
class RecallCase:
    """A journal in tokens, and its questions: tokens, tokens back to the fact, the wanted answer."""

    journal: list[int]
    starts: list[list[int]]
    questions: list[tuple[sample_text.Question, list[int], int]]


@dataclass
class _Answers:
    """The answers of one setting."""

    right: list[tuple[sample_text.Question, int, bool]]
    texts: list[list[int]]


def make_cases(model: LoadedModel, n_journals: int, n_ctx: int) -> list[RecallCase]:
    """Make journals that fill a context of `n_ctx` tokens."""
    return [_make_case(model, _SEED + i, n_ctx) for i in range(n_journals)]


def _make_case(model: LoadedModel, seed: int, n_ctx: int) -> RecallCase:
    def count(text: str) -> int:
        return len(model.tokenize(text))

    head = [model.bos] if model.adds_bos else []
    n_tokens = n_ctx - len(head) - _ROOM - count(sample_text.NOTED) - 24
    journal = sample_text.journal(seed, n_tokens, PER_SLOT, count)
    tokens = head + model.tokenize(sample_text.OPENING + journal.text, special=True)
    excess = len(tokens) + _ROOM - n_ctx
    if excess > 0:
        raise ValueError(f"a journal is {excess} tokens too long for a context of {n_ctx}")
    questions = []
    for question in journal.questions:
        ask = model.tokenize(sample_text.NOTED + sample_text.ask(question.fact), special=True)
        questions.append((question, ask, journal.tokens_after(question, count) + len(ask)))
    starts = [model.tokenize(start) for start in _STARTS]
    return RecallCase(tokens, starts, questions)


def check(options: Options) -> None:
    if options.shape.name != model_shape(read_model_file(model_path())).name:
        raise ValueError(
            "recall asks the bundled model, or one made of it, which was taught the facts: leave -m out"
        )
    if options.n_ctx_recall < _MIN_N_CTX:
        raise ValueError(
            f"--n-ctx {options.n_ctx_recall} has no room for the questions: use {_MIN_N_CTX} or more"
        )


def prepare(bench: Bench) -> Measure:
    cases = make_cases(bench.model, bench.options.repeats, bench.options.n_ctx_recall)
    return lambda: measure(bench, cases)


def measure(bench: Bench, cases: Sequence[RecallCase]) -> None:
    """Add one row per setting, the reference first."""
    options, progress = bench.options, bench.progress
    n_ctx, threads = options.n_ctx_recall, options.threads
    progress.add((1 + len(options.settings)) * len(cases))
    want: _Answers | None = None
    for setting in (REFERENCE, *options.settings):
        row: dict[str, Any] = {
            "kv": setting.spec,
            "flash_attn": setting.flash_attn,
            "control": want is None,
            "n_ctx": n_ctx,
            "threads": threads,
        }
        try:
            context = Context(bench.model, setting, n_ctx=n_ctx, threads=threads)
        except CannotRunError as error:
            bench.add(RecallRow.model_validate(row | {"error": str(error)}))
            progress.step(len(cases))
            continue
        answers = _Answers([], [])
        try:
            row |= context_facts.of_context(context)
            for case in cases:
                progress.show(f"recall: {setting.name}")
                _answer(context, case, answers)
                progress.step()
        except CannotRunError as error:
            row["error"] = str(error)
        finally:
            context.close()
            want = want or answers
            bench.add(RecallRow.model_validate(row | _summary(answers, want, setting)))


def _answer(context: Context, case: RecallCase, answers: _Answers) -> None:
    context.clear()
    context.feed(case.journal)
    state, n_past = context.save(), context.n_past
    end = context.model.tokenize(sample_text.END, special=True)
    for question, tokens, back in case.questions:
        context.restore(state, n_past)
        said = context.model.text(_greedy(context, tokens, _ANSWER, end)).strip()
        answers.right.append((question, back, said == question.fact.answer))
    for start in case.starts:
        context.restore(state, n_past)
        # the last token of the journal again, since a state has no logits
        answers.texts.append(_greedy(context, start or [context.model.tokenize(" ")[0]], _GREEDY, []))


def _greedy(context: Context, prompt: Sequence[int], n: int, end: Sequence[int]) -> list[int]:
    """Return the likeliest tokens after a prompt, up to the first of `end`."""
    tokens: list[int] = []
    context.feed(np.asarray(prompt, np.int32))
    while len(tokens) < n and context.n_past < context.n_ctx:
        token = int(context.logits()[0].argmax())
        if token in end:
            break
        tokens.append(token)
        context.decode([token])
    return tokens


def _summary(answers: _Answers, want: _Answers, setting: Setting) -> dict[str, Any]:
    return {
        "recall": list(_by_depth(answers, setting)),
        "recall_variants": list(_by_variant(answers)),
        **_agreement(answers, want),
    }


def _by_depth(answers: _Answers, setting: Setting) -> Iterator[DepthPart]:
    for slot in range(len(sample_text.DEPTHS)):
        of_slot = [x for x in answers.right if x[0].slot == slot]
        if of_slot:
            backs = [back for _, back, _ in of_slot]
            share = _share([ok for *_, ok in of_slot])
            yield DepthPart(depth=int(np.median(backs)), cold=_is_cold(setting, min(backs)), **share)


def _by_variant(answers: _Answers) -> Iterator[VariantPart]:
    variants: tuple[Literal["plain", "rivals"], ...] = ("plain", "rivals")
    for variant in variants:
        of_variant = [ok for question, _, ok in answers.right if question.variant == variant]
        if of_variant:
            yield VariantPart(variant=variant, **_share(of_variant))


def _agreement(answers: _Answers, want: _Answers) -> dict[str, AgreementPart]:
    same = [_n_same(a, b) for a, b in zip(answers.texts, want.texts, strict=False)]
    if not same:
        return {}
    part = AgreementPart(
        n=len(same),
        tokens=_GREEDY,
        mean=float(np.mean(same)),
        median=float(np.median(same)),
        whole=float(np.mean(np.equal(same, _GREEDY))),
    )
    return {"agreement": part}


class _Share(TypedDict):
    n: int
    correct: int
    low: float
    high: float


def _share(right: Sequence[bool]) -> _Share:
    n, correct = len(right), sum(right)
    low, high = wilson(correct, n)
    return {"n": n, "correct": correct, "low": round(low, 4), "high": round(high, 4)}


def _is_cold(setting: Setting, back: int) -> bool:
    """Return whether a row so many tokens back is out of the window: uniform caches have none."""
    kv = setting.kv
    return not isinstance(kv, MixedKVConfig) or back > kv.quantization_threshold


def _n_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens until two texts differ."""
    n = min(len(a), len(b))
    different: npt.NDArray[np.intp] = np.flatnonzero(np.not_equal(a[:n], b[:n]))
    return int(different[0]) if different.size else n


def _cells(rows: Sequence[RecallRow]) -> Cells:
    depths = max(([part.depth for part in row.recall or ()] for row in rows), key=len)
    head = ["cache", "bits", *(f"{depth} back" for depth in depths)]
    return [[*head, "all", "95%", "with rivals", "greedy agrees"]] + [
        [row.name, number(row.bits_per_element, ".2f"), *_answer_cells(row, len(depths))] for row in rows
    ]


def _answer_cells(row: RecallRow, n_depths: int) -> list[str]:
    parts = row.recall or []
    cells = [f"{part.correct}/{part.n}" + ("" if part.cold else " hot") for part in parts]
    cells += [NONE] * (n_depths - len(parts))
    if not parts:
        return [*cells, NONE, NONE, NONE, NONE]
    n, correct = sum(part.n for part in parts), sum(part.correct for part in parts)
    low, high = wilson(correct, n)
    rivals = [f"{part.correct}/{part.n}" for part in row.recall_variants or () if part.variant == "rivals"]
    agreement = row.agreement
    agrees = f"{agreement.mean:.0f} of {agreement.tokens} tokens" if agreement else NONE
    return [*cells, f"{correct}/{n}", f"{low:.0%} to {high:.0%}", *(rivals or [NONE]), agrees]


TABLE = Table(row=RecallRow, title="Recall in a context of {} tokens", by=lambda row: row.n_ctx, cells=_cells)
TEST = BenchTest(
    name="recall",
    measures="questions that the bundled model answers, from far back in the cache",
    flags=("--flash-attn", "--n-ctx", "--repeats"),
    tables=(TABLE,),
    check=check,
    prepare=prepare,
    in_all=True,
)
