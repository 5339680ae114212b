"""`llm.kv.exact_tokens`: up to where sequence 0 holds what evaluating it from the start would give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path

pytestmark = pytest.mark.core

TOKENS = [3 + i * 7 % 250 for i in range(300)]


@pytest.fixture
def llm() -> Iterator[Llama]:
    with Llama(model_path(), kv="mixed", n_ctx=512, n_threads=1, verbose=False) as llm:
        llm.eval(TOKENS[:200])
        yield llm


@pytest.mark.parametrize("kv", ["mixed", "f16", "q8_0"])
def test_a_rollback_behind_the_window(kv: str) -> None:
    with Llama(model_path(), kv=kv, n_ctx=512, n_threads=1, verbose=False) as llm:
        llm.eval(TOKENS[:200])
        llm.n_tokens = 100
        assert llm.kv.exact_tokens == 100
        llm.eval(TOKENS[100:150])
        assert llm.kv.exact_tokens == (100 if kv == "mixed" else 150)
        llm.n_tokens = 60  # before what is not exact, and still behind the window
        llm.eval(TOKENS[60:70])
        assert llm.kv.exact_tokens == (60 if kv == "mixed" else 70)
        llm.reset()
        llm.eval(TOKENS)
        assert llm.kv.exact_tokens == 300


def test_a_rollback_within_the_window(llm: Llama) -> None:
    """The first tokens fill the window: all of them have their F16 rows still."""
    llm.reset()
    llm.eval(TOKENS[:20])
    llm.n_tokens = 15
    llm.eval(TOKENS[15:40])
    assert llm.kv.exact_tokens == 40


def test_blocks(llm: Llama) -> None:
    whole, cut = llm.kv.export(), llm.kv.export(p1=100)
    llm.reset()
    llm.kv.load(whole)
    llm.eval(TOKENS[200:210])
    assert llm.kv.exact_tokens == 210
    llm.reset()
    llm.kv.load(cut)
    assert llm.kv.exact_tokens == 100
    llm.eval(TOKENS[100:120])
    assert llm.kv.exact_tokens == 100


def test_a_block_elsewhere(llm: Llama) -> None:
    block = llm.kv.export(p0=100)
    llm.n_tokens = 50
    llm.kv.load(block, at=50)
    assert (llm.n_tokens, llm.kv.exact_tokens) == (150, 50)


def test_a_converted_block(llm: Llama) -> None:
    block = llm.kv.export()
    with Llama(model_path(), kv="f16", n_ctx=512, n_threads=1, verbose=False) as other:
        other.kv.load(block)
        assert (other.n_tokens, other.kv.exact_tokens) == (200, 0)


def test_another_window(llm: Llama) -> None:
    llm.kv.set_window(sink_tokens=4)
    assert llm.kv.exact_tokens == 200  # as it was
    llm.kv.quantization_threshold = 16
    assert llm.kv.exact_tokens == 0
    llm.reset()
    llm.eval(TOKENS[:50])
    assert llm.kv.exact_tokens == 50


def test_moved_by_someone_else(llm: Llama) -> None:
    llm.kv.limit_exact(120)
    assert llm.kv.exact_tokens == 120
    llm.eval(TOKENS[200:210])
    assert llm.kv.exact_tokens == 120
