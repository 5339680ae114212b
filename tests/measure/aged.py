"""Time a step of many sequences in a cache in which they have come and gone for long, and in a fresh one.

    python tests/measure/aged.py -m model.gguf --kv mixed --clients 12

In the aged cache sequences have decoded together for 1,000 steps, and every sixtieth token of one was its
last; another one with a prompt of 64 to 400 tokens took its place. The fresh one has sequences of the same
lengths.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.contexts import MICRO_BATCH, Context, LoadedModel

_PER_SEQUENCE = 1024  # tokens of the context
_PROMPT, _LEAVES = (64, 400), 1 / 60  # tokens of who joins, and how often a sequence leaves


class Crowd:
    """Sequences of a context that decode together."""

    def __init__(self, context: Context, n_seq: int) -> None:
        self._context, self._random = context, np.random.default_rng(1)
        self.lengths = [0] * n_seq

    def join(self, seq: int, n: int) -> None:
        """Start a sequence of `n` tokens in place of the one that was there."""
        self._context.remove(seq)
        tokens = self._context.model.random_tokens(n, seed=n)
        for i in range(0, n, MICRO_BATCH):
            part = tokens[i : i + MICRO_BATCH]
            self._context.decode_rows(part, np.arange(i, i + len(part)), np.full(len(part), seq))
        self.lengths[seq] = n

    def step(self) -> None:
        """Evaluate one more token of each sequence."""
        tokens = self._context.model.random_tokens(len(self.lengths))
        self._context.decode_rows(tokens, np.array(self.lengths), np.arange(len(self.lengths)))
        self.lengths = [n + 1 for n in self.lengths]

    def grow_old(self, steps: int, room: int) -> None:
        """Make steps in which sequences leave and others join; of `room` tokens at most."""
        for _ in range(steps):
            for seq, n in enumerate(self.lengths):
                if n == 0 or n >= room or self._random.random() < _LEAVES:
                    self.join(seq, int(self._random.integers(*_PROMPT)))
            self.step()

    def milliseconds(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv", action="append", required=True)
    for name, default in (("clients", 8), ("threads", 1), ("n-gen", 20), ("repeats", 7), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    model = LoadedModel(find_measured_model(args.model))
    print("cache  fresh, ms a step  aged, ms a step  aged to fresh")
    for setting in make_settings(args.kv, "off"):
        size = {"n_ctx": args.clients * _PER_SEQUENCE, "threads": args.threads, "n_seq": args.clients}
        aged, fresh = (Crowd(Context(model, setting, **size), args.clients) for _ in range(2))
        aged.grow_old(args.steps, _PER_SEQUENCE - args.n_gen * (args.repeats + 1))
        for seq, n in enumerate(aged.lengths):
            fresh.join(seq, n)
        turns = []
        for no in range(args.repeats + 1):
            order = (aged, fresh) if no % 2 else (fresh, aged)
            taken = {crowd: crowd.milliseconds(args.n_gen) for crowd in order}
            turns.append((taken[aged], taken[fresh]))
        turns = turns[1:]  # the first one warms up
        a, f = (statistics.median(each) for each in zip(*turns, strict=True))
        low, ratio, high = np.percentile([a / f for a, f in turns], (25, 50, 75))
        print(f"{setting.name}  {f:.2f}  {a:.2f}  {ratio:.2f} +-{(high - low) / 2 / ratio:.0%}", flush=True)


if __name__ == "__main__":
    main()
