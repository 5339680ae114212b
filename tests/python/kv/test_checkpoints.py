"""`KVCache.checkpoint` and `KVCache.resume`: a sequence goes on from where it once was, to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import KVBlock, Llama
from mixedkv.engine.batch.batch import Batch
from mixedkv.kv.checkpoint import Checkpoint
from support.cache.harness import prompt, rel_rms
from support.cache.random_rows import Subject

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

KINDS: list[Any] = [
    ("llama-64", "mixed"),
    ("gemma2", "mixed"),
    ("gpt-oss", "mixed"),
    ("lfm2", "mixed"),
    ("mamba", "f16"),
    ("qwen2vl", "mixed"),
    ("qwen35", "mixed"),
    ("llama4", "mixed"),
]
TWINS = (("gemma2", "f16"), ("lfm2", "f16"), ("rwkv7", "f16"), ("falcon-h1", "mixed"))
KINDS += [pytest.param(kind, marks=pytest.mark.nightly) for kind in TWINS]
SAVED, LONG = 150, 300
TOKENS = prompt(LONG, seed=3)
OTHER = prompt(60, seed=4)  # what follows instead


class Context:
    """A `Llama` whose sequences are evaluated directly."""

    def __init__(self, path: Path, kv: str, **options: Any) -> None:
        options = {"n_ctx": 1024, "n_seq_max": 3, "kv_unified": True, "swa_full": False, **options}
        self.llm = Llama(path, kv=kv, n_batch=512, n_ubatch=512, n_threads=1, verbose=False, **options)
        self.kv = self.llm.kv
        self._batch = Batch(512)

    def eval(self, tokens: list[int], pos: int, seq: int = 0) -> np.ndarray:
        """Logits behind the last token."""
        self._batch.clear()
        at = self._batch.add(tokens, pos, seq, logits=True)
        assert self._batch.decode(self.llm.ctx) == 0
        row = llama_cpp.llama_get_logits_ith(self.llm.ctx, at)
        return np.ctypeslib.as_array(row, (self.llm.n_vocab(),)).copy()

    def go_on(self, n: int, seq: int) -> np.ndarray:
        """Other tokens behind n, then one at a time, which reads what the first ones left."""
        rows = [self.eval(OTHER[:20], n, seq)]
        rows += [self.eval([token], n + 20 + i, seq) for i, token in enumerate(OTHER[20:])]
        return np.array(rows)


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture
def open_context(zoo_path: Callable[[str], Path], kind: tuple[str, str]) -> Iterator[Callable[[], Context]]:
    opened: list[Context] = []

    def make(**options: Any) -> Context:
        opened.append(Context(zoo_path(kind[0]), kind[1], **options))
        return opened[-1]

    yield make
    for context in opened:
        context.llm.close()


def saved(context: Context, seq: int = 0) -> Checkpoint:
    """Of a sequence that has gone on meanwhile."""
    context.eval(TOKENS[:SAVED], 0, seq)
    point = context.kv.checkpoint(seq)
    assert point is not None
    context.eval(TOKENS[SAVED:], SAVED, seq)
    return point


def cold(context: Context, n: int) -> np.ndarray:
    """What the first n tokens are gone on from with, by a cache that knows nothing else."""
    context.eval(TOKENS[:n], 0)
    return context.go_on(n, 0)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal but for the order of sums."""
    return rel_rms(a, b) < 1e-3


def test_a_sequence_goes_on_from_where_it_was(open_context: Callable[[], Context]) -> None:
    context = open_context()
    point = saved(context)
    assert context.kv.cut_rule.sliding or not context.kv.holds(0, SAVED)
    context.kv.resume(point, SAVED, 0, 0)
    assert context.kv.holds(0, SAVED)
    got, want = context.go_on(SAVED, 0), cold(open_context(), SAVED)
    # rows of sliding windows come back to other cells, which are summed in another order
    assert close(got, want) if context.kv.cut_rule.sliding else np.array_equal(got, want)


def test_another_sequence_goes_on_from_where_it_was(open_context: Callable[[], Context]) -> None:
    """And the one that has gone on does so, too."""
    context = open_context()
    point = saved(context)
    context.kv.resume(point, SAVED, 0, 1)
    assert close(context.go_on(SAVED, 1), cold(open_context(), SAVED))
    whole = open_context()
    whole.eval(TOKENS[:SAVED], 0)
    whole.eval(TOKENS[SAVED:], SAVED)
    assert close(context.go_on(LONG, 0), whole.go_on(LONG, 0))


def test_a_checkpoint_serves_shorter_cuts_too(open_context: Callable[[], Context]) -> None:
    context = open_context()
    point = saved(context)
    n = point.first
    assert n == context.kv.cut_rule.saved_from(SAVED)
    context.kv.resume(point, n, 0, 1)
    assert close(context.go_on(n, 1), cold(open_context(), n))
    with pytest.raises(ValueError, match="serves"):
        context.kv.resume(point, n - 1, 0, 2)


