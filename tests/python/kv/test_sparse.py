"""`sparse`: decoding reads the pages of older keys that weigh much, and a sample of the others."""

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
from support.cache.divergence import divergence
from support.models.planted import plant

pytestmark = pytest.mark.full

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
    n_pages, n_wrong = _core.check_pages(llm.kv._context.address)
    assert n_wrong == 0
    assert (n_pages > 0) == some


def test_decoding() -> None:
    dense, all_pages = decode("mixed")
    assert all_pages == 1
    same, _ = decode("mixed:sparse=eps:0.000001")  # leaves out what weighs next to nothing
    assert divergence(dense, same)[0] < 1e-4
    found, share = decode("mixed:sparse=eps:0.2")
    assert 0.01 < share < 0.5
    assert not np.array_equal(found, dense)
    assert divergence(dense, found)[0] < 0.5
    again, _ = decode("mixed:sparse=eps:0.2", n_threads=3)
    np.testing.assert_array_equal(found, again)


def test_biases_that_k_lacks(tmp_path: Path) -> None:
    path = plant(model_path(), tmp_path / "planted.gguf", seed=2, bias=60)
    dense, _ = decode("mixed", path=path)
    found, share = decode("mixed:sparse=eps:0.1", path=path)
    assert share < 0.9
    assert divergence(dense, found)[0] < 0.3


@pytest.mark.parametrize("n_rounds", [2, pytest.param(125, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unified", [False, True])
def test_pages_follow_their_rows(unified: bool, n_rounds: int) -> None:
    """Whatever is done to sequences, what is kept of a page is what its rows give."""
    random = Random(5)
    llm = make("mixed:sparse=eps:0.2,threshold=16,group=8", n_ctx=1536, n_seq_max=2, kv_unified=unified)
    tokens = tokens_of(llm, 600)
    llm.eval(tokens[:300])
    llm.eval(tokens[300:301])
    assert_pages_hold(llm)
    kinds = ["rollback", "cut", "state", "block", "copy", "rollback", "back", "remove"] * n_rounds
    if n_rounds > 2:
        random.shuffle(kinds)
    done = []
    for kind in kinds:
        n = llm.n_tokens
        if n > 600:  # each has room for 768
            llm.kv.remove(1)
            llm.kv.remove(0, 300)
            n = 300
        if kind == "rollback":
            llm.kv.remove(0, n - random.randrange(1, 60))
        elif kind == "cut":
            by = random.randrange(1, 30)
            llm.kv.remove(1)  # cells that both see would move for both
            llm.kv.remove(0, 100, 100 + by)
            llm.kv.shift(0, 100 + by, -1, -by)
        elif kind == "state":
            llm.load_state(llm.save_state())
        elif kind == "block":
            block = llm.kv.export(0, 0, n)
            llm.kv.remove(0)
            llm.kv.load(block, 0)
        elif kind == "copy":
            llm.kv.remove(1)
            llm.kv.copy(0, 1)
        elif kind == "back" and llm.kv.positions(1)[1] > 200:
            llm.kv.remove(0)
            llm.kv.copy(1, 0)
        else:
            llm.kv.remove(1)
        llm.n_tokens = llm.kv.positions(0)[1] + 1
        done.append(kind)
        llm.eval(random.choices(tokens, k=random.randrange(1, 40)))
        llm.eval([random.choice(tokens)])
        assert _core.check_pages(llm.kv._context.address)[1] == 0, done[-12:]
    assert_pages_hold(llm)
    llm.close()


def test_the_setting() -> None:
    assert parse_kv("mixed:sparse=eps:0.1") == MixedKVConfig(sparse="eps:0.1")
    assert str(parse_kv("mixed:sinks=8,sparse=EPS:0.10/0.05")) == "mixed:sinks=8,sparse=eps:0.1"
    assert str(parse_kv("mixed:sparse=eps:0.1/.01")) == "mixed:sparse=eps:0.1/0.01"
    assert str(MixedKVConfig(sparse="")) == "mixed"
    assert parse_kv("mixed:sparse=eps:0.5,layers=0-1:q8_0").sparse == "eps:0.5"


NO_ERRORS = """eps:0 eps:1e-50 eps:1.5 eps:nan eps: eps 0.9 top_p:0.9 eps:.1/0 eps:.1/1e-17 eps:.9/.9
eps:.1/.9999999999999999 eps:.1/.1/.1"""


@pytest.mark.parametrize("value", NO_ERRORS.split())
def test_no_error(value: str) -> None:
    with pytest.raises(ValueError, match=r"sparse=.*use eps:E or eps:E/D"):
        parse_kv(f"mixed:sparse={value}")


def test_where_it_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"sparse=eps:0\.1 needs the fused attention"):
        parse_kv("mixed:sparse=eps:0.1,attention=merged")
    with pytest.raises(TypeError, match=r"sparse=0\.9: use text"):
        MixedKVConfig(sparse=0.9)  # type: ignore[arg-type]
