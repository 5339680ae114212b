"""Cold types on a real model: what few bits do beside q4_0, and what a budget makes of some more."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv.config import parse_kv
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.resolve_budget import for_budget
from support.bench import run

pytestmark = pytest.mark.full

N_CTX = 512


def divergences(
    model: Path, folder: Path, *specs: str, text: str = "prose", n_ctx: int = N_CTX
) -> list[float]:
    """Mean KL divergence of each cache from an F32 cache, over the second half of a document."""
    options = ["--mode", "batch", "--n-ctx", str(n_ctx), "--repeats", "1", "--flash-attn", "off"]
    kv = [part for spec in specs for part in ("--kv", spec)]
    command = ["quality", "-m", str(model), "--text", text, *options, *kv]
    reference, *rows = run(folder / "quality.json", *command)
    assert reference["control"]
    assert len(rows) == len(specs)
    return [row["kld_mean"] for row in rows]


@pytest.mark.needs("real model")
@pytest.mark.parametrize("fixture", ["real_model", "real_model_planted"])
@pytest.mark.nightly
def test_fewer_bits_than_q4_0_do_less(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(fixture)
    q4_0, tc3, lm4 = divergences(model, tmp_path, "q4_0", "mixed:cold=tc3", "mixed:cold=lm4")
    assert tc3 < 0.6 * q4_0
    assert lm4 < 0.25 * q4_0


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_a_bit_less_than_q4_0_does_half(real_model: Path, tmp_path: Path) -> None:
    """On code, where tc3 alone does not."""
    q4_0, mixed = divergences(real_model, tmp_path, "q4_0", "mixed:budget=3.5bit", text="code")
    assert mixed < 0.5 * q4_0


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_a_budget_spends_no_worse_than_one_type(real_model: Path, tmp_path: Path) -> None:
    shape = model_shape(read_model_file(real_model))
    uniform = parse_kv("mixed:cold=lm4")
    element = sum(layer.n_embd_k + layer.n_embd_v for layer in shape.layers) * N_CTX // 8
    budget = footprint(shape, uniform, N_CTX).bytes + element // 4  # 4.5 bits
    chosen = for_budget(real_model, N_CTX, budget)
    planned, lm4 = divergences(real_model, tmp_path, str(chosen), str(uniform))
    assert planned <= 1.1 * lm4


@pytest.mark.needs("real model")
@pytest.mark.parametrize("fixture", ["real_model_gemma", "real_model_gemma_planted", "real_model"])
@pytest.mark.nightly
def test_a_budget_halves_what_mixed_loses_at_its_bytes(
    fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Without a measurement; 0.41 of it on Gemma and on SmolLM2, with 1,536 tokens of other prose."""
    model = request.getfixturevalue(fixture)
    shape, mixed = model_shape(read_model_file(model)), parse_kv("mixed")
    n_ctx = 2 * N_CTX  # longer than Gemma's windows
    budget = footprint(shape, mixed, n_ctx).bytes
    chosen = for_budget(model, n_ctx, budget)
    assert footprint(shape, chosen, n_ctx).bytes <= budget
    planned, whole = divergences(model, tmp_path, str(chosen), "mixed", n_ctx=n_ctx)
    assert planned < 0.6 * whole
