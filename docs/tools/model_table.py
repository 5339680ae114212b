"""Makes docs/models.md: what each kind of model of the zoo can, found out by doing it.

PYTHONPATH=tests/python python docs/tools/model_table.py > docs/models.md
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mixedkv import KVBlock, Llama
from mixedkv.chunks.gate import last_logits
from mixedkv.engine import Engine, PromptCache
from mixedkv.engine.batch.batch import Batch
from mixedkv.errors import UnsupportedModelError
from mixedkv.store import KVStore
from support.cache.harness import prompt, rel_rms
from support.models import zoo
from support.patience import PATIENCE
from support.servers.served_models import Served, converse, questions

COLUMNS = ("mixed", "fused", "export", "moved", "store", "reuse", "chunks")
MIXED = "mixed"
CHUNK = 32  # tokens
TOKENS, NEXT = prompt(150, seed=3), prompt(30, seed=4)

_HEAD = """# Models

What each kind of model can. `PYTHONPATH=tests/python python docs/tools/model_table.py > docs/models.md` makes
this page by doing it with tiny models of random weights (`tests/python/support/models/zoo`); a test compares.
What llama.cpp loads and is not listed runs if its memory is of a kind that is.

| column | yes means |
|---|---|
| mixed | runs with `kv="mixed"`; what does not runs with `kv="f16"`, which the other columns are of then |
| fused | all its layers have the fused CPU attention; otherwise they are merged |
| export | `llm.kv.export` and `load` in another context: the next logits are the same |
| moved | a block is loaded at another position; with a sliding window where swa_full=True |
| store | `KVStore.save`, and `restore` in another context; so conversations and sessions go on |
| reuse | the second request of an engine shares what the first left of their common prefix |
| chunks | `PromptCache` reuses chunks at other places |
"""


def open_llama(path: Path, kv: str, **options: Any) -> Llama:
    shape = {
        "n_ctx": 512,
        "n_threads": 1,
        "n_batch": 512,
        "n_ubatch": 64,
        "swa_full": False,
        "verbose": False,
    }
    return Llama(path, kv=kv, **{**shape, **options})


def next_logits(llm: Llama) -> np.ndarray:
    llm.eval(NEXT)
    return last_logits(llm)


def check(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


_TURNS = """
## What a turn costs

A conversation has six questions of 60 tokens and answers of 12, with an engine and a store. Its last
prompt comes once more in a new context, from the store. Only the new question and the last token before it
are evaluated, or the last token alone.

