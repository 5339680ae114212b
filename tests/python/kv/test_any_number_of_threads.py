"""Rows and logits are the same bits for any number of threads."""

from __future__ import annotations

import hashlib

import pytest

from support.cache.harness import Ctx, Mixed, prompt

pytestmark = pytest.mark.full

tokens = prompt(600, seed=41)


def trace(ctx: Ctx) -> list[str]:
    """Digests of all logits and rows of a prompt, answers beside another prompt, and answers alone."""
    seen = [ctx.decode(tokens[:90]).tobytes()]
    ctx.decode(tokens[200:240], seq_ids=1)
    mixed = [[0], [1], *[[2]] * 45]
    seen.append(ctx.decode(tokens[240:287], [90, 40, *range(45)], mixed).tobytes())
    for i in range(4):
        at = 91 + i, 41 + i, 45 + i
        seen.append(ctx.decode(tokens[300 + 3 * i : 303 + 3 * i], at, [[0], [1], [2]]).tobytes())
    for seq in range(3):
        for group in ctx.export(seq):
            for layer in group["layers"]:
                seen += [layer[name].tobytes() for name in ("k", "v", "k_hot", "v_hot")]
    return [hashlib.sha256(data).hexdigest() for data in seen]


@pytest.mark.parametrize("kv", ["q4_0/q4_0", "q5_0/q8_0"])
def test_from_one_to_eight(open_ctx, has_fused: bool, kv: str) -> None:
    if not has_fused:
        pytest.skip("no fused kernel in this build")
    k, v = kv.split("/")
    settings = Mixed(k=k, v=v, threshold=48, group=16, sinks=3, attention="fused")
    options = {"n_ctx": 1024, "n_ubatch": 128, "n_seq_max": 3, "unified": True}
    want = trace(open_ctx("llama-64", settings, **options))
    for n_threads in range(2, 9):
        assert trace(open_ctx("llama-64", settings, **options, n_threads=n_threads)) == want, n_threads
