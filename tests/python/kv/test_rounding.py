"""Q and attention weights in 8 bits, where older rows are integers and the processor has AVX-512 VNNI."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import mixedkv
from mixedkv import Llama, _core
from mixedkv.bundled import model_path
from support.cache.divergence import divergence
from support.cache.hidden import hidden

pytestmark = pytest.mark.full

TEXT = "\n".join(path.read_text() for path in sorted(Path(mixedkv.__file__).parent.glob("*.py")))[:6000]


def all_logits(kv: str, rounding: str = "") -> np.ndarray:
    """Logits [n_tokens, n_vocab] of TEXT."""
    steps = 450
    with (
        hidden(rounding=rounding),
        Llama(
            str(model_path()), kv=kv, n_ctx=2048, n_ubatch=512, n_threads=2, logits_all=True, verbose=False
        ) as llm,
    ):
        tokens = llm.tokenize(TEXT.encode())[:900]
        rows = []
        for first in range(0, len(tokens), steps):
            part = tokens[first : first + steps]
            llm.eval(part)
            rows += [llama_cpp.llama_get_logits_ith(llm.ctx, i)[: llm.n_vocab()] for i in range(len(part))]
        return np.array(rows, dtype=np.float64)


def kld(want: np.ndarray, got: np.ndarray) -> float:
    """Mean KL divergence of logits in nats."""
    return divergence(*(x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (want, got)))[0]


@pytest.mark.parametrize("cold", ["q4_0", "q5_0", "q8_0", "lm4", "tc3"])
@pytest.mark.nightly
def test_answers_stay_close(cold: str) -> None:
    f32 = all_logits("f32")
    sixteen, eight = (all_logits(f"mixed:cold={cold}", rounding) for rounding in ("16", "8"))
    if _core.version()["isa"] not in ("avx512", "amx"):
        assert np.array_equal(sixteen, eight)
        return
    assert not np.array_equal(sixteen, eight)
    # little beside what rows of 4 bits cost, and hardly more than those of 8 do
    # (1.27 times on AMX, whose 16 bits are finer)
    assert kld(f32, eight) < 1.4 * kld(f32, sixteen) + 2e-5


@pytest.mark.parametrize(
    ("rows", "bits"),
    [
        ("cold=q4_0", "8"),
        ("cold=lm4", "8"),
        ("cold_v=q8_0", "16"),
        ("cold_k=q5_0", "8"),
        ("cold=q5_0", "8"),
        ("cold_k=q5_0,cold_v=tc3", "8"),
        ("cold_k=q8_0,cold_v=q5_0", "16"),
        ("cold=q8_0", "16"),
    ],
)
def test_rows_of_four_and_five_bits_have_eight_by_default(rows: str, bits: str) -> None:
    assert np.array_equal(all_logits(f"mixed:{rows}"), all_logits(f"mixed:{rows}", bits))


def test_another_number_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="MIXEDKV_ROUNDING=12: use 8, 16 or nothing"):
        all_logits("mixed", "12")
