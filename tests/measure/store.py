"""Time the first token of a prompt whose KV was kept: in memory, on disk, encrypted, in a remote.

    python tests/measure/store.py --kv f16 --kv mixed --n-prompt 4096 [--remote redis://127.0.0.1/0]

Each round stores the prompt anew but for its last 32 tokens, empties the cache and takes each tier once,
every other round in reverse. Then the turns of a chat, kept in files and evaluated anew. Ratios are taken
within a round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv.limits import padded
from mixedkv.llama import Llama
from mixedkv.model.named_model import find_measured_model
from mixedkv.store import Identity, KVStore

_NEW = 32  # tokens that are not stored, and of a message
_ANSWER = 32
_CHILD = """import sys, time
from mixedkv import Llama
from mixedkv.store import Identity, KVStore
path, kv, folder, n_ctx, threads, *tokens = sys.argv[1:]
tokens = [int(token) for token in tokens]
llm = Llama(path, kv=kv, n_ctx=int(n_ctx), n_threads=int(threads), verbose=False)
with llm, KVStore(folder) as store:
    identity, began = Identity.of(llm), time.perf_counter()
    llm.eval(tokens[store.restore(llm, tokens, identity=identity).n_tokens:])
    llm.sample(temp=0.0)
    print(time.perf_counter() - began)
"""


class Rounds:
    """One cache, and a store of each kind."""

    def __init__(self, args: argparse.Namespace, kv: str, stack: ExitStack) -> None:
        self._args, self._kv, self._path = args, kv, find_measured_model(args.model)
        chat = args.n_prompt // 2 + args.turns * (_NEW + _ANSWER + 1)
        self._n_ctx = padded(max(args.n_prompt + 1, chat))
        threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
        self.llm = stack.enter_context(Llama(self._path, kv=kv, n_ctx=self._n_ctx, verbose=False, **threads))
        self._identity = Identity.of(self.llm)
        random = np.random.default_rng(1)
        self._text = random.integers(0, self.llm.n_vocab(), self._n_ctx + args.n_prompt).tolist()
        self._prompt = self._text[: args.n_prompt]
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        self._options: dict[str, dict[str, Any]] = {
            "ram": {"max_ram_bytes": 2**40},
            "disk": {"folder": self._folder / "plain", "max_ram_bytes": 0},
            "encrypted": {"folder": self._folder / "secret", "max_ram_bytes": 0, "key": _key()},
        }
        if args.remote:
            self._options["remote"] = {"max_ram_bytes": 2**40, "key": _key(), "remote": args.remote}
        self.times: dict[str, list[float]] = {}
        self.n_bytes: dict[str, int] = {}

    def _store(self, tier: str) -> KVStore:
        options = dict(self._options[tier])
        return KVStore(options.pop("folder", None), max_kv_size_gb=1e6, **options)

    def round(self, no: int) -> None:
        stores = {tier: self._store(tier) for tier in self._options}
        self._evaluate(self._prompt[:-_NEW])
        for tier, store in stores.items():
            if reason := store.save(self.llm, self._prompt[:-_NEW], identity=self._identity).reason:
                raise SystemExit(f"{tier} did not take the prompt: {reason}")
            stats = store.stats()
            self.n_bytes[tier] = stats.bytes_ram or stats.bytes_disk
        if "remote" in stores:  # closing sends what waits, and memory forgets it
            stores["remote"].close()
            stores["remote"] = self._store("remote")
        tiers: dict[str, Callable[[], float]] = {"cold": lambda: self._evaluate(self._prompt)}
        tiers |= {tier: lambda store=store: self._from(store) for tier, store in stores.items()}
        tiers["new process"] = self._new_process
        for tier in list(tiers)[:: -1 if no % 2 else 1]:
            self.times.setdefault(tier, []).append(tiers[tier]())
        for store in stores.values():
            for entry in store.entries():
                store.remove(entry.id)
            store.close()

    def _evaluate(self, tokens: list[int]) -> float:
        self.llm.kv.clear()
        return self._first_token(tokens, time.perf_counter())

    def _first_token(self, tokens: list[int], began: float) -> float:
        self.llm.eval(tokens)
        self._said = int(self.llm.sample(temp=0.0))
        return time.perf_counter() - began

    def _from(self, store: KVStore, prompt: list[int] | None = None) -> float:
        prompt = prompt or self._prompt
        self.llm.kv.clear()
        began = time.perf_counter()
        restored = store.restore(self.llm, prompt, identity=self._identity)
        return self._first_token(prompt[restored.n_tokens :], began)

    def _new_process(self) -> float:
        facts = (self._path, self._kv, self._folder / "plain", self._n_ctx, self._args.threads)
        command = [sys.executable, "-c", _CHILD, *map(str, (*facts, *self._prompt))]
        return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    def show(self) -> None:
        cold = self.times["cold"]
        for tier, seconds in self.times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, cold, strict=True))
            ms = 1e3 * statistics.median(seconds)
            size = f", {self.n_bytes[tier] / 2**20:.1f} MiB" if tier in self.n_bytes else ""
            print(f"{self._kv}, {tier}: {ms:.0f} ms, {ratio:.1%} of cold{size}", flush=True)

    def chat(self) -> None:
        """Show each turn's first token with its history kept in files, and evaluated anew."""
        history = self._prompt[: self._args.n_prompt // 2]
        with self._store("disk") as store:
            for turn in range(self._args.turns):
                cold = self._evaluate(history)
                kept = self._from(store, history)
                for _ in range(_ANSWER):
                    history = [*history, self._said]
                    self._first_token(history[-1:], 0.0)
                store.save(self.llm, history, identity=self._identity)
                print(
                    f"{self._kv}, turn {turn + 1}: {1e3 * kept:.0f} ms, anew {1e3 * cold:.0f} ms", flush=True
                )
                history = history + self._text[turn * _NEW : (turn + 1) * _NEW]


def _key() -> Callable[[], bytes]:
    data = os.urandom(32)
    return lambda: data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv", action="append", required=True)
    parser.add_argument("--folder", help="where files are written (a temporary one)")
    parser.add_argument("--remote", help="redis://... or s3://...")
    for name, default in (("n-prompt", 4096), ("turns", 10), ("repeats", 2), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    for kv in args.kv:
        with ExitStack() as stack:
            rounds = Rounds(args, kv, stack)
            for no in range(args.repeats + 1):
                rounds.round(no)
            for seconds in rounds.times.values():
                del seconds[0]  # the first round warms up
            rounds.show()
            rounds.chat()


if __name__ == "__main__":
    main()
