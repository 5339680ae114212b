"""`v_skip`: values that get hardly any attention are not read while decoding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from mixedkv import Llama, MixedKVConfig, _core
from mixedkv.bundled import model_path
from mixedkv.config import parse_kv
from mixedkv_bench.harness.sample_text import document
from support.tools.skipping_run import measure

N_PAST, N_NEW = 1500, 12
scalar_skips_nothing = pytest.mark.skipif(
    _core.version()["isa"] == "scalar", reason="the scalar body leaves nothing out"
)


def decode(kv: str, n_threads: int = 1) -> tuple[npt.NDArray[np.float64], float]:
    """Log-probabilities of tokens that come one by one after a journal, and the share of V left out."""
    llm = Llama(str(model_path()), kv=kv, n_ctx=2048, n_threads=n_threads, verbose=False)
    text = document(7, N_PAST + N_NEW, lambda text: len(llm.tokenize(text.encode(), special=True)))
    tokens = llm.tokenize(text.encode(), special=True)[: N_PAST + N_NEW]
    llm.eval(tokens[:N_PAST])
    rows = []
    for token in tokens[N_PAST:]:
        llm.eval([token])
        logits = np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float64)
        rows.append(logits - np.logaddexp.reduce(logits))
    skipped = llm.kv.stats().v_skipped
    llm.close()
    return np.array(rows), skipped


@scalar_skips_nothing
def test_little_changes() -> None:
    exact, none = decode("mixed")
    assert none == 0
    found, skipped = decode("mixed:v_skip=1e-4")
    assert 0.05 < skipped < 0.95
    assert (np.exp(exact) * (exact - found)).sum(axis=1).mean() < 1e-4
    again, _ = decode("mixed:v_skip=1e-4", n_threads=2)
    np.testing.assert_array_equal(found, again)


@scalar_skips_nothing
def test_the_measurement() -> None:
    head, _, exact, little, much = (
        line.strip("| ").split(" | ")
        for line in measure(model_path(), "mixed", ["1e-6", "0.1"], 1100, 3, texts=1)
    )
    assert head[:3] == ["EPS", "V left out", "KLD of a step"]
    assert exact[:6] == ["0", "0%", "0.0e+00", "0.0e+00", "0.0e+00", "100.0%"]
    assert (little[0], much[0]) == ("1e-6", "0.1")
    assert 10 < float(little[1].rstrip("%")) < float(much[1].rstrip("%")) < 100
    assert float(little[2]) < 1e-5
    assert float(little[2]) < float(much[2]) < 1e-2


def test_the_setting() -> None:
    assert parse_kv("mixed:v_skip=1e-6") == MixedKVConfig(v_skip=1e-6)
    assert str(parse_kv("mixed:v_skip=1e-6")) == "mixed:v_skip=1e-06"
    assert str(MixedKVConfig(v_skip=0)) == "mixed"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mixed:v_skip=1", "v_skip=1.0: use a number from 0 to below 1"),
        ("mixed:v_skip=-1e-9", "v_skip=-1e-09: use a number"),
        ("mixed:v_skip=nan", "v_skip=nan: use a number"),
        ("mixed:v_skip=few", "v_skip=few is not a number"),
    ],
)
def test_no_share(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv(spec)
    with pytest.raises(TypeError, match="use a number"):
        MixedKVConfig(v_skip="little")  # type: ignore[arg-type]
