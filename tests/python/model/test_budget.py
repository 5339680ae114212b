"""A budget of bytes: what is chosen for it, and that what is allocated is what was said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv import Llama, MixedKVConfig, UniformKV
from mixedkv.bundled import model_path
from mixedkv.config import KVSetting, parse_kv
from mixedkv.config.mixed import ggml_type, type_bits
from mixedkv.model.footprint import LayerShape, ModelShape, Sliding, footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.layer_plan import FINEST, LADDER, MEASURED, LayerPlan
from mixedkv.model.resolve_budget import for_budget, resolve_budget, shorten
from mixedkv.sizes import format_bytes, parse_size

pytestmark = pytest.mark.core

N_CTX = 2048
MODELS = ("bundled", "qwen3", "lfm2")  # layers alike, a norm of K, layers without keys between others


def shape_of(path: Path) -> ModelShape:
    return model_shape(read_model_file(path))


def smallest(shape: ModelShape) -> int:
    """What the refusal of one byte names."""
    with pytest.raises(ValueError, match="raise the budget") as refused:
        for_budget(shape, N_CTX, 1)
    return parse_size(str(refused.value).split("takes ")[1].split(":")[0])


@pytest.mark.by_model
@pytest.mark.parametrize("name", MODELS)
def test_what_is_allocated_is_within_the_budget(zoo_path: Callable[[str], Path], name: str) -> None:
    path = model_path() if name == "bundled" else zoo_path(name)
    shape = shape_of(path)
    least, f16 = smallest(shape), footprint(shape, UniformKV(), N_CTX).bytes
    budgets = [round(least * (1.05 * f16 / least) ** (i / 19)) for i in range(20)]
    sizes = []
    for budget in budgets:
        kv = for_budget(path, N_CTX, budget)
        said = footprint(shape, kv, N_CTX).bytes
        with Llama(path, kv=f"mixed:budget={budget}", n_ctx=N_CTX, n_threads=1, verbose=False) as llm:
            assert llm.kv.config == kv
            assert llm.kv.config == parse_kv(str(kv))
            assert 0.95 * said <= llm.kv.stats().bytes_total <= said <= budget
        sizes.append(said)
    assert sizes == sorted(sizes)
    assert (sizes[0] <= least, sizes[-1]) == (True, f16)
    # a step of these small models is up to 4 bits of one of their few layers
    step = 4 / 8 * N_CTX * max(layer.n_embd_k for layer in shape.layers)
    assert all(budget - said <= step for said, budget in zip(sizes[:-1], budgets, strict=False))
    few = sizes[0] // 2
    with pytest.raises(ValueError, match=f"is too little, the smallest cache takes {format_bytes(least)}"):
        Llama(path, kv=f"mixed:budget={few}", n_ctx=N_CTX, verbose=False)


@pytest.mark.parametrize(("n_seq", "unified"), [(4, True), (4, False)], ids=["unified", "streams"])
def test_several_sequences(n_seq: int, unified: bool) -> None:
    for budget in (4 << 20, 6 << 20):
        kv = f"mixed:budget={budget}"
        options = {"n_ctx": 4096, "n_seq_max": n_seq, "kv_unified": unified, "verbose": False}
        with Llama(model_path(), kv=kv, **options) as llm:  # type: ignore[arg-type]
            assert 0.9 * budget <= llm.kv.stats().bytes_total <= budget
    with pytest.raises(ValueError, match=r"97\.7 KiB is too little, the smallest cache takes 2\.\d MiB"):
        Llama(model_path(), kv="mixed:budget=99999", **options)  # type: ignore[arg-type]


def test_many_sequences_have_shorter_windows() -> None:
    shape = shape_of(model_path())
    with pytest.raises(ValueError, match="raise the budget") as refused:
        for_budget(shape, 8192, 1, n_seq=20)
    least = parse_size(str(refused.value).split("takes ")[1].split(":")[0])
    expected = (1, 1.05, 1.15, 1.43)
    chosen = [for_budget(shape, 8192, round(least * x), n_seq=20) for x in expected]
    windows = [kv.window.threshold for kv in chosen]
    assert windows == sorted(windows)
    assert (windows[0], windows[-1]) == (0, 64)
    assert all(
        footprint(shape, kv, 8192, 20).bytes <= x * least for kv, x in zip(chosen, expected, strict=True)
    )


def layers_of(head: int, n: int) -> ModelShape:
    return ModelShape("llama", "", n, (4,) * n, 0, 0, tuple(LayerShape(il, 2, head, head) for il in range(n)))


def test_bits_go_to_keys_then_to_values_then_to_the_window() -> None:
    shape = layers_of(64, 4)
    element = 4 * 2 * 128 * 8192 // 8  # bytes of a bit of all elements

    def chosen(bits: float) -> KVSetting:
        return for_budget(shape, 8192, int(bits * element), sink_tokens=2)

    assert str(chosen(4.38)) == "mixed:cold_k=lm4,cold_v=tc3,sinks=2,layers=2-3:q5_0/tc3"
    assert str(chosen(5.5)) == "mixed:cold_k=q5_0,cold_v=lm4,sinks=2,layers=3:q8_0/lm4"
    assert chosen(6.68).types_of(0) == ("q8_0", "lm4")
    assert chosen(8.8).types_of(3) == (FINEST, FINEST)
    assert chosen(8.8).window.threshold < chosen(10).window.threshold < chosen(14).window.threshold
    assert chosen(16) == UniformKV()
    odd = for_budget(layers_of(96, 4), 8192, int(1.5 * 4.8 * element))
    assert odd.types_of(1) == ("q4_0", "q4_0"), "heads that lm4 does not divide"
    wide = for_budget(shape, 8192, int(4.2 * element), quantization_threshold=512)
    assert wide.window.threshold == 256  # 512 does not fit, half of it does


def test_shares_choose_the_layers() -> None:
    shape = layers_of(64, 3)
    shares = {(il, part): 1e-6 for il in range(3) for part in ("k", "v")} | {(2, "v"): 1e-3, (0, "k"): 1e-4}
    plan = LayerPlan(shape, shares)  # type: ignore[arg-type]
    assert (plan.bits(0), plan.bits(len(plan))) == (type_bits("tc3"), type_bits(FINEST))
    assert shorten(plan.types(plan.most(5.4))) == ("q8_0", "tc3", "1:lm4/tc3,2:lm4/q8_0")
    divergence = [plan.divergence(n) for n in range(len(plan) + 1)]
    assert divergence == sorted(divergence, reverse=True)
    budget = footprint(shape, parse_kv("mixed:cold=q5_0"), 4096).bytes
    kv = for_budget(shape, 4096, budget, shares=shares)  # type: ignore[arg-type]
    assert kv.types_of(2)[1] == "q8_0"
    with pytest.raises(ValueError, match="no share was measured for K of layer 2, V of layer 2"):
        LayerPlan(shape, {(il, part): 1.0 for il in range(2) for part in ("k", "v")})  # type: ignore[misc]


def test_the_errors_of_the_ladder() -> None:
    """Of K and V of the first layer, which depend on no other's rounding, beside the same rows in F16."""
    tokens = list(range(3, 403))
    rows = {}
    for kv in (
        "mixed:threshold=400,group=400",
        *(f"mixed:cold={name},threshold=0,sinks=0" for name in LADDER),
    ):
        with Llama(model_path(), kv=kv, n_ctx=1024, n_threads=1, verbose=False) as llm:
            llm.eval(tokens)
            rows[kv.removeprefix("mixed:cold=").partition(",")[0]] = np.stack(
                [llm.kv.layer(0).k(), llm.kv.layer(0).v()]
            )
    exact = next(iter(rows.values()))
    error = {name: ((rows[name] - exact) ** 2).mean(axis=(1, 2, 3)) for name in LADDER}
    for name, said in LADDER.items():
        assert error[name] / error[MEASURED] == pytest.approx(said, rel=0.1)


