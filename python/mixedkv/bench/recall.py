"""Facts asked for far below where they stand, and how long greedy text stays the reference's.

A journal is read once; each question then starts from the state at its end. The answer is right when it is
word for word the one the model was taught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.bench.harness import context_facts, sample_text
from mixedkv.bench.harness.cache_settings import REFERENCE, Setting
from mixedkv.bench.harness.contexts import CannotRunError, Context, Model
from mixedkv.bench.harness.progress import Progress
from mixedkv.bench.harness.summary import wilson
from mixedkv.config import MixedKVConfig

PER_SLOT = 4  # questions of each variant at each depth of a journal
_ANSWER = 28  # tokens at most
_ROOM = 96  # tokens for a question and its answer
_GREEDY = 64
_STARTS = ("", " On", " The", " In")  # of the greedy texts that go on from a journal
_SEED = 70_000

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A journal in tokens, and its questions: tokens, tokens back to the fact, the wanted answer."""

    journal: list[int]
    starts: list[list[int]]
    questions: list[tuple[sample_text.Question, list[int], int]]


@dataclass
class _Answers:
    """What one setting said."""

    right: list[tuple[sample_text.Question, int, bool]]
    texts: list[list[int]]


def make_cases(model: Model, n_journals: int, n_ctx: int) -> list[Case]:
    """Journals that fill a context of `n_ctx` tokens."""
    return [_make_case(model, _SEED + i, n_ctx) for i in range(n_journals)]


def _make_case(model: Model, seed: int, n_ctx: int) -> Case:
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
    return Case(tokens, starts, questions)


def measure(
    model: Model,
    settings: Sequence[Setting],
    cases: Sequence[Case],
    n_ctx: int,
    threads: int,
    progress: Progress,
    add: Callable[[Row], None],
) -> None:
    """Add one row per setting, the reference first."""
    progress.add((1 + len(settings)) * len(cases))
    want: _Answers | None = None
    for setting in (REFERENCE, *settings):
        row: Row = {
            "test": "recall",
            "kv": setting.spec,
            "flash_attn": setting.flash_attn,
            "control": want is None,
            "n_ctx": n_ctx,
            "threads": threads,
        }
        try:
            context = Context(model, setting, n_ctx=n_ctx, threads=threads)
        except CannotRunError as error:
            add(row | {"error": str(error)})
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
            add(row | _summary(answers, want, setting))


def _answer(context: Context, case: Case, answers: _Answers) -> None:
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
    """The likeliest tokens after a prompt, up to the first of `end`."""
    tokens: list[int] = []
    context.feed(np.asarray(prompt, np.int32))
    while len(tokens) < n and context.n_past < context.n_ctx:
        token = int(context.logits()[0].argmax())
        if token in end:
            break
        tokens.append(token)
        context.decode([token])
    return tokens


def _summary(answers: _Answers, want: _Answers, setting: Setting) -> Row:
    row: Row = {"recall": [], "recall_variants": []}
    for slot in range(len(sample_text.DEPTHS)):
        of_slot = [x for x in answers.right if x[0].slot == slot]
        if of_slot:
            depth = int(np.median([back for _, back, _ in of_slot]))
            cold = _is_cold(setting, min(back for _, back, _ in of_slot))
            row["recall"].append({"depth": depth, "cold": cold, **_share([ok for *_, ok in of_slot])})
    for variant in ("plain", "rivals"):
        of_variant = [ok for question, _, ok in answers.right if question.variant == variant]
        if of_variant:
            row["recall_variants"].append({"variant": variant, **_share(of_variant)})
    same = [_agreement(a, b) for a, b in zip(answers.texts, want.texts, strict=False)]
    if same:
        row["agreement"] = {
            "n": len(same),
            "tokens": _GREEDY,
            "mean": float(np.mean(same)),
            "median": float(np.median(same)),
            "whole": float(np.mean(np.equal(same, _GREEDY))),
        }
    return row


def _share(right: Sequence[bool]) -> dict[str, Any]:
    n, correct = len(right), sum(right)
    low, high = wilson(correct, n)
    return {"n": n, "correct": correct, "low": round(low, 4), "high": round(high, 4)}


def _is_cold(setting: Setting, back: int) -> bool:
    """Whether a row so many tokens back is out of the window: uniform caches have none."""
    kv = setting.kv
    return not isinstance(kv, MixedKVConfig) or back > kv.quantization_threshold


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens until two texts differ."""
    n = min(len(a), len(b))
    different: npt.NDArray[np.intp] = np.flatnonzero(np.not_equal(a[:n], b[:n]))
    return int(different[0]) if different.size else n
