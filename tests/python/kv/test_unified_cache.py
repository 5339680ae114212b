"""The unified cache with several sequences, and cells that several of them share. (Named after the seed
design.)
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import Mixed, prompt, rel_rms

pytestmark = [pytest.mark.full, pytest.mark.by_model, pytest.mark.merged_nightly]

KV = Mixed(threshold=24, group=8, sinks=2)
tokens = prompt(400, seed=4)


@pytest.fixture(params=[True, False], ids=["unified", "streams"])
def unified(request: pytest.FixtureRequest) -> bool:
    return request.param


MODELS = ["llama-64", "llama-96", "refact", "gpt-oss", "gemma2", "deepseek2"]


def open_three(open_pair, attention: str, unified: bool = True, name: str = "llama-64"):
    kv = KV.with_(attention=attention)
    return open_pair(name, 1, kv, n_seq_max=3, unified=unified, n_ctx=768, n_ubatch=48)


def interleaved(lengths: list[int], first: list[int]) -> tuple[list[int], list[list[int]]]:
    """Positions and sequence ids of a batch that takes turns between sequences of different lengths."""
    turns = [(first[s] + i, s, i) for s in range(len(lengths)) for i in range(lengths[s])]
    turns.sort(key=lambda t: (t[2], t[1]))
    return [p for p, _, _ in turns], [[s] for _, s, _ in turns]


@pytest.mark.parametrize("name", MODELS)
def test_sequences_of_different_lengths_in_one_batch(
    open_pair, attention: str, unified: bool, name: str
) -> None:
    """Each sequence has its own window in the ring, wherever its cells lie."""
    ctx, oracle = open_three(open_pair, attention, unified, name)
    first = [0, 0, 0]
    for lengths in ([50, 20, 5], [1, 1, 1], [3, 40, 0], [1, 0, 1], [10, 10, 60]):
        positions, seqs = interleaved(lengths, first)
        batch = prompt(len(positions), seed=sum(first) + 5)
        assert_same(ctx, oracle, batch, positions=positions, seq_ids=seqs)
        check_books(ctx, oracle)
        first = [a + b for a, b in zip(first, lengths, strict=True)]
    for seq in range(3):
        check_rows(ctx, oracle, seq)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("llama-64", "prompt"),
        *zip(
            ("llama-64", "llama-96", "refact", "gpt-oss", "gemma2", "deepseek2"),
            itertools.cycle(("answers", "prompt")),
        ),
    ],
)
def test_answers_beside_a_prompt(open_pair, attention: str, name: str, first: str) -> None:
    """As a server composes its batches: the attention of answers and of a prompt are separate calls."""
    ctx, oracle = open_three(open_pair, attention, unified=True, name=name)
    assert_same(
        ctx, oracle, prompt(90, seed=1), seq_ids=[[0]] * 50 + [[1]] * 40, positions=[*range(50), *range(40)]
    )
    n_rows = [50, 40, 0]
    for n_prompt in (1, 45, 20, 3):
        runs = [(0, 1), (1, 1), (2, n_prompt)] if first == "answers" else [(2, n_prompt), (1, 1), (0, 1)]
        positions = [n_rows[seq] + i for seq, n in runs for i in range(n)]
        seqs = [[seq] for seq, n in runs for _ in range(n)]
        assert_same(ctx, oracle, prompt(len(seqs), seed=n_prompt), positions=positions, seq_ids=seqs)
        check_books(ctx, oracle)
        for seq, n in runs:
            n_rows[seq] += n


def test_sequences_do_not_disturb_each_other(open_pair, unified: bool) -> None:
    """A sequence among others gives the logits that it gives alone."""
    ctx, _ = open_three(open_pair, "auto", unified)
    alone, _ = open_pair("llama-64", 1, KV, n_ubatch=48)
    want = np.concatenate([alone.decode(tokens[:60]), alone.decode(tokens[60:70])])
    ctx.decode(prompt(80, seed=9), seq_ids=0)
    got = [ctx.decode(tokens[:60], seq_ids=1)]
    ctx.decode(prompt(30, seed=10), seq_ids=2)
    ctx.decode(prompt(30, seed=11), seq_ids=0)
    got.append(ctx.decode(tokens[60:70], seq_ids=1))
    assert max(rel_rms(a, b) for a, b in zip(np.concatenate(got), want, strict=True)) < 1e-3


def test_a_shared_prompt_counts_once(open_pair, attention: str) -> None:
    """Tokens decoded for several sequences at once take one cell, one cold row and one slot."""
    ctx, oracle = open_three(open_pair, attention)
    assert_same(ctx, oracle, tokens[:40], positions=0, seq_ids=[[0, 1, 2]] * 40)
    assert ctx.stats()["n_cells_used"] == 40
    assert ctx.stats()["n_cells_hot"] == sum(KV.is_hot(39, p) for p in range(40))
    for seq in range(3):
        assert len(ctx.rows(1, "k", seq)[1]) == 40
    check_books(ctx, oracle)


def test_a_shared_cell_keeps_its_slot_while_one_sequence_wants_it(open_pair, attention: str) -> None:
    """One sequence runs ahead; for the one that stays the shared rows are still in its window, and hot."""
    ctx, oracle = open_three(open_pair, attention)
    assert_same(ctx, oracle, tokens[:40], positions=0, seq_ids=[[0, 1]] * 40)
    assert_same(ctx, oracle, tokens[100:160], seq_ids=1)
    check_books(ctx, oracle)
    recent = KV.hot_begin(39)
    assert ctx.rows(1, "k", 0)[2][recent:40].all(), "the sequence that stayed lost rows of its window"
    assert not ctx.rows(1, "k", 1)[2][recent:40].any(), "the sequence that left reads rows outside its window"
    assert_same(ctx, oracle, tokens[200:210], seq_ids=0)
    assert_same(ctx, oracle, tokens[210:215], seq_ids=1)
    check_books(ctx, oracle)


def test_the_ring_has_room_for_every_sequence(open_pair, attention: str) -> None:
    """All sequences with a full window at once: each is hot as far as the rule says."""
    ctx, oracle = open_three(open_pair, attention)
    for seq in range(3):
        assert_same(ctx, oracle, tokens[seq * 60 : seq * 60 + 60], seq_ids=seq)
    check_books(ctx, oracle)
    for seq in range(3):
        assert ctx.rows(1, "k", seq)[2].tolist() == [KV.is_hot(59, p) for p in range(60)]


def test_sequences_come_and_go(open_pair, attention: str, unified: bool) -> None:
    """Slots and cells of a sequence that ends serve the next one, many times over."""
    ctx, oracle = open_three(open_pair, attention, unified)
    for turn in range(8):
        seq = turn % 3
        for side in (ctx, oracle):
            side.rm(seq, -1, -1)
        assert_same(ctx, oracle, tokens[turn * 37 : turn * 37 + 30 + 7 * turn % 50], positions=0, seq_ids=seq)
        check_books(ctx, oracle)


def test_removing_every_sequence_at_once(open_pair, attention: str, unified: bool) -> None:
    ctx, oracle = open_three(open_pair, attention, unified)
    for seq in range(3):
        assert_same(ctx, oracle, tokens[seq * 60 : seq * 60 + 50], seq_ids=seq)
    for side in (ctx, oracle):
        side.rm(-1, 30, -1)
    check_books(ctx, oracle)
    for seq in range(3):
        assert_same(ctx, oracle, tokens[seq * 60 : seq * 60 + 20], seq_ids=seq)
    check_books(ctx, oracle)


def test_branches_of_one_conversation(open_pair, attention: str) -> None:
    """A shared start, three ways on, one of them chosen, and again."""
    ctx, oracle = open_three(open_pair, attention)
    assert_same(ctx, oracle, tokens[:30])
    for turn in range(3):
        for side in (ctx, oracle):
            side.cp(0, 1)
            side.cp(0, 2)
        for seq in range(3):
            assert_same(ctx, oracle, prompt(6 + 5 * seq, seed=20 + 3 * turn + seq), seq_ids=seq)
        check_books(ctx, oracle)
        for side in (ctx, oracle):
            side.keep(1 + turn % 2)
            side.cp(1 + turn % 2, 0)
            side.keep(0)
        check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[300:330])