def test_a_budget_is_settled_before_it_is_used() -> None:
    kv = parse_kv("mixed:budget=1.5MiB,threshold=128")
    assert str(kv) == "mixed:threshold=128,budget=1536KiB"
    for use in (lambda: kv.types_of(0), kv.native):
        with pytest.raises(ValueError, match="depends on the model and its context"):
            use()
    assert resolve_budget(parse_kv("mixed"), shape_of(model_path()), 512) == MixedKVConfig()


def test_bits_go_to_the_keys_of_deep_layers_first() -> None:
    shape = layers_of(64, 4)
    kv = parse_kv("mixed:budget=3.5bit,threshold=128")
    assert str(kv) == "mixed:threshold=128,budget=3.5bit"
    with pytest.raises(ValueError, match=r"budget=3\.5bit: its value depends on the model"):
        kv.native()
    assert resolve_budget(kv, shape, 512) == parse_kv("mixed:cold=tc3,threshold=128,layers=2-3:lm4/tc3")
    assert resolve_budget(parse_kv("mixed:budget=3.25bit"), shape, 512) == parse_kv("mixed:cold=tc3")
    assert resolve_budget(parse_kv("mixed:budget=8.5bit"), shape, 512) == parse_kv("mixed:cold=q8_0")
    with pytest.raises(ValueError, match=r"budget=3bit: the coarsest types take 3\.25 bits in this model"):
        resolve_budget(parse_kv("mixed:budget=3bit"), shape, 512)


def sliding_of(n_ctx_train: int = 32_768) -> ModelShape:
    """Six layers with one KV head of 256, of which the third and the last read all tokens."""
    layers = tuple(LayerShape(il, 1, 256, 256, slides=il % 3 != 2) for il in range(6))
    return ModelShape("gemma3", "", 6, (4,) * 6, n_ctx_train, 512, layers)


def cold_bits(kv: KVSetting, shape: ModelShape, n_ctx: int, **options: Any) -> float:
    assert isinstance(kv, MixedKVConfig)
    without = replace(kv, quantization_threshold=0, sink_tokens=0)
    return footprint(shape, without, n_ctx, **options).bits_per_element


