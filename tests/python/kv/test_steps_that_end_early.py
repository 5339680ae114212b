"""Rows count when the graph that writes them has ended well; what ends it early leaves all as it was."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp._ggml import libggml

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.chunks.gate import last_logits
from support.engine.conversations import open_llama

pytestmark = pytest.mark.core

ggml_get_name = libggml.ggml_get_name
ggml_get_name.restype, ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]

TOKENS = [3 + i * 7 % 250 for i in range(400)]
NARROW = "mixed:cold=q8_0,threshold=32,group=8,sinks=4"


@contextmanager
def aborting(llm: Llama, n_calls: float) -> Iterator[Counter[str]]:
    """llama.cpp is told to abort when it has asked `n_calls` times; counts how often it asks."""
    calls = Counter[str]()

    def abort(_: object) -> bool:
        calls["all"] += 1
        return calls["all"] > n_calls

    callback = llama_cpp.ggml_abort_callback(abort)
    llama_cpp.llama_set_abort_callback(llm.ctx, callback, None)
    try:
        yield calls
    finally:
        llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)


@pytest.mark.parametrize("kv", [NARROW, "q8_0", "f16"])
@pytest.mark.parametrize("n_ubatch", [32, 256])
def test_an_abort_leaves_the_micro_batches_before_it(kv: str, n_ubatch: int) -> None:
    with open_llama(kv, n_batch=256, n_ubatch=n_ubatch) as llm:
        llm.eval(TOKENS[:60])
        with aborting(llm, np.inf) as calls:
            llm.eval(TOKENS[60:240])
        llm.eval(TOKENS[240:250])
        expected = last_logits(llm)
        llm.reset()
        llm.eval(TOKENS[:60])
        for share in (0.0, 0.2, 0.3, 0.4):
            n = llm.n_tokens
            with aborting(llm, share * calls["all"]), pytest.raises(RuntimeError, match="returned 2"):
                llm.eval(TOKENS[n:240])
            assert llm.n_tokens == llm.kv.exact_tokens < 240
            assert (llm.n_tokens - 60) % n_ubatch == 0
            assert llm.kv.positions(0) == (0, llm.n_tokens - 1)
        llm.eval(TOKENS[llm.n_tokens : 240])
        llm.eval(TOKENS[240:250])
        assert llm.kv.exact_tokens == 250
        assert llm.input_ids[:250].tolist() == TOKENS[:250]
        assert np.array_equal(last_logits(llm), expected)


@pytest.mark.parametrize("kv", [NARROW, "q8_0", "f16"])
@pytest.mark.parametrize("n_ubatch", [16, 64])
def test_an_abort_between_other_rows_leaves_them(kv: str, n_ubatch: int) -> None:
    gap = np.arange(40, 90)
    with open_llama(kv, n_batch=64, n_ubatch=n_ubatch) as llm:
        llm.eval(TOKENS[:200])
        llm.kv.remove(0, 40, 90)
        before = [llm.kv.layer(il).v(0, p0, p1) for il in (0, 5) for p0, p1 in ((0, 40), (90, 200))]
        for n_calls in (0, 20, 40):
            with aborting(llm, n_calls), pytest.raises(KeyboardInterrupt, match="broken off"):
                llm.kv.fill(np.array(TOKENS)[gap], gap)
            after = [llm.kv.layer(il).v(0, p0, p1) for il in (0, 5) for p0, p1 in ((0, 40), (90, 200))]
            assert all(map(np.array_equal, before, after))
        llm.kv.fill(np.array(TOKENS)[gap], gap)
        assert llm.kv.positions(0) == (0, 199)


@pytest.mark.parametrize("kv", [NARROW, "q8_0"])
def test_ctrl_c_around_a_decode(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python sees the signal before llama_decode or after it: what is computed counts, and nothing else."""
    with open_llama(kv) as llm:
        llm.eval(TOKENS[:250])
        expected = last_logits(llm)
        llm.reset()
        llm.eval(TOKENS[:100])
        with monkeypatch.context() as patch:
            patch.setattr(llm._ctx, "decode", lambda batch: _interrupt())
            with pytest.raises(KeyboardInterrupt):
                llm.eval(TOKENS[100:250])
        assert (llm.n_tokens, llm.kv.exact_tokens, llm.kv.positions(0)) == (100, 100, (0, 99))
        decode = llm._ctx.decode
        with monkeypatch.context() as patch:
            patch.setattr(llm._ctx, "decode", lambda batch: (decode(batch), _interrupt()))
            with pytest.raises(KeyboardInterrupt):
                llm.eval(TOKENS[100:249])
        assert (llm.n_tokens, llm.kv.exact_tokens, llm.kv.positions(0)) == (249, 249, (0, 248))
        assert llm.input_ids[:249].tolist() == TOKENS[:249]
        llm.eval(TOKENS[249:250])
        assert np.abs(last_logits(llm) - expected).max() < 0.1 * np.abs(expected).max()
        assert llm.kv.exact_tokens == 250


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_what_is_filled_in_and_dropped_moves_the_window() -> None:
    """Its tokens took the F16 rows of others, which are not there for what comes next."""
    with open_llama(NARROW) as llm:
        llm.eval(TOKENS[:100])
        llm.kv.fill(TOKENS[100:200], np.arange(100, 200))
        assert llm.kv.exact_tokens == 100
        llm.eval(TOKENS[200:210])  # at 100, where the Llama stands
        assert (llm.n_tokens, llm.kv.exact_tokens) == (110, 100)


