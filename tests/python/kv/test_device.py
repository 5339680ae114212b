"""Layers on a device, such as a GPU or Mesa's lavapipe: docs/platforms.md says how a build gets one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.config.mixed import OWN_TYPES
from mixedkv.errors import UnsupportedModelError
from support.cache.harness import Ctx, InitError, Mixed, Model, prompt, rel_rms
from support.models import zoo

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not llama_cpp.llama_supports_gpu_offload(), reason="no device: this build has no GPU, or finds none"
    ),
]

ALL, OUTPUT_AND_ONE = 99, 2  # of two layers
KV = Mixed(threshold=40, group=8, sinks=4)
Open = Callable[..., Ctx]


def has_kernels() -> bool:
    """Tell whether the device is one whose kernels read both tiers: CUDA."""
    return b"CUDA" in llama_cpp.llama_print_system_info()


@pytest.fixture(scope="module")
def models(zoo_path: Callable[[str], Path]) -> Iterator[dict[int, Model]]:
    models = {n: Model(zoo_path("llama-64"), n_gpu_layers=n) for n in (0, OUTPUT_AND_ONE, ALL)}
    yield models
    for model in models.values():
        model.close()


@pytest.fixture
def open_on(models: dict[int, Model]) -> Iterator[Open]:
    """open_on(n_gpu_layers, kv, **options): a context that closes with the test."""
    with ExitStack() as stack:
        yield lambda n, kv=KV, **options: stack.enter_context(Ctx(models[n], kv, **options))


def evaluate(ctx: Ctx) -> np.ndarray:
    """Prefill in three micro-batches, then token by token."""
    return np.concatenate([ctx.decode(prompt(180)), *(ctx.decode([token]) for token in prompt(12, seed=2))])


# Measured with F16 shaders: 1.6e-3, 4.0e-3 and 1.6e-2. With F32 ones the first is 7e-5. Products in F16 move
# elements of the cold rows to the next step, which is the larger the coarser they are. Those of lm4 and
# tc3 are guessed: no GPU was at hand.
@pytest.mark.parametrize(
    ("cold", "tolerance"), [("f16", 4e-3), ("q8_0", 1e-2), ("q4_0", 4e-2), ("lm4", 4e-2), ("tc3", 8e-2)]
)
@pytest.mark.parametrize("n_gpu_layers", [OUTPUT_AND_ONE, ALL])
def test_logits_are_those_of_the_cpu(open_on: Open, cold: str, tolerance: float, n_gpu_layers: int) -> None:
    if cold in OWN_TYPES and not has_kernels():
        pytest.skip("CUDA alone writes them")
    kv = KV.with_(k=cold, v=cold)
    device = open_on(n_gpu_layers, kv)
    fused = [layer["fused"] for layer in device.layers()]
    assert fused == ([has_kernels()] * 2 if n_gpu_layers == ALL else [True, has_kernels()])
    assert rel_rms(evaluate(device), evaluate(open_on(0, kv))) < tolerance


@pytest.mark.skipif("not has_kernels()")
@pytest.mark.parametrize("cold", ["q4_0", "lm4", "tc3"])
def test_kernels_read_what_the_view_shows(open_on: Open, cold: str) -> None:
    kv = KV.with_(k=cold, v=cold)
    kernels, view = open_on(ALL, kv), open_on(ALL, kv.with_(attention="merged"))
    assert [layer["on_device"] for layer in kernels.layers()] == [True, True]
    assert [layer["fused"] for layer in view.layers()] == [False, False]
    assert rel_rms(evaluate(kernels), evaluate(view)) < 2e-2


def test_states_and_rows_come_back_with_their_bits(open_on: Open) -> None:
    ctx = open_on(ALL, n_seq_max=2, unified=True)
    ctx.decode(prompt(100))
    state, rows = ctx.save_seq(0), ctx.export(0)
    ctx.cp(0, 1)
    want = ctx.decode([7, 8])
    assert np.array_equal(ctx.decode([7, 8], 100, 1), want)  # a copy
    ctx.clear()
    assert ctx.load_seq(state)
    assert np.array_equal(ctx.decode([7, 8]), want)
    ctx.clear()
    ctx.put(rows)
    assert np.array_equal(ctx.decode([7, 8]), want)


@pytest.mark.parametrize(("begin", "end"), [(ALL, 0), (0, ALL), (ALL, OUTPUT_AND_ONE)])
def test_a_state_goes_on_where_other_layers_are_on_the_device(open_on: Open, begin: int, end: int) -> None:
    kv = KV.with_(k="q8_0", v="q8_0")
    first, second = open_on(begin, kv), open_on(end, kv)
    first.decode(prompt(100))
    state = first.save_seq()
    assert second.load_seq(state)
    assert second.save_seq() == state
    want, got = (ctx.decode(prompt(8, seed=3)) for ctx in (first, second))
    assert rel_rms(got, want) < 1e-2


@pytest.mark.parametrize("cold", ["q8_0", pytest.param("lm4", marks=pytest.mark.skipif("not has_kernels()"))])
def test_rows_that_move_are_those_of_the_cpu(open_on: Open, cold: str) -> None:
    logits = []
    for n_gpu_layers in (ALL, 0):
        ctx = open_on(n_gpu_layers, KV.with_(k=cold, v=cold))
        ctx.decode(prompt(100))
        ctx.context_shift(4, 40)
        logits.append(ctx.decode(prompt(8, seed=3)))
    assert rel_rms(*logits) < (2e-2 if cold == "q8_0" else 4e-2)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (KV.with_(k="lm4", v="lm4"), "does not write rows of type 'lm4': set offload_kqv to false"),
        (KV.with_(attention="fused"), "use attention 'merged', or offload_kqv = false"),
    ],
)
@pytest.mark.skipif("has_kernels()")
def test_what_the_cpu_alone_can_is_refused(open_on: Open, kv: Mixed, message: str) -> None:
    with pytest.raises(InitError, match=message):
        open_on(ALL, kv)


@pytest.mark.skipif("not has_kernels()")
def test_rows_that_llama_cpp_would_read_on_the_cpu_are_refused() -> None:
    with pytest.raises(
        UnsupportedModelError, match="does not read rows of type 'lm4': use 'lm4:attention=fused'"
    ):
        Llama(model_path(), kv="lm4", n_ctx=256, n_gpu_layers=-1, verbose=False)


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal gathers rows in F32")
def test_the_view_is_of_f16_rows_alone(open_on: Open) -> None:
    with_view = open_on(ALL, KV.with_(attention="merged"), n_ctx=512).stats()
    shape = zoo.SHAPES["llama-64"]
    elements = shape.n_head_kv * shape.head * 2  # of K and V
    assert with_view["bytes_view"] == (512 + 256) * elements * 2  # hot rows and padding are 256


def test_a_budget_has_room_for_the_view() -> None:
    budget = 9 << 20
    small = {"n_ctx": 4096, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with Llama(model_path(), kv=f"mixed:budget={budget},attention=merged", n_gpu_layers=-1, **small) as llm:
        stats = llm.kv.stats()
        assert {layer.attention for layer in llm.kv.layers} == {"merged"}
        assert 0 < stats.bytes_view < stats.bytes_total <= budget
