"""Time answers with drafts beside the same ones without, where text repeats itself and where it does not.

    python tests/measure/speculation.py -m model.gguf --depth 16384

The prompt is one passage of a journal again and again. The text "repeats" goes on greedily; "is certain" is
held to the passage by a regular expression; "goes on" continues a journal without repetitions; "is unlike"
is sampled at temperature 3. Ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine import Engine
from mixedkv.limits import padded
from mixedkv.llama import Llama
from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.sample_text import document

_PASSAGE = 200  # tokens, or a few more
_TEMPERATURE = {"repeats": 0.0, "is certain": 0.0, "goes on": 0.0, "is unlike": 3.0}


def passage(engine: Engine, n: int) -> list[int]:
    """A plain journal with its questions."""

    def tokenize(text: str) -> list[int]:
        return engine.tokenizer.tokenize(text, start=False)

    return tokenize(document(1, n, lambda text: len(tokenize(text)), chat=False))


def prompt_of(engine: Engine, depth: int, text: str) -> list[int]:
    if text == "goes on":
        return passage(engine, 2 * depth)[:depth]  # the questions come behind
    once = passage(engine, _PASSAGE)
    return (once * (depth // len(once) + 1))[: max(depth, len(once))]


class Turns:
    """Answers with drafts and without, in turns."""

    def __init__(self, engine: Engine, text: str, args: argparse.Namespace) -> None:
        self._engine, self._text, self._n_gen = engine, text, args.n_gen
        self._prompt = prompt_of(engine, args.depth, text)
        self._mode = "draft-model" if args.draft_model else "prompt-lookup"
        self._bias = tuple((token, -100.0) for token in engine.detokenizer.ends)
        self._constraint = None
        if text == "is certain":
            said = engine.llm.detokenize(self._prompt[-2 * args.n_gen :]).decode("utf-8", "replace")
            self._constraint = Constraint("regex", re.escape(said))
        self._found: list[tuple[float, float, float, bool]] = []  # rate and CPU ratios, steps, same tokens
        self._drafted = self._accepted = 0

    def turn(self, no: int) -> None:
        order = ("off", self._mode) if no % 2 else (self._mode, "off")
        answers = {mode: self._answer(mode, no) for mode in order}
        (plain, plain_cpu, tokens, _), (fast, cpu, drafted, steps) = answers["off"], answers[self._mode]
        if no:  # the first one warms up
            self._found.append((fast / plain, plain_cpu / cpu, steps / self._n_gen, tokens == drafted))

    def _answer(self, mode: str, seed: int) -> tuple[float, float, list[int], int]:
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
        cpu, job = time.process_time() - began, answer.job
        if job.answer.drafter is not None and seed:
            self._drafted += job.answer.drafter.n_drafted
            self._accepted += job.answer.drafter.n_accepted
        rate = (job.n_answer - 1) / max(job.t_last - job.t_first, 1e-9)
        return rate, cpu, list(job.tokens[job.n_prompt :]), self._engine.n_steps - before

    def show(self) -> None:
        ratios, cpu, steps, same = zip(*self._found, strict=True)
        low, ratio, high = np.percentile(ratios, (25, 50, 75))
        print(
            f"{self._text}: {ratio:.2f} +-{(high - low) / 2 / ratio:.0%} of the rate without, CPU "
            f"{statistics.median(cpu):.2f}, {statistics.mean(steps):.2f} steps a token, {self._accepted} of "
            f"{self._drafted} accepted, the same in {sum(same)} of {len(same)} turns",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--kv", default="mixed")
    for name, default in (("depth", 2048), ("n-gen", 96), ("repeats", 4), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    options = {"kv": args.kv, "n_ctx": padded(args.depth + 2 * args.n_gen + 64), "n_seq_max": 4}
    options |= {"kv_unified": True, "n_threads": args.threads, "n_threads_batch": args.threads}
    with ExitStack() as stack:
        llm, draft = (
            stack.enter_context(closing(Llama(path, verbose=False, **options))) if path else None
            for path in (find_measured_model(args.model), args.draft_model)
        )
        engine = stack.enter_context(Engine(llm, parallel=1, draft_model=draft))
        for text in _TEMPERATURE:
            turns = Turns(engine, text, args)
            for no in range(args.repeats + 1):
                turns.turn(no)
            turns.show()


if __name__ == "__main__":
    main()
