"""Streamed layers beside all else that evaluates: fill, chunks and the store; and what an evaluation leaves
that a file or Ctrl-C has ended.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.chunks.gate import compare, last_logits
from mixedkv.engine import PromptCache
from mixedkv.errors import ModelReadError
from mixedkv.store import KVStore
from support.cache.crossing.injections import cut_short
from support.engine.conversations import RECALL

pytestmark = pytest.mark.core

MODEL = model_path()
N_LAYER = 6
KINDS = ["mixed:cold=q8_0,threshold=32,group=8,sinks=4", "f16"]


def _open(path: Path = MODEL, kv: str = "mixed:cold=q8_0", **options: Any) -> Llama:
    given = {"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where memory may not be locked
        return Llama(path, kv=kv, **given)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    with _open(vocab_only=True, kv="f16") as llm:
        return llm.tokenize(RECALL.text.encode())


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(model_path(), tmp_path / "copy.gguf"))


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("last_layer", [None, 1])
def test_fill_computes_what_it_does_in_memory(kv: str, last_layer: int | None, tokens: list[int]) -> None:
    """And so does all that comes after it."""
    if kv == "f16" and last_layer is not None:
        pytest.skip("evaluation ends early in a mixed cache only")
    found = []
    for options in ({"stream_mode": "resident"}, {"stream_layers": N_LAYER}):
        with _open(kv=kv, n_batch=256, n_ubatch=32, **options) as llm:
            llm.eval(tokens[:50])
            llm.kv.fill(tokens[50:150], np.arange(50, 150), last_layer=last_layer)
            rows = [llm.kv.layer(il).v(0, 0, 150) for il in (1, 5 if last_layer is None else 1)]
            if last_layer is None:
                llm.kv.assume(tokens[:150], 50)
            llm.eval(tokens[llm.n_tokens : 160])
            logits = [last_logits(llm)]
            llm.reset()
            llm.eval(tokens[:90])
            found.append([*rows, *logits, last_logits(llm)])
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize("repair", ["query", "cacheblend"])
def test_what_is_stored_after_chunks_is_what_it_says(repair: Any, tmp_path: Path) -> None:
    """A resident model gets it back as exact, so it has to be."""
    first, second = RECALL.text[:700], RECALL.text[900:1600]
    with _open(n_ctx=2048, stream_layers=4) as llm:
        other = llm.tokenize(make_recall(seed=2, n_sentences=12, where=0.2).text.encode())
        cache = PromptCache(llm, KVStore(tmp_path), reuse="chunks", repair=repair)
        cache.warm([first, second])
        assert cache.prefill(f"Two texts. {second}\n\n{first}\nIn short:").approximate
        cache.warm([other])
    with _open(n_ctx=2048) as llm:
        cache = PromptCache(llm, KVStore(tmp_path), reuse="chunks", repair=repair)
        reuse = cache.prefill(other, reuse="exact")
        assert reuse.exact
        assert reuse.cached_exact > len(other) // 2
        restored = last_logits(llm)
        llm.reset()
        llm.eval(other)
        assert compare(last_logits(llm), restored).kld < 1e-3


@pytest.mark.parametrize("kv", KINDS)
def test_a_read_error_leaves_what_was_there(kv: str, copy: Path, tokens: list[int]) -> None:
    with _open(copy, kv, stream_layers=N_LAYER, n_batch=256, n_ubatch=128) as llm:
        llm.eval(tokens[:100])
        llm.eval(tokens[100:210])
        llm.eval(tokens[210:220])
        expected = last_logits(llm)
        llm.reset()
        llm.eval(tokens[:100])
        for _ in range(2):
            with cut_short(copy, 1 / 8), pytest.raises(ModelReadError, match="shorter"):
                llm.eval(tokens[100:210])
            assert (llm.n_tokens, llm.kv.exact_tokens, llm.kv.positions(0)) == (100, 100, (0, 99))
        llm.eval(tokens[100:210])
        llm.eval(tokens[210:220])
        assert llm.kv.exact_tokens == 220
        assert np.array_equal(last_logits(llm), expected)


@pytest.mark.parametrize("kv", KINDS)
def test_a_read_error_between_other_rows_leaves_them(kv: str, copy: Path, tokens: list[int]) -> None:
    gap = np.arange(40, 90)
    with _open(copy, kv, stream_layers=N_LAYER, n_batch=64, n_ubatch=16) as llm:
        llm.eval(tokens[:200])
        llm.kv.remove(0, 40, 90)
        before = llm.kv.layer(5).v(0, 90, 200)
        with cut_short(copy, 1 / 8), pytest.raises(ModelReadError, match="shorter"):
            llm.kv.fill(np.array(tokens)[gap], gap)
        assert np.array_equal(llm.kv.layer(5).v(0, 90, 200), before)
        llm.kv.fill(np.array(tokens)[gap], gap)
        assert llm.kv.positions(0) == (0, 199)


@pytest.mark.parametrize("kv", KINDS)
def test_ctrl_c_leaves_what_was_there(kv: str, tokens: list[int]) -> None:
    many = (tokens[60:] * 9)[:1800]
    with _open(kv=kv, stream_layers=N_LAYER, n_ctx=4096, n_batch=2048, n_ubatch=2048) as llm:
        began = time.monotonic()
        llm.eval(tokens[:60])
        llm.eval(many)
        took = time.monotonic() - began
        expected = last_logits(llm)
        assert any(_interrupted(llm, tokens[:60], many, took * i / 100) for i in range(20, 200))
        assert (llm.n_tokens, llm.kv.exact_tokens, llm.kv.positions(0)) == (60, 60, (0, 59))
        llm.eval(many)
        assert llm.kv.exact_tokens == 1860
        assert np.array_equal(last_logits(llm), expected)


def _interrupted(llm: Llama, first: list[int], then: list[int], seconds: float) -> bool:
    """Interrupt after `seconds`. False: the signal came outside the second pass, or where Python sees it."""
    timer = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        while True:
            llm.reset()
            llm.eval(first)
            llm.eval(then)
    except KeyboardInterrupt as error:
        names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        within = not names.isdisjoint({"_check_streaming", "_check_interrupt"})
        return within and llm.n_tokens == len(first)
    finally:
        timer.join()
