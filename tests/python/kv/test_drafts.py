"""Tokens that are taken back, as drafts of speculative decoding are: up to n_draft of them leave no trace."""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from mixedkv import Llama, _core
from mixedkv.native import llama_cpp as _llama_cpp
from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import Mixed, prompt
from support.engine.conversations import open_llama

pytestmark = [pytest.mark.full, pytest.mark.merged_nightly]

KV = Mixed(threshold=64, group=16, sinks=3, draft=16)
tokens = prompt(4000, seed=21)


@pytest.mark.parametrize("n", range(100, 117))
def test_a_rejected_draft_erodes_nothing(open_ctx, attention: str, n: int) -> None:
    """Wherever the window stands, the longest draft at once."""
    ctx = open_ctx("llama-64", KV.with_(attention=attention))
    ctx.decode(tokens[:n])
    before = ctx.rows(0, "k")[2]
    assert before.tolist() == [KV.is_hot(n - 1, p) for p in range(n)]
    ctx.decode(tokens[n : n + 16])
    ctx.rm(0, n)
    assert ctx.rows(0, "k")[2].tolist() == before.tolist()


def test_what_n_draft_is_too_small_for_stays_cold(open_pair) -> None:
    ctx, oracle = open_pair("llama-64", 1, KV.with_(draft=4))
    for side in (ctx, oracle):
        side.decode(tokens[:112])
    hot = ctx.rows(1, "k")[2].sum()
    for side in (ctx, oracle):
        side.decode(tokens[112:128])
        side.rm(0, 112)
    assert ctx.rows(1, "k")[2].sum() < hot
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[200:210])


@pytest.mark.parametrize("n_ubatch", [4, 64])
def test_against_the_oracle(open_pair, attention: str, n_ubatch: int) -> None:
    kv = KV.with_(attention=attention)
    ctx, oracle = open_pair("llama-64", 1, kv, n_ctx=768, n_ubatch=n_ubatch)
    random = np.random.default_rng(5)
    assert_same(ctx, oracle, tokens[:90])
    for i in range(40):
        drafted = int(random.integers(0, 17))
        accepted = int(random.integers(0, drafted + 1))
        n = ctx.pos_max() + 1
        assert_same(ctx, oracle, tokens[100 + 17 * i : 101 + 17 * i + drafted])
        for side in (ctx, oracle):
            side.rm(0, n + 1 + accepted)
        check_books(ctx, oracle)
        want = [kv.is_hot(n + accepted, p) for p in range(n + accepted + 1)]
        assert ctx.rows(1, "k")[2].tolist() == want
    check_rows(ctx, oracle)


SHAPES = [(1, True), *(pytest.param(3, shared, marks=pytest.mark.nightly) for shared in (True, False))]


@pytest.mark.parametrize(("n_seq_max", "unified"), SHAPES)
def test_after_500_rejected_drafts_logits_are_to_the_bit_those_without(
    open_ctx, attention: str, n_seq_max: int, unified: bool
) -> None:
    kv = KV.with_(attention=attention)
    options = {"n_ctx": 768 * n_seq_max, "n_seq_max": n_seq_max, "unified": unified}
    ctx, twin = (open_ctx("llama-64", kv, **options) for _ in range(2))
    random = np.random.default_rng(6)
    for _ in range(500):
        seq = int(random.integers(0, n_seq_max))
        n = twin.pos_max(seq) + 1
        if n > 700:
            for side in (ctx, twin):
                side.rm(seq)
            n = 0
        junk, batch = (prompt(int(random.integers(1, 17)), int(random.integers(0, 10**6))) for _ in range(2))
        ctx.decode(junk, positions=n, seq_ids=seq)
        ctx.rm(seq, n)
        assert ctx.sequences() == twin.sequences()
        mine, theirs = (side.decode(batch, positions=n, seq_ids=seq) for side in (ctx, twin))
        assert np.array_equal(mine, theirs)


def _hot(llm: Llama) -> list[bool]:
    """Of the tokens that generate() has given out, which are F16."""
    address = _llama_cpp.context(llm)
    return _core.read_rows(address, 0, 0, "k", 0, llm.n_tokens, False)[2].astype(bool).tolist()


def test_prompt_lookup_decoding_has_the_window_of_a_run_without_it() -> None:
    """llama_cpp's own client: drafts of ten tokens, most of them rejected."""
    text = b"the cat sat on the mat and the dog sat on the log, the cat sat on the dog. " * 3
    kv = "mixed:threshold=64,group=16"
    draft_model = LlamaPromptLookupDecoding(num_pred_tokens=10)
    drafted, hot = [0], {}

    def counted(*args, **kwargs):
        draft = draft_model(*args, **kwargs)
        drafted[0] += len(draft)
        return draft

    with open_llama(kv, draft_model=counted, logits_all=True) as llm:
        prompted = llm.tokenize(text)
        for _, _ in zip(range(80), llm.generate(prompted, temp=0.0, reset=True), strict=False):
            hot[llm.n_tokens] = _hot(llm)
    assert drafted[0] > 100
    with open_llama(kv) as llm:
        for _, _ in zip(range(160), llm.generate(prompted, temp=0.0), strict=False):
            if llm.n_tokens in hot:
                assert hot.pop(llm.n_tokens) == _hot(llm)
    assert len(hot) < 3
