"""Conversations with models of the zoo on an engine, and a process of its own that goes on with them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv import Llama
from mixedkv.engine import Answer, Engine, StoreConnector
from mixedkv.store import KVStore
from support import TESTS
from support.cache.harness import prompt
from support.models.zoo import N_VOCAB
from support.patience import PATIENCE

N_NEW = 12  # tokens of an answer
N_TURN = 60  # and of a question
GREEDY: dict[str, Any] = {"max_tokens": N_NEW, "temperature": 0, "logit_bias": ((2, -100.0),)}


# In the context of an engine rows lie elsewhere every time, so sums have another order. Most logits are the
# same to 1e-3 of their spread; now and then an element of a row falls to the next level of its four bits.
FLIP = 0.15


@dataclass(frozen=True)
class Answered:
    """
    Args:
        cached: tokens of the prompt that were not evaluated.
        tier: where their rows were: "context", "ram", "disk" or "".
        ids: of the answer.
        sure: so many of them were chosen by a margin.
        logits: log-probabilities of all tokens to be the first, [N_VOCAB].
    """

    cached: int
    tier: str
    ids: list[int]
    sure: int
    logits: list[float]

    def distance(self, other: Answered) -> float:
        """Largest difference of the logits, by their spread."""
        a, b = (np.array(answer.logits) for answer in (self, other))
        return float(np.abs(a - b).max() / a.std())

    def same(self, other: Answered) -> bool:
        """Equal but for the order of sums."""
        n = min(self.sure, other.sure)
        return self.distance(other) < FLIP and self.ids[:n] == other.ids[:n]


class Served:
    """An engine on a model."""

    def __init__(
        self,
        path: Path,
        kv: str,
        store: Path | None = None,
        *,
        n_ctx: int = 1024,
        n_rs_seq: int = 0,
        swa_full: bool = False,
        **options: Any,
    ) -> None:
        shape: dict[str, Any] = {"n_ctx": n_ctx, "n_seq_max": 8, "kv_unified": True, "n_threads": 1}
        shape["n_rs_seq"] = n_rs_seq
        self.llm = Llama(path, kv=kv, swa_full=swa_full, verbose=False, **shape)
        # random weights amplify 4-bit rounding beyond the bounds of the re-check, which are a trained model's
        self._connector = StoreConnector(KVStore(store, recheck=False)) if store else None
        self.engine = Engine(self.llm, connector=self._connector, **options)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.llm.close()

    def forget(self) -> None:
        """Leaves nothing in the context, once the store has it."""
        assert self._connector is not None
        self._connector.flush()

        def evict_all() -> None:
            while self.engine.pool.evict():
                pass

        self.engine.call(evict_all).result(PATIENCE)

    def answer(self, tokens: list[int], **options: Any) -> tuple[int, list[int]]:
        """Tokens that were not evaluated, and the answer's ids."""
        answer = self.engine.submit(tokens, **{**GREEDY, **options})
        answer.result(PATIENCE)
        job = answer.job
        assert job.exact
        return job.n_cached or 0, list(job.tokens[job.n_prompt :])

    def ask(self, tokens: list[int], **options: Any) -> Answered:
        return self._answered(self.engine.submit(tokens, n_logprobs=N_VOCAB, **{**GREEDY, **options}))

    def ask_all(self, prompts: list[list[int]]) -> list[Answered]:
        """At a time."""
        answers = [self.engine.submit(tokens, n_logprobs=N_VOCAB, **GREEDY) for tokens in prompts]
        return [self._answered(answer) for answer in answers]

    def _answered(self, answer: Answer) -> Answered:
        tops = [logprob.top for logprob in answer.result(PATIENCE).logprobs]
        job = answer.job
        assert job.exact
        first = np.zeros(N_VOCAB)
        first[tops[0]["token"]] = tops[0]["logprob"]
        best = [np.sort(np.delete(top["logprob"], np.flatnonzero(top["token"] == 2)))[-2:] for top in tops]
        sure = [high - low > 2 * FLIP * first.std() for low, high in best]
        ids = list(job.tokens[job.n_prompt :])
        return Answered(job.n_cached or 0, job.cached_tier, ids, [*sure, False].index(False), first.tolist())


def questions(seed: int, n: int = 6) -> list[list[int]]:
    return [prompt(N_TURN, seed=100 * seed + i) for i in range(n)]


def converse(served: Served, turns: list[list[int]]) -> list[tuple[list[int], Answered]]:
    """Turns whose answers become part of the next prompt."""
    history: list[int] = []
    done = []
    for turn in turns:
        history = [*history, *turn]
        done.append((history, served.ask(history)))
        history = [*history, *done[-1][1].ids]
    return done


def in_new_process(tasks: list[dict[str, Any]]) -> list[list[Answered]]:
    """What prompts are answered with, from the disk, by tasks of {path, kv, store, prompts, options}."""
    command = [sys.executable, "-m", "support.servers.served_models"]
    done = subprocess.run(
        command, input=json.dumps(tasks), capture_output=True, text=True, timeout=900, cwd=TESTS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [[Answered(**answer) for answer in answers] for answers in json.loads(done.stdout)]


def main() -> None:
    results = []
    for task in json.loads(sys.stdin.read()):
        with Served(task["path"], task["kv"], Path(task["store"]), **task["options"]) as served:
            results.append([asdict(served.ask(tokens)) for tokens in task["prompts"]])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