| kind | cache | prompt of turn 6 | evaluated | evaluated, from the store | largest checkpoint, bytes |
|---|---|---|---|---|---|"""


class Tried:
    """One kind of model: a method for each column, which raises ValueError or LookupError where it cannot."""

    def __init__(self, shape: zoo.Shape, path: Path, stack: ExitStack) -> None:
        self._path, self._stack = path, stack
        self._arch, self._slides = shape.arch, shape.swa_layers and shape.arch != "llama4"
        self.kv = MIXED
        try:
            self._llm = self._open()
        except ValueError:
            self.kv = "f16"
            self._llm = self._open()
        self._llm.eval(TOKENS)

    def _open(self, kv: str = "", **options: Any) -> Llama:
        return self._stack.enter_context(open_llama(self._path, kv or self.kv, **options))

    def mixed(self) -> None:
        if self.kv != MIXED:
            open_llama(self._path, MIXED).close()

    def fused(self) -> None:
        layers = self._llm.kv.layers
        check(layers and all(layer.fused for layer in layers), "only layers of a mixed cache have it")

    def export(self) -> None:
        block = self._llm.kv.export()
        other = self._open()
        other.kv.load(KVBlock.from_arrays(block.describe(), block.to_arrays()))
        self._compare(other)

    def moved(self) -> None:
        """Scores are those of relative positions, so they are the same anywhere."""
        kv = "f16" if self.kv == "f16" else "mixed:cold=q8_0"
        llm, moved = (self._open(kv, swa_full=True) for _ in range(2))
        llm.eval(TOKENS)
        moved.kv.load(llm.kv.export(), at=7)
        batch = Batch(len(NEXT))
        batch.add(NEXT, 7 + len(TOKENS), 0, logits=True)
        check(batch.decode(moved.ctx) == 0, "llama_decode failed")
        check(rel_rms(last_logits(moved), next_logits(llm)) < 0.05, "the next logits are others")

    def store(self) -> None:
        with KVStore(None) as store:
            saved = store.save(self._llm)
            check(saved.n_stored, saved.reason)
            other = self._open()
            restored = store.restore(other, [*TOKENS, *NEXT], exact_only=True)
        check(restored.hit, restored.reason)
        self._compare(other)

    def reuse(self) -> None:
        llm = self._open(n_seq_max=4, kv_unified=True, n_ctx=1024)
        with Engine(llm) as engine:
            n_cached = []
            for tokens in (TOKENS, [*TOKENS, *NEXT]):
                answer = engine.submit(tokens, max_tokens=4, temperature=0)
                answer.result(PATIENCE)
                check(answer.job.exact, "what is shared is not exact")
                n_cached.append(answer.job.n_cached or 0)
        check(n_cached[1] >= len(TOKENS) - 1, f"of {len(TOKENS)} common tokens {n_cached[1]} are shared")

    def chunks(self) -> None:
        wide = {f"{self._arch}.attention.sliding_window": 2 * CHUNK} if self._slides else None
        llm = self._open(swa_full=True, kv_overrides=wide)
        with KVStore(None) as store:
            options: dict[str, Any] = {"chunk_size": CHUNK, "repair": "seam", "max_kld": 9.0, "check": 0.0}
            cache = PromptCache(llm, store, reuse="chunks", **options)
            llm.eval(TOKENS)
            store.save(llm)
            llm.kv.remove(0)
            reuse = cache.prefill([*prompt(80, seed=5), *TOKENS, *NEXT])
        check(
            reuse.approximate > 64,
            f"of {len(TOKENS)} tokens {reuse.approximate} are reused",
        )

    def _compare(self, other: Llama) -> None:
        check(other.n_tokens == len(TOKENS), f"{other.n_tokens} of {len(TOKENS)} tokens are there")
        check(rel_rms(next_logits(other), self._next) < 1e-3, "the next logits are others")

    @cached_property
    def _next(self) -> np.ndarray:
        """What a context computes that nothing was moved in."""
        cold = self._open()
        cold.eval(TOKENS)
        return next_logits(cold)


def tried(name: str, folder: Path) -> dict[str, str]:
    """The reason for "no" by column, "" for "yes"."""
    with ExitStack() as stack:
        try:
            model = Tried(zoo.SHAPES[name], zoo.write(name, folder), stack)
        except UnsupportedModelError:  # a context without memory
            return dict.fromkeys(COLUMNS, "it reads its whole input at once and has no KV cache")
        return {column: _reason(getattr(model, column)) for column in COLUMNS}


def _reason(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (ValueError, LookupError) as error:
        return re.sub(r"(layer|architecture) '?[\w.-]+'?", r"\1 ...", str(error))
    return ""


def turn(name: str, kv: str, folder: Path) -> str:
    """A row of the second table."""
    path, n_ctx = zoo.write(name, folder), 4096 if name == "llama4" else 1024
    with tempfile.TemporaryDirectory() as place:
        with Served(path, kv, Path(place), n_ctx=n_ctx) as served:
            tokens, answer = converse(served, questions(1))[-1]
            size = max((point.nbytes for point in served.engine.pool.checkpoints), default=0)
        with Served(path, kv, Path(place), n_ctx=n_ctx) as served:
            restored = served.ask(tokens)
    n = len(tokens)
    cells = [n, n - answer.cached, n - restored.cached, size or "none"]
    return f"| `{zoo.SHAPES[name].arch}` | {kv.partition(':')[0]} | {' | '.join(map(str, cells))} |"


def page(folder: Path) -> Iterator[str]:
    yield _HEAD
    yield f"| kind | as in | {' | '.join(COLUMNS)} |"
    yield "|---|---|" + "---|" * len(COLUMNS)
    reasons: list[str] = []
    caches = {}
    for name in zoo.KINDS:
        cells = []
        found = tried(name, folder)
        caches[name] = "f16" if found["mixed"] else MIXED
        for reason in found.values():
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"no ({reasons.index(reason) + 1})" if reason else "yes")
        shape = zoo.SHAPES[name]
        yield f"| `{shape.arch}` | {shape.like} | {' | '.join(cells)} |"
    yield "\nWhy not, in the words of the errors:\n"
    yield from (f"{i}. {reason}" for i, reason in enumerate(reasons, 1))
    yield _TURNS
    yield from (turn(name, kv, folder) for name, kv in caches.items() if name != "bert")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(page(Path(folder))))
