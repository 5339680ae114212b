"""Invariant 6: the bytes that are allocated, as llama.cpp's own memory breakdown reports them."""

from __future__ import annotations

import subprocess
import sys

import gguf
import pytest

from support import TESTS
from support.cache.harness import Mixed, Uniform
from support.patience import PATIENCE

pytestmark = pytest.mark.full

BITS = {
    name: 8 * size / block
    for name in ("q4_0", "q5_0", "q8_0", "f16")
    for block, size in [gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, name.upper())]]
}


def bits_per_element(stats: dict) -> float:
    """Of what is kept; on a device attention is merged."""
    return 8 * (stats["bytes_total"] - stats["bytes_view"]) / stats["n_elements"]


def test_the_case_of_the_readme(open_ctx) -> None:
    """n_ctx 8192, 256 hot tokens, Q4_0: at most 5.2 bits, where F16 takes 16."""
    ctx = open_ctx("llama-128", Mixed(threshold=256, group=32), n_ctx=8192)
    assert bits_per_element(ctx.stats()) <= 5.2


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("n_seq", [1, 4])
@pytest.mark.parametrize(("threshold", "sinks"), [(0, 0), (0, 8), (32, 0), (256, 4), (1024, 16), (2048, 0)])
@pytest.mark.parametrize(("k", "v"), [("q4_0", "q4_0"), ("q8_0", "q4_0"), ("q8_0", "q8_0")])
def test_the_formula(open_ctx, k: str, v: str, threshold: int, sinks: int, n_seq: int, unified: bool) -> None:
    n_ctx = 8192
    kv = Mixed(k=k, v=v, threshold=threshold, group=min(32, max(threshold, 1)), sinks=sinks)
    ctx = open_ctx("llama-64", kv, n_ctx=n_ctx, n_seq_max=n_seq, unified=unified)
    rows = min(kv.slots * n_seq, n_ctx)
    want = (BITS[k] + BITS[v]) / 2 + 16 * rows / n_ctx
    assert bits_per_element(ctx.stats()) == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize("n_seq", [1, 4])
def test_the_merged_view_is_counted(open_ctx, n_seq: int) -> None:
    """It is a part of the compute buffers: as much as they grow by where attention is merged."""
    options = {"n_ctx": 16384, "n_ubatch": 16, "n_seq_max": n_seq}
    kv = Mixed(threshold=256, group=32)
    fused, merged = (
        open_ctx("llama-128", kv.with_(attention=attention), **options).stats()
        for attention in ("fused", "merged")
    )
    assert fused["bytes_view"] == 0
    assert merged["bytes_total"] == fused["bytes_total"] + merged["bytes_view"]
    grown = merged["bytes_compute"] - fused["bytes_compute"]
    assert merged["bytes_view"] == pytest.approx(grown, rel=0.1)


@pytest.mark.parametrize("types", ["f16", "q8_0", "q4_0"])
def test_uniform_caches_by_the_same_measure(open_ctx, types: str) -> None:
    ctx = open_ctx("llama-64", Uniform(k=types, v=types), n_ctx=8192)
    assert bits_per_element(ctx.stats()) == pytest.approx(BITS[types], rel=0.01)


GROWTH = """
import sys
sys.path.insert(0, sys.argv[1])
import mixedkv
from support.cache.harness import Ctx, Mixed, Model, Uniform

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

kv = Mixed(threshold=256, group=32) if sys.argv[3] == "mixed" else Uniform()
model = Model(sys.argv[2])
before = resident()
with Ctx(model, kv, n_ctx=65536, n_ubatch=32) as ctx:
    ctx.clear(data=True)
    print(resident() - before, ctx.stats()["bytes_total"])
"""


def test_process_memory_agrees(zoo_path) -> None:
    """Written from end to end, the caches take from the system what they say: F16 and mixed differ as
    reported.

    The context's other buffers are in the difference: those of the merged view would show.
    """

    def grows_by(kv: str) -> tuple[int, int]:
        command = [sys.executable, "-c", GROWTH, str(TESTS), str(zoo_path("llama-128")), kv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        grown, said = map(int, done.stdout.split()[-2:])
        return grown, said

    (mixed, mixed_said), (f16, f16_said) = grows_by("mixed"), grows_by("f16")
    assert f16 - mixed == pytest.approx(f16_said - mixed_said, rel=0.15)


def test_sliding_window_layers_are_mixed_too(open_ctx) -> None:
    """Their cells are as few as llama.cpp gives them, and the recent ones have an F16 row."""
    ctx = open_ctx("gemma2", Mixed(threshold=64, group=16), n_ctx=4096, swa_full=False)
    layers = {layer["il"]: layer for layer in ctx.layers()}
    assert layers[0]["mixed"]
    assert layers[1]["mixed"]
    assert layers[0]["bytes_hot"] == layers[1]["bytes_hot"] > 0
    assert layers[0]["n_cells"] < layers[1]["n_cells"]
