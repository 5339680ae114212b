"""Rows that no arithmetic should meet: what they spoil is their own sequence, from their own position on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.cache.harness import Ctx, Mixed, Model, prompt, rel_rms
from support.models import zoo

pytestmark = pytest.mark.full

ODD = 7  # the token
WEIGHTS = {"inf": 3e38, "1e6": 1e5, "denormal": 1e-41, "nan": 1.0}
tokens = [t + (t == ODD) for t in prompt(300, seed=31)]


@pytest.fixture(params=WEIGHTS)
def odd_model(request: pytest.FixtureRequest, tmp_path: Path):
    """K and V of token ODD are of that kind, all others as ever: it alone has a first dimension."""
    model = zoo.muted("llama-64", 0)
    embedding = model.tensors["token_embd.weight"]
    embedding[:, 0] = 0
    embedding[ODD] = 0
    embedding[ODD, 0] = np.nan if request.param == "nan" else 1
    for part in "kv":
        model.tensors[f"blk.0.attn_{part}.weight"][:, 0] = WEIGHTS[request.param]
    model.write(tmp_path / "odd.gguf")
    model = Model(tmp_path / "odd.gguf")
    yield model
    model.close()


@pytest.mark.parametrize("cold", ["q4_0", "q8_0", "lm4", "f16"])
@pytest.mark.parametrize("threshold", [0, 32])
def test_earlier_tokens_and_other_sequences_do_not_notice(
    odd_model: Model, cold: str, threshold: int
) -> None:
    kv = Mixed(k=cold, v=cold, threshold=threshold, group=16, sinks=2, attention="fused")
    logits = []
    for token in (ODD, tokens[290]):
        with Ctx(odd_model, kv, n_ctx=256, n_ubatch=128, n_seq_max=2, unified=True) as ctx:
            # a slice of a prompt, then answers of both sequences in turns
            batch = [*tokens[:40], token, *tokens[40:63], *tokens[100:130]]
            at = [*range(64), *range(30)]
            seqs = [[0]] * 64 + [[1]] * 30
            out = ctx.decode(batch, positions=at, seq_ids=seqs)
            got = [out[:40], out[64:]]
            for i in range(60):
                step = ctx.decode(
                    [tokens[130 + i], tokens[200 + i]], positions=[64 + i, 30 + i], seq_ids=[[0], [1]]
                )
                got.append(step[1:])
                assert np.isfinite(step).all(), "not even the sequence itself is spoilt for good"
            logits.append(np.concatenate(got))
    odd, normal = logits
    assert np.isfinite(odd).all()
    assert max(rel_rms(a, b) for a, b in zip(odd, normal, strict=True)) < 1e-3
