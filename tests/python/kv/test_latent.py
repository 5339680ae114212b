"""Latent attention (MLA): one row for keys and values. The invariants are tested as other models' are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.config import parse_kv
from mixedkv.engine import PromptCache
from mixedkv.errors import UnsupportedModelError
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.store import KVStore
from support.cache.harness import Ctx, Mixed, Model, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = [pytest.mark.full, pytest.mark.merged_nightly]

CLOSED = Mixed(k="q8_0", v="q8_0", threshold=0, group=1)


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some elements of the latent vector are sixteen times as large, and what reads them makes up for it."""
    g = zoo.make("deepseek2")
    for il in range(g.shape.n_layer):
        b = f"blk.{il}."
        factors = np.ones(len(g.tensors[b + "attn_kv_a_norm.weight"]), np.float32)
        factors[[7, 41, 100]] = 16
        g.tensors[b + "attn_kv_a_norm.weight"] *= factors
        g.tensors[b + "attn_k_b.weight"] /= factors[:, None]
        g.tensors[b + "attn_v_b.weight"] /= factors
    path = tmp_path_factory.mktemp("latent") / "outliers.gguf"
    g.write(path)
    return path


def test_rotation_spreads_large_elements(outliers: Path, attention: str) -> None:
    """llama.cpp leaves these rows as they are."""
    model = Model(outliers)

    def logits(kv: Uniform | Mixed) -> np.ndarray:
        with Ctx(model, kv) as ctx:
            return ctx.decode(prompt(300))

    f16 = logits(Uniform())
    uniform = rel_rms(logits(Uniform(k="q8_0", v="q8_0")), f16)
    assert rel_rms(logits(CLOSED.with_(attention=attention)), f16) < uniform / 2
    model.close()


def test_one_row_is_all_that_is_allocated(load: Callable[[str], Model], attention: str) -> None:
    with Ctx(load("deepseek2"), CLOSED.with_(threshold=64, group=16, attention=attention)) as ctx:
        ctx.decode(prompt(100))
        for layer in ctx.layers():
            assert (layer["n_embd_head_k"], layer["n_embd_head_v"]) == (192, 0)
            assert (layer["rotation_k"], layer["rotation_v"]) == (64, 0)
            assert layer["bytes_cold"] == layer["n_cells"] * 192 * 34 // 32
            assert layer["bytes_hot"] < 2 * 192 * (64 + 16 + 64)


@pytest.mark.parametrize("kv", ["f16", "q8_0", "mixed", "mixed:quality"])
def test_the_formula_is_what_is_allocated(zoo_path: Callable[[str], Path], kv: str) -> None:
    path = zoo_path("deepseek2")
    said = footprint(model_shape(read_model_file(path)), parse_kv(kv), 2048)
    with Llama(path, kv=kv, n_ctx=2048, verbose=False) as llm:
        stats = llm.kv.stats()
    assert stats.n_elements == said.n_elements
    assert stats.bytes_total == pytest.approx(said.bytes, rel=0.05)


def test_values_cannot_be_compared(zoo_path: Callable[[str], Path]) -> None:
    with (
        Llama(zoo_path("deepseek2"), kv="mixed", n_ctx=512, verbose=False) as llm,
        KVStore(None) as store,
        pytest.raises(UnsupportedModelError, match="MLA"),
    ):
        PromptCache(llm, store, reuse="chunks", repair="cacheblend", max_kld=9.0)
