"""Tokens evaluated between others that are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.chunks.gate import compare, last_logits
from mixedkv.errors import UnsupportedModelError
from support.engine.conversations import RECALL, open_llama

pytestmark = pytest.mark.full

COLD = "mixed:cold=q8_0,threshold=0,group=1,sinks=0"


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    with open_llama(n_ctx=256) as llm:
        return np.array(llm.tokenize(RECALL.text.encode()), np.int32)


@pytest.mark.parametrize("kv", ["mixed", "q8_0", "f16", COLD])
def test_rows_and_logits_are_those_of_evaluation_in_order(kv: str, tokens: np.ndarray) -> None:
    """What is removed and filled in again is what it was, since all before it is."""
    with open_llama(kv, n_ctx=1024) as llm:
        llm.eval(tokens.tolist())
        expected = last_logits(llm)
        n = len(tokens)
        rows = llm.kv.layer(3).v(0, 20, 140, basis="model")
        gaps = np.r_[30:60, 61:62, 100:103, n - 5 : n]
        for begin, end in ((30, 60), (61, 62), (100, 103), (n - 5, n)):
            llm.kv.remove(0, begin, end)
        llm.kv.fill(tokens[gaps], gaps, logits=True)
        llm.kv.assume(tokens, 20)
        assert llm.n_tokens == n
        assert llm.kv.exact_tokens == 20
        assert compare(expected, last_logits(llm)).kld < 2e-3
        assert np.abs(llm.kv.layer(3).v(0, 20, 140, basis="model") - rows).max() < 0.3 * np.abs(rows).max()
        assert llm.kv.positions(0) == (0, n - 1)


def test_filled_tokens_see_what_is_before_them_and_not_what_is_behind(tokens: np.ndarray) -> None:
    with open_llama(COLD, n_ctx=1024) as llm:
        llm.eval(tokens[:100].tolist())
        alone = llm.kv.layer(5).v(0, 50, 60)
        llm.kv.remove(0, 50, 60)
        llm.kv.fill(tokens[50:60], np.arange(50, 60))
        again = llm.kv.layer(5).v(0, 50, 60)
        llm.kv.remove(0, 40, 60)
        llm.kv.fill(tokens[50:60], np.arange(50, 60))  # ten tokens less to see
        other = llm.kv.layer(5).v(0, 50, 60)
        assert np.abs(again - alone).max() < 0.05 * np.abs(alone).max()
        assert np.abs(other - alone).max() > 0.2 * np.abs(alone).max()


def test_all_attention_is_counted_once(tokens: np.ndarray) -> None:
    """Each token and head gives away a weight of 1 in each layer of the deeper half; nothing is read in F16
    here but the tokens themselves.
    """
    with open_llama(COLD, n_ctx=1024) as llm:
        llm.eval(tokens[:100].tolist())
        mass = llm.kv.fill(tokens[100:104], np.arange(100, 104), watch=104)
        assert mass.shape == (104,)
        assert mass.min() >= 0
        assert mass.sum() == pytest.approx(4 * 4 * 3, rel=1e-3)  # tokens, heads, layers
        assert mass[100] > 0
        assert not llm.kv.fill(tokens[104:105], [104]).size


def test_the_question_looks_at_the_answer() -> None:
    with open_llama("mixed", n_ctx=1024) as llm:
        text = RECALL.prompt.encode()
        ids = np.array(llm.tokenize(text, special=True), np.int32)
        fact = np.array(llm.tokenize(f" {RECALL.fact.statement}".encode(), add_bos=False), np.int32)
        windows = np.lib.stride_tricks.sliding_window_view(ids, len(fact))
        at = int(np.flatnonzero((windows == fact).all(axis=1))[0])
        n = len(ids) - 14
        llm.eval(ids[:n].tolist())
        mass = llm.kv.fill(ids[n:], np.arange(n, len(ids)), watch=n)
        per_token = mass[at : at + len(fact)].mean() / mass[16 : n - 130].mean()
        assert per_token > 2


def test_evaluation_can_end_early(tokens: np.ndarray) -> None:
    with open_llama("mixed", n_ctx=1024) as llm:
        llm.eval(tokens[:100].tolist())
        rows = [llm.kv.layer(il).v(0, 0, 100, basis="model") for il in (1, 4)]
        llm.kv.clear()
        llm.kv.fill(tokens[:100], np.arange(100), last_layer=1)
        early = [llm.kv.layer(il).v(0, 0, 100, basis="model") for il in (1, 4)]
        assert np.array_equal(early[0], rows[0])
        llm.kv.clear()
        llm.eval(tokens[:100].tolist())  # and the next one goes to the end
        assert np.array_equal(llm.kv.layer(4).v(0, 0, 100, basis="model"), rows[1])


@pytest.mark.parametrize(
    ("positions", "match"),
    [([5, 6], "position 5"), ([200, 9], "ascend"), ([-1, 200], "ascend"), ([200], "shape"), ([], "shape")],
)
def test_positions_that_are_there_or_do_not_ascend(
    positions: list[int], match: str, tokens: np.ndarray
) -> None:
    with open_llama("mixed", n_ctx=1024) as llm:
        llm.eval(tokens[:100].tolist())
        with pytest.raises(ValueError, match=match):
            llm.kv.fill([1, 2], positions)
        assert llm.kv.positions(0) == (0, 99)
        llm.eval(tokens[100:110].tolist())


def test_other_bad_input(tokens: np.ndarray) -> None:
    with open_llama("mixed", n_ctx=1024, n_batch=64) as llm:
        llm.eval(tokens[:10].tolist())
        with pytest.raises(ValueError, match="n_batch"):
            llm.kv.fill(np.zeros(65, np.int32), np.arange(100, 165))
        with pytest.raises(ValueError, match="tokens: token 1000000 is not one of"):
            llm.kv.fill([10**6], [50])
        with pytest.raises(LookupError, match="sequence 1"):
            llm.kv.fill([1], [50], seq=1)
        with pytest.raises(ValueError, match="do not describe"):
            llm.kv.assume([1, 2], 0)
    with open_llama("f16", n_ctx=256) as llm, pytest.raises(ValueError, match="fused"):
        llm.kv.fill([1], [0], watch=1)


def test_no_room(tokens: np.ndarray) -> None:
    with open_llama("mixed:threshold=64,group=32,sinks=4", n_ctx=256) as llm:
        llm.eval(np.resize(tokens, 250).tolist())
        with pytest.raises(LookupError, match="no cells"):
            llm.kv.fill(np.ones(20, np.int32), np.arange(300, 320))
        assert llm.kv.positions(0) == (0, 249)


def test_a_recurrent_model_is_refused(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("lfm2"), kv="f16", n_ctx=256, verbose=False) as llm:
        llm.eval([1, 2, 3])
        with pytest.raises(UnsupportedModelError):
            llm.kv.fill([1], [10])
