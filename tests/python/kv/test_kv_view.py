"""`llm.kv`: what the cache holds, what attention reads, and the window's settings while it lives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama, MixedKVConfig, UniformKV
from mixedkv.bundled import model_path
from support.models import zoo

pytestmark = pytest.mark.core

N_PROMPT = 200
TOKENS = [3 + i * 7 % 250 for i in range(N_PROMPT)]
CONFIG = MixedKVConfig(quantization_threshold=64, group_size=16, sink_tokens=4, cold_type_k="q8_0")


def open_bundled(kv: object, **options: int) -> Llama:
    return Llama(model_path(), kv=kv, n_ctx=512, verbose=False, **options)  # type: ignore[arg-type]


@pytest.fixture
def llm() -> Iterator[Llama]:
    with open_bundled(CONFIG) as llm:
        llm.eval(TOKENS)
        yield llm


def hot_begin(n_tokens: int, threshold: int, group: int) -> int:
    """Where the window begins for the next query: groups have left until no more than T tokens are in it."""
    n = n_tokens + 1
    return max(0, math.ceil((n - threshold) / group)) * group


def test_stats_count_the_tokens_of_each_tier(llm: Llama) -> None:
    stats = llm.kv.stats()
    (seq,) = stats.sequences
    begin = hot_begin(N_PROMPT, 64, 16)
    assert (seq.pos_min, seq.pos_max, seq.hot_begin) == (0, N_PROMPT - 1, begin)
    assert (seq.n_hot, seq.n_cold) == (4 + N_PROMPT - begin, begin - 4)
    assert stats.tokens == N_PROMPT
    assert (stats.n_ctx, stats.n_layer, stats.mixed) == (512, 6, True)
    assert (stats.quantization_threshold, stats.group_size, stats.sink_tokens) == (64, 16, 4)
    assert stats.threshold_capacity == 64
    assert stats.layers is None


def test_stats_bytes(llm: Llama) -> None:
    stats = llm.kv.stats(by_layer=True)
    n_elements = 512 * 6 * 2 * (64 + 64)
    assert stats.n_elements == n_elements
    assert stats.bytes_f16 == 2 * n_elements
    assert stats.bytes_total == pytest.approx(stats.bytes_hot + stats.bytes_cold, rel=0.01)
    assert stats.bytes_cold * 8 / n_elements == (8.5 + 4.5) / 2
    assert stats.bits_per_element == pytest.approx((8.5 + 4.5) / 2 + 16 * (64 + 16 + 4) / 512, rel=0.05)
    assert stats.saving == pytest.approx(1 - stats.bits_per_element / 16)
    assert stats.layers is not None
    assert [layer.il for layer in stats.layers] == list(range(6))
    assert sum(layer.bytes_hot for layer in stats.layers) == stats.bytes_hot
    assert {(layer.type_k, layer.type_v, layer.mixed) for layer in stats.layers} == {("q8_0", "q4_0", True)}


def test_stats_are_a_snapshot(llm: Llama) -> None:
    stats = llm.kv.stats()
    llm.reset()
    llm.eval(TOKENS[:10])
    assert (stats.tokens, llm.kv.stats().tokens) == (N_PROMPT, 10)
    with pytest.raises(FrozenInstanceError):
        stats.bytes_hot = 0  # type: ignore[misc]


def test_stats_to_read(llm: Llama) -> None:
    text = str(llm.kv.stats(by_layer=True))
    assert "mixed:cold_k=q8_0, 6 layers" in text
    assert f"{N_PROMPT} = {llm.kv.stats().tokens_hot} hot" in text
    assert "layer 5" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_stats_of_a_uniform_cache(kv: str) -> None:
    with open_bundled(kv) as llm:
        llm.eval(TOKENS)
        stats = llm.kv.stats()
        assert (stats.mixed, stats.kv, stats.tokens, stats.tokens_hot) == (False, kv, N_PROMPT, 0)
        assert stats.bits_per_element == pytest.approx({"f16": 16, "q8_0": 8.5}[kv], rel=0.01)
        assert llm.kv.config == UniformKV(type_k=kv, type_v=kv)
        assert llm.kv.layer(2).v().shape == (N_PROMPT, 2, 64)
        assert max(map(len, str(stats).splitlines())) <= 80


def test_several_sequences() -> None:
    with open_bundled("mixed", n_seq_max=2) as llm:
        llm.eval(TOKENS[:40])
        stats = llm.kv.stats()
        assert (stats.n_seq_max, stats.n_ctx) == (2, 256)
        assert [(seq.seq_id, seq.pos_max) for seq in stats.sequences] == [(0, 39), (1, -1)]
        assert llm.kv.layer(0).k(seq=1).shape == (0, 2, 64)
        with pytest.raises(LookupError, match="sequence 2 is out of range"):
            llm.kv.layer(0).k(seq=2)


# --- rows ---


def test_rows_of_an_empty_cache() -> None:
    with open_bundled(CONFIG) as llm:
        layer = llm.kv.layer(3)
        assert layer.k().shape == layer.v().shape == (0, 2, 64)
        assert layer.k().dtype == np.float32
        assert layer.positions().shape == layer.hot().shape == (0,)
        assert llm.kv.stats().tokens == 0


def test_rows_have_one_shape_and_order(llm: Llama) -> None:
    layer = llm.kv.layer(3)
    k, positions, hot = layer.k(), layer.positions(), layer.hot()
    assert (k.shape, k.dtype) == ((N_PROMPT, 2, 64), np.float32)
    assert positions.tolist() == list(range(N_PROMPT))
    begin = hot_begin(N_PROMPT, 64, 16)
    assert np.flatnonzero(~hot).tolist() == list(range(4, begin))
    assert np.array_equal(layer.k(p0=50, p1=120), k[50:120])
    assert layer.positions(p0=190).tolist() == list(range(190, N_PROMPT))


def test_rows_are_copies(llm: Llama) -> None:
    layer = llm.kv.layer(0)
    before = layer.k()
    layer.k()[:] = 0
    assert np.array_equal(layer.k(), before)


@pytest.mark.parametrize("which", ["k", "v"])
def test_rows_are_those_of_an_f16_cache_to_quantisation(llm: Llama, which: str) -> None:
    """The first layer's rows do not depend on attention: hot ones equal F16's, cold ones up to their type."""
    with open_bundled("f16") as reference:
        reference.eval(TOKENS)
        want = getattr(reference.kv.layer(0), which)()
    layer = llm.kv.layer(0)
    got, hot = getattr(layer, which)(basis="model"), layer.hot()
    error = np.abs(got - want).max(axis=(1, 2)) / np.abs(want).max(axis=(1, 2))
    assert error[hot].max() < 2e-3
    step = {"k": 1 / 127, "v": 1 / 8}[which]
    assert 1e-3 < error[~hot].max() < 4 * step


def test_the_rotation_changes_no_score(llm: Llama) -> None:
    layer = llm.kv.layer(1)
    stored, turned = layer.k(), layer.k(basis="model")
    assert not np.allclose(stored, turned, atol=0.1)
    scores = np.einsum("nhd,mhd->hnm", stored, stored)
    assert np.einsum("nhd,mhd->hnm", turned, turned) == pytest.approx(scores, rel=1e-3, abs=1e-2)


def test_unknown_layer_and_basis(llm: Llama) -> None:
    with pytest.raises(IndexError, match="layer 6 has no KV cache; layers that have one: 0, 1, 2, 3, 4, 5"):
        llm.kv.layer(6)
    with pytest.raises(ValueError, match="basis='world' is unknown"):
        llm.kv.layer(0).k(basis="world")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gemma2", "lfm2"])
def test_models_with_layers_of_other_kinds(zoo_path: Callable[[str], Path], name: str) -> None:
    shape = zoo.SHAPES[name]
    with Llama(zoo_path(name), n_ctx=256, verbose=False) as llm:
        llm.eval(TOKENS[:60])
        layers = llm.kv.stats(by_layer=True).layers
        assert layers is not None
        assert {layer.il for layer in layers} == {*shape.kv_layers, *shape.swa_layers}
        for layer in layers:
            rows = llm.kv.layer(layer.il)
            assert rows.k().shape == (60, shape.n_head_kv, shape.head)
            assert layer.mixed
            assert rows.hot().any()


# --- settings ---


def test_a_misspelt_setting_is_refused(llm: Llama) -> None:
    with pytest.raises(
        AttributeError, match=r"no setting 'quantization_treshold' \(did you mean quantization_threshold\?\)"
    ):
        llm.kv.quantization_treshold = 3  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError, match="these can be set: quantization_threshold, group_size, sink_tokens"
    ):
        llm.kv.window = 3  # type: ignore[attr-defined]


def test_dir_lists_what_a_caller_needs(llm: Llama) -> None:
    names = dir(llm.kv)
    assert {"stats", "export", "load", "quantization_threshold"} <= set(names)
    assert len(names) <= 30
    assert all(hasattr(type(llm.kv), name) for name in names)


def test_a_smaller_window_takes_effect_at_once(llm: Llama) -> None:
    llm.kv.quantization_threshold = 32
    seq = llm.kv.stats().sequences[0]
    assert llm.kv.quantization_threshold == 32
    assert seq.hot_begin == hot_begin(N_PROMPT, 32, 16)
    assert llm.kv.layer(0).hot().sum() == seq.n_hot == 4 + N_PROMPT - seq.hot_begin


def test_a_larger_window_fills_from_new_tokens(llm: Llama) -> None:
    llm.kv.quantization_threshold = 16
    aged = ~llm.kv.layer(0).hot()
    llm.kv.quantization_threshold = 64
    llm.eval([5] * 20)
    hot = llm.kv.layer(0).hot()
    assert not (hot[:N_PROMPT] & aged).any()
    assert hot[N_PROMPT:].all()


def test_several_settings_at_once(llm: Llama) -> None:
    llm.kv.set_window(quantization_threshold=8, group_size=4, sink_tokens=2)
    assert llm.kv.config == MixedKVConfig(
        quantization_threshold=8, group_size=4, sink_tokens=2, cold_type_k="q8_0"
    )
    llm.kv.group_size = 8
    llm.kv.sink_tokens = 0
    assert str(llm.kv.config) == "mixed:cold_k=q8_0,threshold=8,group=8,sinks=0"
    llm.eval(TOKENS[:30])
    assert llm.kv.layer(0).hot().sum() == N_PROMPT + 30 - hot_begin(N_PROMPT + 30, 8, 8)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quantization_threshold", 8, "quantization_threshold=8 is smaller than group_size=16"),
        ("quantization_threshold", -1, "quantization_threshold=-1"),
        ("group_size", 65, "smaller than group_size=65"),
        ("group_size", 0, "group_size=0"),
        ("sink_tokens", -1, "sink_tokens=-1"),
    ],
)
def test_settings_that_are_refused(llm: Llama, field: str, value: int, message: str) -> None:
    before = llm.kv.config
    with pytest.raises(ValueError, match=message):
        setattr(llm.kv, field, value)
    with pytest.raises(TypeError, match=f"{field}='8'"):
        setattr(llm.kv, field, "8")
    assert llm.kv.config == before


@pytest.mark.parametrize("field", ["quantization_threshold", "group_size", "sink_tokens"])
def test_a_uniform_cache_has_no_window(field: str) -> None:
    with open_bundled("f16") as llm, pytest.raises(ValueError, match="kv='f16' is a uniform cache"):
        setattr(llm.kv, field, 8)
