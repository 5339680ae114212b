"""Biases of K that dwarf the rest, as Qwen2 has them, are not stored in cold rows: what RoPE makes of them is
added to scores instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama, bundled
from mixedkv.bundled import corpus
from support.cache.divergence import divergence, log_p
from support.cache.harness import Ctx, Mixed, Model, Uniform, prompt, rel_rms
from support.models import zoo
from support.models.planted import plant
from support.models.zoo.dense import stablelm

pytestmark = pytest.mark.full

F32 = Uniform(k="f32", v="f32", flash=False)


def with_bias(g: zoo.Gguf, channels: tuple[int, ...], size: float) -> zoo.Gguf:
    """K biases of every layer: one number in these channels, other signs and sizes for each head."""
    for il in range(g.shape.n_layer):
        for which in "qkv":
            n = len(g.tensors[f"blk.{il}.attn_{which}.weight"])
            g.tensors[f"blk.{il}.attn_{which}.bias"] = np.zeros(n, np.float32)
        bias = g.tensors[f"blk.{il}.attn_k.bias"].reshape(-1, g.shape.head)
        for i, channel in enumerate(channels):
            bias[:, channel] = size * (-1.0) ** i * (1 + 0.5 * np.arange(len(bias)))
    return g


def llama() -> zoo.Gguf:
    return zoo.make("llama-64")


def qwen2() -> zoo.Gguf:
    return zoo.decoder(zoo.Shape("qwen2", "qwen2", n_embd=256, rope="neox"))


def yarn() -> zoo.Gguf:
    g = qwen2()
    g.keys |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    return g


def factors() -> zoo.Gguf:
    """As Llama 3: each frequency by a factor of its own."""
    g = llama()
    g.tensors["rope_freqs.weight"] = np.linspace(1, 8, g.shape.head // 2).astype(np.float32)
    return g


MODELS: dict[str, tuple[Callable[[], zoo.Gguf], tuple[int, ...]]] = {  # and the channels with a bias
    "neighbours": (llama, (2, 3, 62, 63)),
    "halves": (qwen2, (3, 30, 62)),
    "yarn": (yarn, (3, 30, 62)),
    "factors": (factors, (30, 31, 63)),
    "partial": (stablelm, (1, 40, 50)),
}


@pytest.fixture
def open_biased(tmp_path: Path) -> Iterator[Callable[..., Ctx]]:
    """open_biased(name, kv, size): a context of a model with biases."""
    models: dict[tuple[str, float], Model] = {}
    contexts: list[Ctx] = []

    def open_(name: str, kv: Uniform | Mixed, size: float = 300.0, **options: int) -> Ctx:
        if (name, size) not in models:
            make, channels = MODELS[name]
            path = tmp_path / f"{name}-{size}.gguf"
            with_bias(make(), channels, size).write(path)
            models[name, size] = Model(path)
        contexts.append(Ctx(models[name, size], kv, **options))
        return contexts[-1]

    yield open_
    for item in (*contexts, *models.values()):
        item.close()


def error(ctx: Ctx, exact: Ctx) -> float:
    """RMS over the cold rows of K of the first layer, whose input is the embedding."""
    (rows, _, hot), (want, _, _) = (c.rows(0, "k", unrotate=True) for c in (ctx, exact))
    assert 0 < hot.sum() < len(hot)
    return float(np.sqrt(np.mean((rows[~hot] - want[~hot]) ** 2)))


@pytest.fixture(params=["fused", "merged"])
def kv(request: pytest.FixtureRequest) -> Mixed:
    return Mixed(threshold=16, group=8, draft=0, attention=request.param)


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_as_exact_as_without_biases(open_biased, kv: Mixed, name: str) -> None:
    tokens = prompt(90)
    errors = []
    for size in (300.0, 0.0):
        ctx, exact = open_biased(name, kv, size), open_biased(name, F32, size)
        for c in (ctx, exact):
            c.decode(tokens)
        errors.append(error(ctx, exact))
    assert errors[0] < 1.6 * errors[1]


@pytest.mark.parametrize("name", MODELS)
def test_a_shift_turns_what_is_stored(open_biased, kv: Mixed, name: str) -> None:
    """Keys of the first layer, which see no other token, are those of the positions that they got."""
    tokens = prompt(90)
    errors = []
    for size in (300.0, 0.0):
        ctx, exact = open_biased(name, kv, size), open_biased(name, F32, size)
        ctx.decode(tokens[:80])
        ctx.context_shift(4, 20)
        ctx.decode(tokens[80:])
        exact.decode(tokens[:4] + tokens[24:])
        errors.append(error(ctx, exact))
    assert errors[0] < 1.6 * errors[1]
    assert errors[1] < 0.5


@pytest.mark.parametrize("name", MODELS)
def test_both_attentions_add_the_same(open_biased, name: str) -> None:
    """Biases of a size at which softmax still leaves more than one key."""
    kv = Mixed(k="q8_0", v="q8_0", threshold=16, group=8)
    got = {}
    for attention in ("fused", "merged"):
        ctx = open_biased(name, kv.with_(attention=attention), 8.0)
        ctx.decode(prompt(70))
        got[attention] = ctx.decode(prompt(8, seed=2))
    exact = open_biased(name, F32, 8.0)
    exact.decode(prompt(70))
    want = exact.decode(prompt(8, seed=2))
    assert rel_rms(got["fused"], want) < 0.05
    assert rel_rms(got["merged"], want) < 0.05


@pytest.mark.parametrize("unified", [True, False], ids=["one stream", "streams"])
def test_sequences_have_positions_of_their_own(open_biased, kv: Mixed, unified: bool) -> None:
    """Copied, rolled back and moved: as one alone that has seen the same tokens."""
    tokens, kv = prompt(100), kv.with_(draft=16)
    options = {"n_seq_max": 2, "unified": unified}
    both, alone = open_biased("halves", kv, 8.0, **options), open_biased("halves", kv, 8.0, **options)
    both.decode(tokens[:70])
    both.decode(tokens[:30], seq_ids=1)
    both.rm(1)
    both.cp(0, 1)
    both.decode(tokens[70:75], seq_ids=1)
    both.rm(1, 70, -1)
    got = both.decode(tokens[75:80], seq_ids=1)
    alone.decode(tokens[:70])
    assert rel_rms(got, alone.decode(tokens[75:80])) < 1e-3


def test_states_and_blocks_come_back(open_biased, kv: Mixed) -> None:
    tokens = prompt(100)
    here, there = open_biased("halves", kv), open_biased("halves", kv)
    here.decode(tokens[:80])
    state, block = here.save_seq(), here.export()
    want = here.decode(tokens[80:])
    assert there.load_seq(state) == len(state)
    assert np.array_equal(there.decode(tokens[80:]), want)
    there.clear()
    there.put(block)
    assert np.array_equal(there.decode(tokens[80:]), want)


@pytest.mark.parametrize("shift", [0, 40])
@pytest.mark.parametrize("way", ["to none", "from none", "to F32"])
def test_blocks_are_converted_by_position(open_biased, way: str, shift: int) -> None:
    """Into the cold rows and out of them; eight bits, so that what is compared is not rounding."""
    on = Mixed(k="q8_0", v="q8_0", threshold=16, group=8, draft=0)
    source, target = {
        "to none": (on, on.with_(equalize=False)),
        "from none": (on.with_(equalize=False), on),
        "to F32": (on, F32),
    }[way]
    here, there = open_biased("halves", source), open_biased("halves", target)
    here.decode(prompt(80))
    there.put(here.export(), shift=shift)
    rows = [ctx.rows(0, "k", unrotate=True)[0] for ctx in (here, there)]
    if shift:
        here.add(0, 0, -1, shift)
        rows[0] = here.rows(0, "k", unrotate=True)[0]
    assert np.abs(rows[0] - rows[1]).max() < 0.02 * 450  # a rounding to eight bits where biases are stored


def test_biases_are_part_of_what_tells_scales_apart(open_biased) -> None:
    ids = {size: open_biased("halves", Mixed(), size).layers()[0]["equalization"] for size in (300.0, 310.0)}
    assert ids[300.0] != ids[310.0]


@pytest.mark.merged_nightly
@pytest.mark.parametrize("attention", ["fused", "merged"])
def test_the_default_cache_survives_biases(tmp_path: Path, attention: str) -> None:
    with Llama(str(bundled.model_path()), kv="f16", n_ctx=256, verbose=False) as llm:
        tokens = llm.tokenize(corpus.make_recall(1, 80).text.encode())[:500]
    kv = Mixed(sinks=4, attention=attention)
    found, broken = {}, 0.0
    for bias in (0.0, 300.0):
        model = Model(plant(bundled.model_path(), tmp_path / f"{bias}.gguf", seed=1, bias=bias))
        want = log_p(model, F32, tokens)
        found[bias] = divergence(want, log_p(model, kv, tokens))
        if bias:
            broken, _ = divergence(want, log_p(model, kv.with_(equalize=False), tokens))
        model.close()
    assert found[300.0][0] < 2 * found[0.0][0]
    assert found[300.0][1] > found[0.0][1] - 0.05  # a broken cache loses more than half
    assert broken > 50 * found[300.0][0]