@pytest.mark.parametrize("n_ctx", [512, 2048, 8192, 32_768])
def test_bits_are_those_of_what_is_allocated(n_ctx: int) -> None:
    shape = sliding_of()
    for bits in (3.5, 4.5, 6.0):
        kv = resolve_budget(parse_kv(f"mixed:budget={bits}bit"), shape, n_ctx)
        assert bits - 0.5 < cold_bits(kv, shape, n_ctx) <= bits
        full = resolve_budget(parse_kv(f"mixed:budget={bits}bit"), shape, n_ctx, sliding=Sliding(full=True))
        assert bits - 0.5 < cold_bits(full, shape, n_ctx, sliding=Sliding(full=True)) <= bits


def test_rows_of_a_window_get_eight_bits_where_they_cost_little() -> None:
    shape = sliding_of()
    long = resolve_budget(parse_kv("mixed:budget=4.5bit"), shape, 32_768)
    assert [long.types_of(il)[0] for il in range(6)] == ["q8_0", "q8_0", "q5_0", "q8_0", "q8_0", "q5_0"]
    short = resolve_budget(parse_kv("mixed:budget=4bit"), shape, 512)  # a window has as many rows here
    assert short == parse_kv("mixed:cold_k=lm4,cold_v=tc3,layers=2:q5_0/tc3,5:q5_0/tc3")


def test_bits_of_a_llama() -> None:
    with Llama(model_path(), kv="mixed:budget=4bit", n_ctx=256, verbose=False) as llm:
        chosen = llm.kv.config
        assert isinstance(chosen, MixedKVConfig)
        types = [name for il in range(6) for name in chosen.types_of(il)]
        assert 3.8 < sum(map(type_bits, types)) / 12 <= 4
        llm.eval([1, 2, 3])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mixed:budget=fewbit", "budget=fewbit: use 1bit to 16bit, as 4.5bit"),
        ("mixed:budget=0.5bit", r"budget=0\.5bit: use 1bit"),
        ("mixed:budget=4bit,cold=q8_0", "budget=4bit chooses the cold types"),
        ("mixed:budget=much", "budget='much' is not a size: use e.g. 2GiB"),
        ("mixed:budget=2GiB,cold=q8_0", "chooses the cold types: leave cold and layers out"),
        ("mixed:balanced,budget=2GiB", "chooses the cold types"),
        ("mixed:layers=0:q8_0,budget=2GiB", "chooses the cold types"),
    ],
)
def test_budgets_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv(spec)


def test_a_gpu_has_the_types_that_it_writes() -> None:
    shape = layers_of(64, 12)
    held = footprint(shape, parse_kv("mixed:cold=q4_0"), 4096)
    assert held.view
    kv = parse_kv(f"mixed:budget={held.bytes + held.view}")
    assert str(resolve_budget(kv, shape, 4096, on_cpu=False)) == "mixed"
    assert "tc3" in str(resolve_budget(kv, shape, 4096, on_cpu=False, gpus_write_all=True))
    kv = parse_kv(f"mixed:budget={held.bytes}")
    assert "tc3" in str(resolve_budget(kv, shape, 4096))
    with pytest.raises(ValueError, match="the smallest cache takes"):  # there attention merges, with a view
        resolve_budget(kv, shape, 4096, on_cpu=False)


def test_rows_that_gpus_read_as_they_lie_need_no_view() -> None:
    shape = layers_of(64, 12)
    held = footprint(shape, parse_kv("mixed:cold=q8_0"), 4096, reads=lambda *layer: False)
    assert held.view
    asked: list[tuple[int, ...]] = []

    def reads(*layer: int) -> bool:
        asked.append(layer)
        return True

    kv = parse_kv(f"mixed:budget={held.bytes}")
    assert "q8_0" in str(resolve_budget(kv, shape, 4096, on_cpu=False, reads=reads))
    assert (ggml_type("q8_0"), ggml_type("q8_0"), 64, 64, 4, 2) in asked
    assert footprint(shape, parse_kv("mixed:attention=merged"), 4096, reads=reads).view
    assert footprint(shape, parse_kv("mixed"), 4096, reads=lambda *layer: False).view


def test_layers_that_gpus_cannot_read_as_they_lie_need_a_view(zoo_path: Callable[[str], Path]) -> None:
    """Keys with biases, and latent rows."""
    for name in ("qwen2vl", "deepseek2"):
        shape = shape_of(zoo_path(name))
        assert footprint(shape, parse_kv("mixed"), 4096, reads=lambda *layer: True).view
    shape = shape_of(zoo_path("llama-64"))
    assert not footprint(shape, parse_kv("mixed"), 4096, reads=lambda *layer: True).view


def test_latent_attention_has_one_type_for_both(zoo_path: Callable[[str], Path]) -> None:
    path = zoo_path("deepseek2")
    shape = shape_of(path)
    least, f16 = smallest(shape), footprint(shape, UniformKV(), N_CTX).bytes
    for budget in range(least, f16, (f16 - least) // 8):
        with Llama(path, kv=f"mixed:budget={budget}", n_ctx=N_CTX, n_threads=1, verbose=False) as llm:
            assert llm.kv.stats().bytes_total <= budget
            assert all(k == v for k, v in map(llm.kv.config.types_of, range(shape.n_layer)))
