"""M-RoPE: tokens of an image share a position in time and have a row and a column of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import KVBlock, Llama
from mixedkv.chunks.gate import last_logits
from mixedkv.engine import PromptCache
from mixedkv.engine.batch.batch import Batch
from mixedkv.store import Identity, KVStore
from support.cache.harness import prompt, rel_rms

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

KINDS = [
    ("qwen2vl", "f16"),
    ("qwen2vl", "q8_0"),
    ("qwen2vl", "mixed:threshold=32"),
    ("qwen35", "mixed:threshold=32"),
]
HEIGHT, WIDTH = 3, 5
BEFORE, BEHIND = prompt(40, seed=1), prompt(50, seed=2)
AT, END = len(BEFORE), len(BEFORE) + max(HEIGHT, WIDTH)
N = END + len(BEHIND)
NEXT = prompt(20, seed=3)
# an id for each position; those of the image stand for what is in it
TOKENS = [*BEFORE, *range(7, 7 + END - AT), *BEHIND]


def eval_tokens(llm: Llama, tokens: list[int], pos: int, seq: int = 0) -> None:
    batch = Batch(len(tokens))
    batch.add(tokens, pos, seq, logits=True)
    assert batch.decode(llm.ctx) == 0


def eval_image(llm: Llama, pos: int, seq: int = 0, shape: tuple[int, int] = (HEIGHT, WIDTH)) -> None:
    """As llama.cpp's multimodal library evaluates what an encoder made of an image."""
    n, n_embd = shape[0] * shape[1], llm.n_embd()
    rows, columns = (part.ravel() + pos for part in np.indices(shape))
    positions = np.concatenate([np.full(n, pos), rows, columns, np.zeros(n)]).astype(np.int32)
    embeddings = np.random.default_rng(n).standard_normal((n, n_embd)).astype(np.float32)
    batch = llama_cpp.llama_batch_init(n, n_embd, 1)
    own = ctypes.cast(batch.pos, ctypes.c_void_p).value
    try:
        batch.n_tokens = n
        batch.pos = positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        ctypes.memmove(batch.embd, embeddings.ctypes.data, embeddings.nbytes)
        for i in range(n):
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, 0
        assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    finally:
        batch.pos = ctypes.cast(own, ctypes.POINTER(ctypes.c_int32))
        llama_cpp.llama_batch_free(batch)


def eval_all(llm: Llama, seq: int = 0, at: int = 0) -> None:
    eval_tokens(llm, BEFORE, at, seq)
    eval_image(llm, at + AT, seq)
    eval_tokens(llm, BEHIND, at + END, seq)


def go_on(llm: Llama, n: int = N, seq: int = 0) -> np.ndarray:
    eval_tokens(llm, NEXT, n, seq)
    return last_logits(llm)


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture
def make(zoo_path: Callable[[str], Path], kind: tuple[str, str]) -> Iterator[Callable[[], Llama]]:
    opened: list[Llama] = []

    def open_llama(**options: Any) -> Llama:
        shape = {"n_ctx": 512, "n_threads": 1, "n_seq_max": 2, "kv_unified": True, "verbose": False}
        opened.append(Llama(zoo_path(kind[0]), kv=kind[1], **{**shape, **options}))
        return opened[-1]

    yield open_llama
    for llm in opened:
        llm.close()


def block_of(llm: Llama) -> KVBlock:
    return llm.kv.export(0, 0, N, TOKENS)


def test_an_image_matters(make: Callable[..., Llama]) -> None:
    """And where in it a token is."""
    llm = make()
    eval_all(llm)
    want = go_on(llm)
    llm.kv.remove(0)
    eval_tokens(llm, BEFORE, 0)
    eval_image(llm, AT, shape=(WIDTH, HEIGHT))
    eval_tokens(llm, BEHIND, END)
    assert rel_rms(go_on(llm), want) > 0.01


