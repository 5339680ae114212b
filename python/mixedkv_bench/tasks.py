"""Measures what a cache costs in answers: questions about long documents, and how long greedy text stays the
same.

A document is read once; its questions are then answered greedily, several of them in one batch, each in a
sequence that shares the document's rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mixedkv.bundled import model_path
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv_bench.bench_test import Bench, Options
from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.contexts import MICRO_BATCH, CannotRunError, Context, LoadedModel
from mixedkv_bench.harness.row import CacheRow, RowPart, measured
from mixedkv_bench.harness.summary import wilson
from mixedkv_bench.harness.table import NONE, Cells, Table, number
from mixedkv_bench.harness.task_items import RECALL, TaskItem, make_piles

_SEED = 130_000
_AT_ONCE = 8  # questions in a batch
_GREEDY = 64  # tokens of a text whose agreement is measured
_ROOM = 160  # tokens for a question and its answer, which a document leaves of --n-ctx
_MIN_N_CTX = 1024  # a journal with all its questions
_STARTS = ("\n\nIn short,", "\n\nThe", "\n\nFor example,", "\n\nNote that")


class TaskPart(RowPart):
    """Answers to one kind of question."""

    task: str = Field(description="kind of question")
    n: int = Field(description="questions")
    correct: int = Field(description="right answers")
    n_kept: int = Field(description="right answers to questions that the reference answers right")
    n_reference: int = Field(description="questions that the reference answers right")
    n_same: int = Field(description="answers with the reference's very tokens, up to where they are decided")


class TasksRow(CacheRow):
    """One row per setting and depth.

    Documents are real text with facts in it, dialogue in a format, or for `recall` journals of the bundled
    model's corpus, as many tokens deep as the row says. The reference is an F16 cache without
    flash attention. A setting that keeps all answers has `n_kept` equal to `n_reference`.
    """

    test: Literal["tasks"] = "tasks"
    depth: int = Field(description="tokens of a document")
    n_documents: int = Field(description="documents of each kind")
    control: bool = Field(description="true for the reference with the F16 cache, which comes first")
    tasks: list[TaskPart] | None = measured("answers by kind of question")
    same_tokens: float | None = measured(
        f"tokens until greedy text differs from the reference's, mean of {_GREEDY}"
    )
    same_texts: float | None = measured("share of these texts that agree to the end")
    read_cpu_s: float | None = measured("CPU seconds for reading the documents")
    answer_cpu_s: float | None = measured("CPU seconds for the questions, their answers and the texts")


@dataclass(frozen=True)
class _Case:
    """A document in tokens, and its questions."""

    document: list[int]
    prompts: list[_Prompt]


@dataclass(frozen=True)
class _Prompt:
    """A question in tokens; an item of None is a text to go on with.

    Args:
        n_read: the last tokens whose likeliest successors are what is said first: 1, or more where an answer
            is given.
    """

    item: TaskItem | None
    tokens: list[int]
    n_read: int = 1

    def goes_on(self, said: Sequence[int], text: Callable[[Sequence[int]], str]) -> bool:
        """Return whether more tokens are to be generated."""
        if self.item is None:
            return len(said) < _GREEDY
        return len(said) < self.item.n_tokens and not self.item.is_decided(text(said))


@dataclass
class _Said:
    """The answers of one setting, in the order of the cases and their prompts."""

    items: list[tuple[TaskItem | None, list[int], bool]] = field(default_factory=list)
    read_cpu_s: float = 0.0
    answer_cpu_s: float = 0.0


def make_cases(model: LoadedModel, options: Options, depth: int) -> list[_Case]:
    """Make documents of about `depth` tokens with their questions."""

    def tokenize(text: str) -> list[int]:
        return model.tokenize(text, special=True)

    def count(text: str) -> int:
        return len(tokenize(text))

    head = [model.bos] if model.adds_bos else []
    cases = []
    for i in range(options.repeats):
        for pile in make_piles(options.tasks, _SEED + i, depth, count):
            prompts = [make_prompt(item, tokenize, model.text) for item in pile.items]
            texts = [_Prompt(None, tokenize(start)) for start in _STARTS]
            cases.append(_Case(head + tokenize(pile.text), [*prompts, *texts]))
    return cases


def make_prompt(
    item: TaskItem, tokenize: Callable[[str], list[int]], text: Callable[[Sequence[int]], str]
) -> _Prompt:
    """Return a question in tokens, with those of its answer if they are given."""
    if item.n_tokens:
        return _Prompt(item, tokenize(item.prompt))
    tokens = tokenize(f"{item.prompt} {item.answer}")
    n = next(n for n in range(1, len(tokens)) if text(tokens[-n:]).strip() == item.answer)
    return _Prompt(item, tokens[:-1], n)


def check(options: Options) -> None:
    taught = model_shape(read_model_file(model_path())).name
    if RECALL in options.tasks and options.shape.name != taught:
        raise ValueError(
            "--task recall asks the bundled model, or one made of it, which was taught: leave -m out"
        )
    if options.n_ctx < _MIN_N_CTX:
        raise ValueError(f"--n-ctx {options.n_ctx} has no room for the questions: use {_MIN_N_CTX} or more")


def measure(bench: Bench) -> None:
    """Add one row per setting, the reference first.

    Raises:
        ValueError: a text that documents are made of is not installed.
    """
    depth = bench.options.n_ctx - _ROOM
    cases = make_cases(bench.model, bench.options, depth)
    [reference] = make_settings(["f16"], "off")
    others = [setting for setting in bench.options.settings if setting != reference]
    bench.progress.add((1 + len(others)) * len(cases))
    want = None
    for setting in (reference, *others):
        said, row = _ask(bench, setting, depth, cases)
        want = want or said
        row |= {"control": setting is reference, **_summary(said, want)}
        bench.add(TasksRow.model_validate(row))


def _ask(bench: Bench, setting: Setting, depth: int, cases: Sequence[_Case]) -> tuple[_Said, dict[str, Any]]:
    n_ctx = max(len(case.document) + _AT_ONCE * max(_ROOM, *map(_n_cells, case.prompts)) for case in cases)
    said, threads = _Said(), bench.options.threads
    row = {
        **setting.head(threads),
        "depth": depth,
        "n_documents": bench.options.repeats,
        "n_ctx": n_ctx,
    }
    try:
        with closing(
            Context(bench.model, setting, n_ctx=n_ctx, threads=threads, n_seq=1 + _AT_ONCE)
        ) as context:
            row |= context.facts()
            for case in cases:
                bench.progress.show(f"answers, {depth} deep: {setting.name}")
                context.clear()
                began = time.process_time()
                context.feed(case.document)
                read = time.process_time()
                said.items += _answers(context, case)
                said.read_cpu_s += read - began
                said.answer_cpu_s += time.process_time() - read
                bench.progress.step()
    except CannotRunError as error:
        row["error"] = str(error)
    return said, row


def _n_cells(prompt: _Prompt) -> int:
    """Return how many cells a question and its answer take, or a text that is gone on with."""
    n_said = _GREEDY if prompt.item is None else prompt.item.n_tokens
    return len(prompt.tokens) + n_said


def _answers(context: Context, case: _Case) -> Iterator[tuple[TaskItem | None, list[int], bool]]:
    for start in range(0, len(case.prompts), _AT_ONCE):
        group = case.prompts[start : start + _AT_ONCE]
        for prompt, tokens in zip(group, answers(context, group), strict=True):
            item = prompt.item
            yield item, tokens, item is not None and item.is_right(context.model.text(tokens))


def answers(context: Context, prompts: Sequence[_Prompt]) -> list[list[int]]:
    """Return the likeliest tokens after each prompt, each in a sequence that goes on from sequence 0: of an
    item until the answer is decided or has no room, without one `_GREEDY` tokens.
    """
    n_past, said = context.n_past, []
    for seq in range(1, len(prompts) + 1):
        context.copy(seq)
    for first, group in _batches(prompts):
        tokens = np.concatenate([np.asarray(prompt.tokens, np.int32) for prompt in group])
        positions = np.concatenate([n_past + np.arange(len(prompt.tokens)) for prompt in group])
        seqs = np.concatenate([np.full(len(prompt.tokens), first + i + 1) for i, prompt in enumerate(group)])
        read = np.concatenate([np.arange(len(p.tokens))[::-1] < p.n_read for p in group])
        context.decode_rows(tokens, positions, seqs, read)
        found = context.logits(int(read.sum())).argmax(axis=1)
        ends = np.cumsum([prompt.n_read for prompt in group])
        said += [[int(token) for token in part] for part in np.split(found, ends[:-1])]

    def goes_on(i: int) -> bool:
        return prompts[i].goes_on(said[i], context.model.text)

    while live := [i for i in range(len(said)) if goes_on(i)]:
        last = np.array([said[i][-1] for i in live], np.int32)
        at = np.array([n_past + len(prompts[i].tokens) + len(said[i]) - 1 for i in live])
        context.decode_rows(last, at, np.array(live) + 1)
        for i, token in zip(live, context.logits(len(live)).argmax(axis=1), strict=True):
            said[i].append(int(token))
    for seq in range(1, len(prompts) + 1):
        context.remove(seq)
    return said


def _batches(prompts: Sequence[_Prompt]) -> Iterator[tuple[int, Sequence[_Prompt]]]:
    """Yield as many prompts at a time as fit into a micro-batch, with the index of their first."""
    first = n = 0
    for i, prompt in enumerate(prompts):
        if n and n + len(prompt.tokens) > MICRO_BATCH:
            yield first, prompts[first:i]
            first, n = i, 0
        n += len(prompt.tokens)
    yield first, prompts[first:]


def _summary(said: _Said, want: _Said) -> dict[str, Any]:
    if not said.items or not want.items:
        return {}
    pairs = list(zip(said.items, want.items, strict=False))
    names = dict.fromkeys(mine[0].task for mine, _ in pairs if mine[0] is not None)
    same = [_n_same(mine[1], reference[1]) for mine, reference in pairs if mine[0] is None]
    return {
        "tasks": [_part(name, pairs) for name in names],
        "same_tokens": float(np.mean(same)),
        "same_texts": float(np.mean(np.equal(same, _GREEDY))),
        "read_cpu_s": said.read_cpu_s,
        "answer_cpu_s": said.answer_cpu_s,
    }


def _part(task: str, pairs: Sequence[Any]) -> TaskPart:
    chosen = [(mine, reference) for mine, reference in pairs if mine[0] is not None and mine[0].task == task]
    n_reference = sum(reference[2] for _, reference in chosen)
    n_kept = sum(mine[2] and reference[2] for mine, reference in chosen)
    return TaskPart(
        task=task,
        n=len(chosen),
        correct=sum(mine[2] for mine, _ in chosen),
        n_kept=n_kept,
        n_reference=n_reference,
        n_same=sum(mine[1] == reference[1] for mine, reference in chosen),
    )


def _n_same(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens until two texts differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _cells(rows: Sequence[TasksRow]) -> Cells:
    names = list(dict.fromkeys(part.task for row in rows for part in row.tasks or ()))
    head = ["cache", "bits", *names, "all kept", "95%", "greedy agrees", "CPU s, read", "answers"]
    return [head] + [
        [row.name, number(row.bits_per_element, ".2f"), *_task_cells(row, names)] for row in rows
    ]


def _task_cells(row: TasksRow, names: Sequence[str]) -> list[str]:
    if not row.tasks:
        return [NONE] * (len(names) + 5)
    parts = {part.task: part for part in row.tasks}
    cells = [
        f"{part.correct}/{part.n}" if row.control else f"{part.n_kept}/{part.n_reference}"
        for part in map(parts.__getitem__, names)
    ]
    kept, of = sum(part.n_kept for part in row.tasks), sum(part.n_reference for part in row.tasks)
    low, high = wilson(kept, of)
    share = f"{kept}/{of}"
    return [
        *cells,
        share,
        f"{low:.1%} to {high:.1%}",
        f"{row.same_tokens or 0:.0f} of {_GREEDY} tokens",
        number(row.read_cpu_s, ".0f"),
        number(row.answer_cpu_s, ".0f"),
    ]


TABLE = Table(
    row=TasksRow,
    title="Answers that stay right, {} tokens deep (the reference: of all questions)",
    by=lambda row: row.depth,
    cells=_cells,
)