def test_blocks_bring_their_checkpoint_along(open_context: Callable[[], Context]) -> None:
    """Through the arrays of a file, cut where the checkpoint is; in one block and in two."""
    context = open_context()
    point = saved(context)
    block = context.kv.export(0, 0, LONG, TOKENS)
    block = replace(block, checkpoints=(point, *block.checkpoints))
    description = json.loads(json.dumps(block.describe()))
    block = KVBlock.from_arrays(description, block.to_arrays())
    want = cold(open_context(), SAVED)
    for parts in ([block.slice(0, SAVED)], [block.slice(0, 70), block.slice(70, SAVED)]):
        other = open_context()
        for part in parts:
            other.kv.load(part, more=part is not parts[-1])
        assert other.kv.holds(0, SAVED)
        assert close(other.go_on(SAVED, 0), want)


def test_what_is_not_this_models_is_refused(
    open_context: Callable[[], Context], zoo_path: Callable[[str], Path], kind: tuple[str, str]
) -> None:
    context = open_context()
    point = saved(context)
    alien = Context(
        zoo_path("llama-128" if kind[0] != "lfm2" else "mamba"), "mixed" if kind[0] != "lfm2" else "f16"
    )
    with pytest.raises(ValueError, match=r"state|layer|block|group"):
        context.kv.resume(saved(alien), SAVED, 0, 1)
    assert context.kv.positions(1) == (-1, -1)
    if len(point.state):
        for state in (
            point.state[:-8],
            point.state[:20],
            np.concatenate([point.state, point.state]),
            np.zeros_like(point.state),
            np.r_[point.state[:8], np.uint8([7, 0, 0, 0]), point.state[12:]],  # seven sequences in one
        ):
            with pytest.raises(ValueError, match="state of recurrent layers"):
                context.kv.resume(replace(point, state=state), SAVED, 0, 1)
            assert context.kv.positions(1) == (-1, -1)
    context.kv.resume(point, SAVED, 0, 0)
    assert close(context.go_on(SAVED, 0), cold(open_context(), SAVED))
    alien.llm.close()


def test_a_checkpoint_needs_its_rows(open_context: Callable[[], Context], kind: tuple[str, str]) -> None:
    context = open_context()
    point = saved(context)
    if not any(len(group.hot) for group in point.groups):
        pytest.skip("there are no F16 copies")
    with pytest.raises(ValueError, match="does not have position"):
        context.kv.resume(point, SAVED, 2, 1)


def test_a_uniform_cache_needs_no_checkpoints(zoo_path: Callable[[str], Path]) -> None:
    context = Context(zoo_path("llama-64"), "f16")
    context.eval(TOKENS, 0)
    assert context.kv.checkpoint() is None
    assert context.kv.cut_rule.anywhere
    assert context.kv.holds(0, 17)
    context.llm.close()


def test_a_block_without_the_state_is_refused(zoo_path: Callable[[str], Path]) -> None:
    context = Context(zoo_path("lfm2"), "f16")
    context.eval(TOKENS, 0)
    block = context.kv.export(0, 0, SAVED, TOKENS[:SAVED])
    other = Context(zoo_path("lfm2"), "f16")
    with pytest.raises(ValueError, match="no state of the recurrent layers"):
        other.kv.load(block)
    assert other.kv.positions(0) == (-1, -1)
    context.llm.close()
    other.llm.close()


@pytest.mark.by_model
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "gemma4"])
def test_where_sliding_layers_keep_all_their_rows(zoo_path: Callable[[str], Path], name: str) -> None:
    """Their checkpoint has F16 copies only: the rows that it lacks are not dropped for it."""
    contexts = [Context(zoo_path(name), "mixed", swa_full=True) for _ in range(2)]
    point = saved(contexts[0])
    contexts[0].kv.resume(point, SAVED, 0, 0)
    positions = [len(context.kv.layer(0).k(0)) for context in contexts[:1]]
    assert positions == [SAVED]
    assert close(contexts[0].go_on(SAVED, 0), cold(contexts[1], SAVED))
    for context in contexts:
        context.llm.close()


def test_sinks_that_a_window_has_left_are_not_looked_for(zoo_q4_1_path: Callable[[str], Path]) -> None:
    """Others took their cells after the checkpoint, where rows of the window are still there."""
    path, kv = zoo_q4_1_path("gemma2"), "mixed:threshold=16,group=8,sinks=4"
    with closing(Subject(path, kv, swa_full=False, n_seq=8, unified=True, seed=2)) as subject:
        words = subject.rng.choices(range(3, subject.n_words), k=88 + 4 * 36)
        subject.evaluate(subject.llm, 0, [], words[:88])
        point = subject.llm.kv.checkpoint(0)
        assert point is not None
        assert point.groups[0].positions[:4].tolist() == [0, 1, 2, 3]
        for seq in range(2, 6):
            at = 88 + 36 * (seq - 2)
            subject.evaluate(subject.llm, seq, [], words[at : at + 36])
        subject.llm.kv.resume(point, point.n, 0, 1)
        assert subject.llm.kv.exact(1, words[:88]) == 88