def test_a_block_has_all_parts_of_positions(make: Callable[..., Llama]) -> None:
    llm = make()
    eval_all(llm)
    (group,) = block_of(llm).groups
    rows, columns = (part.ravel() + AT for part in np.indices((HEIGHT, WIDTH)))
    assert group.xy is not None
    image = slice(AT, AT + HEIGHT * WIDTH)
    assert (group.positions[image] == AT).all()
    assert np.array_equal(group.xy[image], np.stack([columns, rows], axis=1))
    text = np.r_[0:AT, END:N]
    assert np.array_equal(np.delete(group.positions, image), text)
    assert np.array_equal(np.delete(group.xy, image, axis=0), np.stack([text, text], axis=1))
    assert group.ends.max() == N


def test_what_comes_back_is_what_left(make: Callable[..., Llama]) -> None:
    """In one block and in parts, one of which begins within the image's positions."""
    llm = make()
    eval_all(llm)
    block = block_of(llm)
    want = go_on(llm)
    for cuts in ([N], [AT, N], [AT + 2, END + 10, N]):
        other = make()
        begin = 0
        for end in cuts:
            part = block.slice(begin, end)
            part = KVBlock.from_arrays(part.describe(), part.to_arrays())
            other.kv.load(part, more=end != N)
            begin = end
        again = other.kv.export(0, 0, N, TOKENS)
        for group, have in zip(block.groups, again.groups, strict=True):
            assert all(np.array_equal(have.arrays()[name], array) for name, array in group.arrays().items())
        assert np.array_equal(go_on(other), want)


def test_a_part_is_exported_as_it_was(make: Callable[..., Llama]) -> None:
    llm = make()
    eval_all(llm)
    behind = llm.kv.export(0, AT + 1, N, TOKENS[AT + 1 :])
    assert behind.groups[0].positions[0] == END  # the image's rows are all at its first position
    with pytest.raises(LookupError, match="position"):
        llm.kv.export(0, 0, N + 1, [*TOKENS, 1])
    llm.kv.remove(1)
    eval_tokens(llm, BEFORE, 0, 1)
    eval_tokens(llm, BEHIND, END, 1)  # nothing is where the image was
    with pytest.raises(LookupError, match=f"does not have position {AT}"):
        llm.kv.export(1, 0, N, TOKENS)


def test_stores_keep_images(make: Callable[..., Llama], tmp_path: Path) -> None:
    llm = make()
    eval_all(llm)
    with KVStore(tmp_path, max_ram_bytes=0) as store:
        assert store.save(llm, TOKENS).n_stored == N
    want = go_on(llm)
    with KVStore(tmp_path, max_ram_bytes=0) as store:
        other = make()
        restored = store.restore(other, [*TOKENS, *NEXT], exact_only=True)
        assert (restored.n_tokens, restored.exact, restored.tier) == (N, True, "disk")
        assert np.array_equal(go_on(other), want)
        different = [*TOKENS[:AT], 99, *TOKENS[AT + 1 :]]  # another image
        match = store.find(Identity.of(other), different)
        assert match is None or match.n_tokens == AT


def test_checkpoints_hold_images(make: Callable[..., Llama]) -> None:
    """A window of F16 copies that begins within an image's rows, after the sequence has gone on."""
    llm = make()
    eval_tokens(llm, BEFORE, 0)
    eval_image(llm, AT)
    eval_tokens(llm, BEHIND[:8], END)
    n = END + 8
    point = llm.kv.checkpoint()
    if llm.kv.cut_rule.anywhere:
        assert point is None
        return
    assert point is not None
    eval_tokens(llm, BEHIND[8:], n)
    other = make()
    eval_tokens(other, BEFORE, 0)
    eval_image(other, AT)
    eval_tokens(other, BEHIND[:8], END)
    llm.kv.resume(point, n, 0, 0)
    assert llm.kv.holds(0, n)
    assert rel_rms(go_on(llm, n), go_on(other, n)) < 1e-3


