"""`sparse`: decoding reads the pages of older keys that hold the attention."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mixedkv import Llama, MixedKVConfig, _core
from mixedkv.bundled import model_path
from mixedkv.config import parse_kv
from mixedkv_bench.harness.sample_text import document
from support.planted import plant

N_PAST, N_NEW = 1700, 10


def make(
    kv: str, path: str | Path | None = None, n_threads: int = 1, n_ctx: int = 2048, **more: Any
) -> Llama:
    return Llama(str(path or model_path()), kv=kv, n_ctx=n_ctx, n_threads=n_threads, verbose=False, **more)


def tokens_of(llm: Llama, n: int) -> list[int]:
    text = document(7, n, lambda text: len(llm.tokenize(text.encode(), special=True)))
    return llm.tokenize(text.encode(), special=True)[:n]


def log_probs(llm: Llama) -> npt.NDArray[np.float64]:
    logits = np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float64)
    return logits - np.logaddexp.reduce(logits)


def decode(kv: str, n_threads: int = 1, path: Path | None = None) -> tuple[npt.NDArray[np.float64], float]:
    """Log-probabilities of tokens that come one by one after a journal, and the share of pages read."""
    llm = make(kv, path, n_threads)
    tokens = tokens_of(llm, N_PAST + N_NEW)
    llm.eval(tokens[:N_PAST])
    rows = []
    for token in tokens[N_PAST:]:
        llm.eval([token])
        rows.append(log_probs(llm))
    assert_pages_hold(llm, "sparse" in kv)
    share = llm.kv.stats().pages_read
    llm.close()
    return np.array(rows), share


def assert_pages_hold(llm: Llama, some: bool = True) -> None:
    n_pages, n_wrong = _core.check_pages(llm.kv._address)
    assert n_wrong == 0
    assert (n_pages > 0) == some


def test_decoding() -> None:
    dense, all_pages = decode("mixed")
    assert all_pages == 1
    same, all_pages = decode("mixed:sparse=top_p:1.0")
    assert all_pages == 1
    np.testing.assert_array_equal(dense, same)
    found, share = decode("mixed:sparse=top_p:0.9")
    assert 0.01 < share < 0.95
    assert not np.array_equal(found, dense)
    assert (np.exp(dense) * (dense - found)).sum(axis=1).mean() < 0.5
    again, _ = decode("mixed:sparse=top_p:0.9", n_threads=3)
    np.testing.assert_array_equal(found, again)


def test_biases_that_k_lacks(tmp_path: Path) -> None:
    path = plant(model_path(), tmp_path / "planted.gguf", seed=2, bias=60)
    dense, _ = decode("mixed", path=path)
    found, share = decode("mixed:sparse=top_p:0.99", path=path)
    assert share < 0.98
    assert (np.exp(dense) * (dense - found)).sum(axis=1).mean() < 0.3


@pytest.mark.parametrize("unified", [False, True])
def test_pages_follow_their_rows(unified: bool) -> None:
    """Whatever is done to sequences, what is kept of a page is what its rows give."""
    random = Random(5)
    llm = make("mixed:sparse=top_p:0.9,threshold=16,group=8", n_ctx=1536, n_seq_max=2, kv_unified=unified)
    tokens = tokens_of(llm, 600)
    llm.eval(tokens[:300])
    llm.eval(tokens[300:301])
    assert_pages_hold(llm)
    done = []
    for kind in ["rollback", "cut", "state", "block", "copy", "rollback", "back", "remove"] * 2:
        n = llm.n_tokens
        if kind == "rollback":
            llm.kv.remove(0, n - random.randrange(1, 60))
        elif kind == "cut":
            by = random.randrange(1, 30)
            llm.kv.remove(0, 100, 100 + by)
            llm.kv.shift(0, 100 + by, -1, -by)
        elif kind == "state":
            llm.load_state(llm.save_state())
        elif kind == "block":
            block = llm.kv.export(0, 0, n)
            llm.kv.remove(0)
            llm.kv.load(block, 0)
        elif kind == "copy":
            llm.kv.copy(0, 1)
        elif kind == "back":
            llm.kv.remove(0)
            llm.kv.copy(1, 0)
        else:
            llm.kv.remove(1)
        llm.n_tokens = llm.kv.positions(0)[1] + 1
        done.append(kind)
        llm.eval(random.choices(tokens, k=random.randrange(1, 40)))
        llm.eval([random.choice(tokens)])
        assert _core.check_pages(llm.kv._address)[1] == 0, done
    assert_pages_hold(llm)
    llm.close()


def test_the_setting() -> None:
    assert parse_kv("mixed:sparse=top_p:0.99") == MixedKVConfig(sparse="top_p:0.99")
    assert str(parse_kv("mixed:v_skip=1e-6,sparse=TOP_P:0.990")) == "mixed:v_skip=1e-06,sparse=top_p:0.99"
    assert str(MixedKVConfig(sparse="")) == "mixed"
    assert parse_kv("mixed:sparse=top_p:0.5,layers=0-1:q8_0").sparse == "top_p:0.5"


@pytest.mark.parametrize("value", ["top_p:0", "top_p:1.5", "top_p:nan", "top_p:", "top_p", "0.9", "top_k:9"])
def test_no_share(value: str) -> None:
    with pytest.raises(ValueError, match=r"sparse=.*use top_p:SHARE"):
        parse_kv(f"mixed:sparse={value}")


def test_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"sparse=top_p:0\.9 needs the fused attention"):
        parse_kv("mixed:sparse=top_p:0.9,attention=merged")
    with pytest.raises(TypeError, match=r"sparse=0\.9: use text"):
        MixedKVConfig(sparse=0.9)  # type: ignore[arg-type]
