"""Carries out what `mixedkv bench` was asked for."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.bench import memory, quality, recall, speed
from mixedkv.bench.harness import context_facts, sample_text
from mixedkv.bench.harness.cache_settings import Setting
from mixedkv.bench.harness.contexts import CannotRunError, Model
from mixedkv.bench.harness.progress import Progress
from mixedkv.bench.harness.stock_peer import Peer
from mixedkv.bench.options import Options
from mixedkv.bench.output.report import render
from mixedkv.bench.output.result import Result
from mixedkv.config import parse_kv
from mixedkv.model.footprint import footprint

_SEED = 50_000

Row = dict[str, Any]


def bench(args: argparse.Namespace) -> None:
    """Measure, print the tables, and leave what was measured also after Ctrl-C."""
    options = Options.check(args)
    result = Result(options.file, options.shape, _command(), options.json)
    try:
        with Progress() as progress, ExitStack() as stack:
            model = Model(options.file.path)
            stack.callback(model.close)
            prepared = _prepare(model, options)
            for test in options.tests:
                _measure(test, model, options, prepared, progress, stack, result.add)
        result.finish()
    finally:
        result.write()
        if result.rows:
            print(render(result.data))
            if options.plot is not None:
                from mixedkv.bench.output import plots

                for path in plots.draw(result.data, options.plot):
                    print(f"wrote {path}")


def _command() -> str:
    return shlex.join(["mixedkv", *sys.argv[1:]])


def _prepare(model: Model, options: Options) -> dict[str, Any]:
    """Texts, checked before the first measurement."""
    prepared: dict[str, Any] = {}
    if "quality" in options.tests:
        prepared["quality"] = _documents(model, options)
    if "recall" in options.tests:
        prepared["recall"] = recall.make_cases(model, options.repeats, options.n_ctx_recall)
    return prepared


def _documents(model: Model, options: Options) -> list[npt.NDArray[np.int32]]:
    """`repeats` documents of `n_ctx` tokens each, fewer if the text has no more.

    Raises:
        ValueError: the text is too short for one.
    """
    head = [model.bos] if model.adds_bos else []
    n = options.n_ctx - len(head)
    if options.text is None:

        def count(text: str) -> int:
            return len(model.tokenize(text, special=True))

        n_asked, chat = n + n // 16, options.is_bundled  # some more: parts may have fewer tokens together
        texts = (sample_text.document(_SEED + i, n_asked, count, chat=chat) for i in range(options.repeats))
        return [np.array(head + model.tokenize(text, special=True)[:n], np.int32) for text in texts]
    tokens = model.tokenize(options.text)
    if len(tokens) < n:
        raise ValueError(
            f"the text has {len(tokens)} tokens, a context of {options.n_ctx} needs {n}: "
            f"use a longer --text or a smaller --n-ctx"
        )
    starts = range(0, len(tokens) - n + 1, n)
    return [np.array(head + tokens[i : i + n], np.int32) for i in starts][: options.repeats]


def _measure(
    test: str,
    model: Model,
    options: Options,
    prepared: dict[str, Any],
    progress: Progress,
    stack: ExitStack,
    add: Callable[[Row], None],
) -> None:
    threads, settings = options.threads, options.settings
    if test == "memory":
        contexts = sorted({depth for depth in options.depths if depth} or {options.n_ctx})
        budget = options.budget or footprint(options.shape, parse_kv("f16"), contexts[-1]).bytes
        path, shape = options.file.path, options.shape
        memory.measure(path, shape, settings, contexts, budget, threads, progress, add)
    elif test == "quality":
        quality.measure(model, settings, prepared[test], options.modes, threads, progress, add)
    elif test == "recall":
        recall.measure(model, settings, prepared[test], options.n_ctx_recall, threads, progress, add)
    elif test == "store":
        _measure_store(model, options, progress, add)
    elif test == "serve":
        _measure_serve(model, options, progress, add)
    else:
        lanes = _lanes(model, options, stack)
        speed.measure(lanes, _works(options), options.repeats, progress, add)


def _measure_store(model: Model, options: Options, progress: Progress, add: Callable[[Row], None]) -> None:
    from mixedkv.bench import kept_kv

    work = kept_kv.Work(
        n_prompt=options.n_prompt,
        n_new=options.n_new,
        n_gen=options.n_gen,
        turns=options.turns,
        threads=options.threads,
        repeats=options.repeats,
        folder=options.folder,
    )
    kept_kv.measure(model, options.settings, work, progress, add)


def _measure_serve(model: Model, options: Options, progress: Progress, add: Callable[[Row], None]) -> None:
    from mixedkv.bench import serving

    work = serving.Work(
        n_prompt=options.n_prompt,
        n_gen=options.n_gen,
        turns=options.turns,
        clients=options.clients,
        threads=options.threads,
        repeats=options.repeats,
        peer=options.peer,
        n_ctx=options.n_ctx_client,
    )
    serving.measure(model, options.file, options.settings, work, progress, add)


def _lanes(model: Model, options: Options, stack: ExitStack) -> list[speed.Entry]:
    lanes: list[speed.Entry] = [
        (setting, "mixedkv", lambda setting, work: _local(model, setting, work))
        for setting in options.settings
    ]
    if options.peer:
        peer = Peer(options.file)
        stack.callback(peer.close)
        lanes += [(setting, "llama_cpp", peer.open) for setting in options.settings if setting.is_peer]
    return lanes


def _works(options: Options) -> list[speed.Work]:
    return [
        speed.Work(
            depth=depth,
            n_prompt=options.n_prompt,
            n_gen=options.n_gen,
            threads=options.threads,
            fill=options.fill,
        )
        for depth in options.depths
    ]


def _local(model: Model, setting: Setting, work: speed.Work) -> speed.Local:
    runner = speed.Local(model, setting, work)
    try:
        runner.facts["attention"] = context_facts.attention(runner.context)
    except CannotRunError:
        runner.close()
        raise
    return runner