def test_moved_rows_are_those_of_another_place(make: Callable[..., Llama], kind: tuple[str, str]) -> None:
    """All parts of a position move by the same, an image's too: one turn of K."""
    llm, moved, there = make(), make(), make()
    eval_all(llm)
    block, by = block_of(llm), 70
    if not llm.kv.can_cut:
        with pytest.raises(ValueError, match="stays at its positions"):
            moved.kv.load(block, at=by)
        assert moved.kv.positions(0) == (-1, -1)
        return
    moved.kv.load(block, at=by)
    eval_all(there, at=by)
    eval_all(llm, seq=1)
    llm.kv.shift(1, 0, -1, by)
    near = {"f16": 3e-3, "q8_0": 0.06}.get(kind[1], 0.3)  # turned keys are rounded once more
    want = there.kv.layer(1).k(0)
    for got, seq in ((moved, 0), (llm, 1)):
        assert rel_rms(got.kv.layer(1).k(seq), want) < near
        (group,), (other,) = (x.kv.export(i, by, by + N, TOKENS).groups for x, i in ((got, seq), (there, 0)))
        assert np.array_equal(group.positions, other.positions)
        assert np.array_equal(group.xy, other.xy)
        assert rel_rms(go_on(got, by + N, seq), go_on(there, by + N)) < near
        there.kv.remove(0, by + N)


def test_chunks_are_text(make: Callable[..., Llama]) -> None:
    """Passages are put in another place, an image is not: no ids of text could be evaluated at its seams."""
    llm = make()
    if not llm.kv.can_cut:
        return
    eval_all(llm)
    block = block_of(llm)
    assert not block.is_text
    parts = [block.slice(p, p + 5).is_text for p in (0, AT - 5, AT - 1, AT, AT + 1, END)]
    assert parts == [True, True, False, False, False, True]
    llm.kv.remove(0)
    with KVStore(None) as store:
        options: dict[str, Any] = {"chunk_size": 32, "repair": "seam", "max_kld": 9.0, "check": 0.0}
        cache = PromptCache(llm, store, reuse="chunks", threaded=False, **options)
        eval_all(llm)
        store.save(llm, TOKENS)
        llm.kv.remove(0)
        for begin, tokens in ((5, TOKENS), (6, BEHIND)):
            tokens = [*prompt(40, seed=begin), *tokens, *NEXT]
            reuse = cache.prefill(tokens)
            assert llm.kv.export(0, 0, llm.n_tokens).is_text
            assert llm.n_tokens >= len(tokens) - 1
            llm.kv.remove(0)
        assert reuse.approximate > 0


def test_bad_parts_are_refused(make: Callable[..., Llama], zoo_path: Callable[[str], Path]) -> None:
    llm = make()
    eval_all(llm)
    block = block_of(llm)
    description, arrays = block.describe(), block.to_arrays()
    xy = arrays["0.xy"]
    for bad, match in (
        (xy[:-1], "shape"),
        (xy.astype(np.int64), "int64"),
        (np.full_like(xy, -1), "out of range"),
    ):
        with pytest.raises(ValueError, match=match):
            KVBlock.from_arrays(description, {**arrays, "0.xy": bad})
    with pytest.raises(ValueError, match="ascend"):  # without them several rows at one position are none
        KVBlock.from_arrays(description, {name: arrays[name] for name in arrays if name != "0.xy"})
    other = make()
    plain = replace(block.slice(0, AT), groups=tuple(replace(g, xy=None) for g in block.slice(0, AT).groups))
    with pytest.raises(ValueError, match="M-RoPE"):
        other.kv.load(plain, more=True)
    with Llama(zoo_path("llama-64"), kv="f16", n_ctx=512, verbose=False) as llama:
        llama.eval(BEFORE)
        theirs = llama.kv.export()
        xy = np.repeat(theirs.groups[0].positions[:, None], 2, axis=1)
        with pytest.raises(ValueError, match="M-RoPE"):
            llama.kv.load(replace(theirs, groups=(replace(theirs.groups[0], xy=xy),)), at=AT)