@pytest.mark.parametrize("kv", ["mixed", "mixed:cold=q8_0,threshold=0,group=1,sinks=0"])
@pytest.mark.parametrize("n_ubatch", [16, 64, 256])
def test_evaluation_ends_with_a_layer_in_every_micro_batch(kv: str, n_ubatch: int) -> None:
    with open_llama(kv, n_batch=256, n_ubatch=n_ubatch) as llm:
        llm.eval(TOKENS[:150])
        expected = llm.kv.layer(1).v(0, 0, 150)
        llm.reset()
        llm.kv.clear()
        llm.kv.fill(TOKENS[:150], np.arange(150), last_layer=1)
        assert np.array_equal(llm.kv.layer(1).v(0, 0, 150), expected)
        assert not llm.kv.layer(2).v(0, 0, 150).any()
        with pytest.raises(ValueError, match="last_layer=99"):
            llm.kv.fill(TOKENS[:2], [300, 301], last_layer=99)


class _Watched(Llama):
    """A `Llama` whose context has a callback of its caller for the nodes of its graphs."""

    @property
    def context_params(self) -> llama_cpp.llama_context_params:
        return super().context_params

    @context_params.setter
    def context_params(self, params: llama_cpp.llama_context_params) -> None:
        Llama.context_params.fset(self, params)  # type: ignore[attr-defined]
        params.cb_eval = self.callback

    callback: Any


@pytest.mark.parametrize("options", [{}, {"stream_layers": 4}])
def test_the_callers_own_callback_is_called_beside_others(options: dict[str, Any]) -> None:
    seen: list[bytes] = []

    def on_node(node: int, ask: bool, _: object) -> bool:
        name: bytes = ggml_get_name(node)
        if not ask:
            seen.append(name)
        return name.startswith(b"l_out")

    _Watched.callback = llama_cpp.ggml_backend_sched_eval_callback(on_node)
    with _Watched(model_path(), kv=NARROW, n_ctx=512, n_threads=1, verbose=False, **options) as llm:
        llm.eval(TOKENS[:100])
        assert seen == [b"l_out-%d" % il for il in range(6)]
        llm.kv.fill(TOKENS[100:120], np.arange(100, 120), last_layer=1)
        assert seen[6:] == [b"l_out-0"]
        llm.eval(TOKENS[100:120])
        assert seen[7:] == seen[:6]


def test_products_of_the_same_columns_follow_each_other_and_give_the_bits_that_each_has_alone() -> None:
    logits = []
    for alone in (False, True):
        asked: list[bytes] = []

        def on_node(node: int, ask: bool, _: object, names: list[bytes] = asked, alone: bool = alone) -> bool:
            if ask:
                names.append(ggml_get_name(node))
            return alone  # the graph is cut behind each node then

        _Watched.callback = llama_cpp.ggml_backend_sched_eval_callback(on_node)
        with _Watched(model_path(), kv=NARROW, n_ctx=512, n_threads=2, verbose=False) as llm:
            llm.eval(TOKENS[:100])
            llm.eval(TOKENS[100:101])
            logits.append(last_logits(llm))
        first = asked.index(b"Qcur-2")
        assert set(asked[first : first + 3]) == {b"Qcur-2", b"Kcur-2", b"Vcur-2"}
    assert np.array_equal(*logits)
