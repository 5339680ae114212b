"""What works with `llama_cpp.Llama` and once did not with ours."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from mixedkv import Llama
from mixedkv.errors import ClosedError
from support.patience import PATIENCE

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 2, "verbose": False}
TOKENS = [3 + i * 7 % 90 for i in range(120)]


def greedy(llm: Llama, prompt: list[int], n: int = 8) -> list[int]:
    made = llm.generate(prompt, temp=0.0, repeat_penalty=1.0)
    return [next(made) for _ in range(n)]


def test_vectors_of_a_list_are_those_of_each_text(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("llama-64"), embedding=True, **OPTIONS) as llm:
        texts = ["ab", "abc", "bca"]
        together, n = llm.embed(texts, return_count=True)
        alone = [llm.embed(text, return_count=True) for text in texts]
    assert n == sum(count for _, count in alone)
    for vectors, (wanted, _) in zip(together, alone, strict=True):
        assert np.array_equal(vectors, wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_evaluates(zoo_path: Callable[[str], Path]) -> None:
    with Llama(zoo_path("llama-64"), **OPTIONS) as llm:
        wanted = greedy(llm, TOKENS[:20])
        llm.eval(TOKENS[:20])
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE))
            status = 1
            try:
                status = 0 if greedy(llm, TOKENS[:20]) == wanted else 2
                llm.close()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert greedy(llm, TOKENS[:20]) == wanted  # the parent's threads are still there


def test_the_last_reference_frees(zoo_path: Callable[[str], Path]) -> None:
    llm = Llama(zoo_path("llama-64"), **OPTIONS)
    llm.eval(TOKENS)
    kv, alive = llm.kv, weakref.ref(llm)
    del llm
    assert alive() is None
    with pytest.raises(ClosedError, match=r"are gone\. Keep the Llama itself \(llm = Llama\(\.\.\.\)\)"):
        kv.stats()


def test_ctrl_c_while_a_sampler_is_freed_ends_a_completion(zoo_path: Callable[[str], Path]) -> None:
    """In the `__del__` of the one before, Python would print it and go on."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with Llama(zoo_path("llama-64"), **OPTIONS) as llm:
        greedy(llm, TOKENS[:20])
        llm._sampler._exit_stack.callback(interrupt)
        with pytest.raises(KeyboardInterrupt):
            greedy(llm, TOKENS[:20])
        assert len(greedy(llm, TOKENS[:20])) == 8


def test_drafts_may_be_longer_than_a_micro_batch(zoo_path: Callable[[str], Path]) -> None:
    answers = []
    for n_ubatch in (64, 4):
        draft = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=10)
        options = {**OPTIONS, "n_batch": 64, "n_ubatch": n_ubatch}
        with Llama(zoo_path("llama-64"), kv="f16", draft_model=draft, logits_all=True, **options) as llm:
            answers.append(greedy(llm, TOKENS[:30] * 3, 24))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kv", ["f16", "q8_0", "mixed:threshold=16,group=8"])
def test_a_refused_state_leaves_nothing(kv: str, zoo_path: Callable[[str], Path]) -> None:
    path = zoo_path("llama-64")
    with Llama(path, kv=kv, **OPTIONS) as llm, Llama(path, kv="q4_0", **OPTIONS) as other:
        other.eval(TOKENS)
        state, wanted = other.save_state(), greedy(llm, TOKENS[:50])
        with pytest.raises(RuntimeError):
            llm.load_state(state)
        assert (llm.n_tokens, llm.kv.positions(0), llm.kv.used) == (0, (-1, -1), 0)
        assert greedy(llm, TOKENS[:50]) == wanted


@pytest.mark.parametrize("flash_attn", [False, True])
def test_a_damaged_state_spoils_no_later_prompt(flash_attn: bool, zoo_path: Callable[[str], Path]) -> None:
    options = {**OPTIONS, "flash_attn": flash_attn}
    with Llama(zoo_path("llama-64"), kv="f16", **options) as llm:
        wanted = greedy(llm, TOKENS[:50])
        llm.reset()
        llm.eval(TOKENS)
        state = llm.save_state()
        damaged = bytearray(state.llama_state)
        damaged[-4096:] = b"\xff" * 4096  # F16 NaN
        state.llama_state = bytes(damaged)
        with pytest.raises(RuntimeError, match="no numbers"):
            llm.load_state(state)
        assert llm.n_tokens == 0
        assert greedy(llm, TOKENS[:50]) == wanted
