"""Keys with a few huge channels survive 4 bits: K is stored times one scale for each rotary pair.

The invariants of the other files hold with equalisation on: the zoo's models have larger and smaller pairs,
and the oracle scales as the cache does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv import Llama, bundled
from mixedkv.bundled import corpus
from mixedkv.kv.block import KVBlock
from mixedkv.model.gguf_copy import write_and_close
from mixedkv.store.identity import Identity
from support.cache.divergence import divergence, log_p
from support.cache.harness import Ctx, Mixed, Model, Uniform, prompt, rel_rms
from support.cache.hidden import hidden
from support.models import zoo
from support.models.planted import plant
from support.models.zoo.dense import stablelm

pytestmark = pytest.mark.full

N = 640
OFF = Mixed(equalize=False)


@pytest.fixture(scope="module")
def journal() -> list[int]:
    r = random.Random("equalisation")
    world = corpus.World(r)
    text = " ".join(world.fact()[0] if r.random() < 0.4 else corpus.filler(r) for _ in range(N))
    with Llama(str(bundled.model_path()), kv="f16", n_ctx=256, verbose=False) as llm:
        return llm.tokenize(text.encode())[:N]


@pytest.fixture(scope="module")
def plain(journal: list[int]) -> tuple[float, float]:
    """Divergence of the model without outliers."""
    model = Model(bundled.model_path())
    f32 = log_p(model, Uniform(k="f32", v="f32", flash=False), journal)
    res = divergence(f32, log_p(model, Mixed(sinks=4, equalize=False), journal))
    model.close()
    return res


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_outliers_in_k_survive_the_default_cache(
    tmp_path: Path, journal: list[int], plain: tuple[float, float], seed: int
) -> None:
    model = Model(plant(bundled.model_path(), tmp_path / "planted.gguf", seed))
    try:
        want = log_p(model, Uniform(k="f32", v="f32", flash=False), journal)
        kld, same = divergence(want, log_p(model, Mixed(sinks=4), journal))
        broken, _ = divergence(want, log_p(model, Mixed(sinks=4, equalize=False), journal))
    finally:
        model.close()
    assert kld < 2 * plain[0]
    assert same > plain[1] - 0.02
    assert broken > 50 * plain[0]


# --- the scales against NumPy ---


def mean_squares(g: zoo.Gguf, il: int, which: str, d: int, bias: bool = True) -> np.ndarray:
    """Of the channels of a projection, for inputs of independent elements: [heads, d]."""
    n_q, n_k = g.shape.n_head * d, g.shape.n_head_kv * d

    def part(name: str) -> np.ndarray | float:
        if (whole := g.tensors.get(f"blk.{il}.attn_qkv.{name}")) is not None:
            return whole[:n_q] if which == "q" else whole[n_q : n_q + n_k]
        return g.tensors.get(f"blk.{il}.attn_{which}.{name}", 0.0)

    w = np.asarray(part("weight"), np.float64)
    norm, shift = (g.tensors.get(f"blk.{il}.attn_norm.{name}", 0.0) for name in ("weight", "bias"))
    constant = (part("bias") if bias else 0.0) + w @ np.broadcast_to(shift, w.shape[1:])
    res = (((w * norm) ** 2).sum(axis=1) + constant**2).reshape(-1, d)
    if (qk_norm := g.tensors.get(f"blk.{il}.attn_{which}_norm.weight")) is not None:
        res = res / res.mean(axis=1, keepdims=True) * qk_norm.astype(np.float64) ** 2
    return res


def exact_steps(g: zoo.Gguf, il: int, d: int, n_rot: int, bias: bool = True) -> np.ndarray:
    """log2 of the wanted scales times 2, before rounding, with the bias of K or without: [n_head_kv, d]."""
    k, q = mean_squares(g, il, "k", d, bias), mean_squares(g, il, "q", d)
    q = q.reshape(len(k), -1, d).mean(axis=1)
    i = np.arange(d)
    partner = i ^ 1 if g.shape.rope == "norm" else (i + n_rot // 2) % max(n_rot, 1)
    partner = np.where(i < n_rot, partner, i)
    return 0.5 * np.log2((q + q[:, partner]) / (k + k[:, partner]))


def wild(g: zoo.Gguf, seed: int = 5) -> zoo.Gguf:
    """Channels of K and Q of many sizes."""
    rng = np.random.default_rng(seed)
    for name, data in g.tensors.items():
        part = name.rpartition("attn_")[2]
        if part in ("k.weight", "q.weight"):
            sizes = np.exp2(rng.uniform(-4, 4, len(data))).astype(np.float32)
            g.tensors[name] = data * sizes[:, None]
    return g


def with_bias(g: zoo.Gguf) -> zoo.Gguf:
    """As Qwen2: huge in a few channels of K."""
    for il in range(g.shape.n_layer):
        for which in "qkv":
            n = len(g.tensors[f"blk.{il}.attn_{which}.weight"])
            g.vector(f"blk.{il}.attn_{which}.bias", n, mean=0.0, std=0.5)
        g.tensors[f"blk.{il}.attn_k.bias"][5:9] = 300
    return g


def fused_qkv(g: zoo.Gguf) -> zoo.Gguf:
    """Q, K and V in one tensor, and their biases in another."""
    for il in range(g.shape.n_layer):
        for part in ("weight", "bias"):
            parts = [g.tensors.pop(f"blk.{il}.attn_{which}.{part}") for which in "qkv"]
            g.tensors[f"blk.{il}.attn_qkv.{part}"] = np.concatenate(parts)
    return g


def qwen2() -> zoo.Gguf:
    return wild(with_bias(zoo.decoder(zoo.Shape("qwen2", "qwen2", n_embd=256, rope="neox"))))


MODELS: dict[str, tuple[Callable[[], zoo.Gguf], int]] = {  # and how many elements of a head RoPE turns
    "pairs of neighbours": (lambda: wild(zoo.make("llama-64")), 64),
    "halves, biases": (qwen2, 64),
    "one tensor": (lambda: fused_qkv(qwen2()), 64),
    "norms of Q and K": (lambda: zoo.make("qwen3"), 64),
    "partial rotary": (lambda: wild(stablelm()), 16),
    "no RoPE": (lambda: wild(zoo.make("refact")), 0),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_scales_are_those_of_the_weights(tmp_path: Path, name: str) -> None:
    g = MODELS[name][0]()
    d, n_rot = g.shape.head, MODELS[name][1]
    g.write(tmp_path / "model.gguf")
    model = Model(tmp_path / "model.gguf")
    with Ctx(model, Mixed()) as ctx:
        for il in range(g.shape.n_layer):
            scales, want = ctx.scales(il), exact_steps(g, il, d, n_rot)
            assert scales is not None
            steps = 2 * np.log2(scales.astype(np.float64))
            assert np.allclose(steps, steps.round(), atol=1e-5)
            # rounded to a step, from a sample of 64 inputs; of a pair whose bias is not stored, without it
            off = np.minimum(np.abs(steps - want), np.abs(steps - exact_steps(g, il, d, n_rot, bias=False)))
            assert off.max() < 1.2
            assert off.mean() < 0.4
            assert steps.std() > 0.2
    model.close()


def test_repacked_weights_have_scales_too(tmp_path: Path) -> None:
    """Weights in Q4_0 and Q8_0, which CPUs repack so that nobody can read them."""
    g = wild(zoo.make("llama-128"))
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0):
        path = tmp_path / f"{kind.name}.gguf"
        g.write(tmp_path / "f32.gguf")
        quantise(tmp_path / "f32.gguf", path, kind)
        found = []
        for extra_buffers in (True, False):
            model = Model(path, extra_buffers)
            with Ctx(model, Mixed()) as ctx:
                found.append(2 * np.log2(ctx.scales(0)))
            model.close()
        want = exact_steps(g, 0, 128, 128)
        assert all(np.abs(steps - want).max() < 1.4 for steps in found)
        assert np.abs(found[0] - found[1]).max() <= 1.001
        assert (np.abs(found[0] - found[1]) > 0.5).mean() < 0.1


def quantise(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """K and Q in another type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        if tensor.name.endswith(("attn_k.weight", "attn_q.weight")):
            writer.add_tensor(tensor.name, gguf.quantize(np.array(tensor.data), kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    write_and_close(writer)


def test_without_equalisation_nothing_is_scaled(open_ctx) -> None:
    for kv in (OFF, Uniform(k="q4_0", v="q4_0")):
        ctx = open_ctx("llama-64", kv)
        assert ctx.scales(0) is None
        assert {layer["equalization"] for layer in ctx.layers()} == {0}


# --- a shift turns pairs, which partial rotary and no RoPE have less of or none ---


@pytest.mark.merged_nightly
@pytest.mark.parametrize("name", ["pairs of neighbours", "halves, biases", "partial rotary"])
def test_shifted_keys_are_those_of_the_new_positions(tmp_path: Path, name: str, attention: str) -> None:
    MODELS[name][0]().write(tmp_path / "model.gguf")
    model = Model(tmp_path / "model.gguf")
    kv = Mixed(k="q8_0", v="q8_0", threshold=16, group=8, attention=attention)
    tokens = prompt(60)
    with Ctx(model, kv) as moved, Ctx(model, Uniform(k="f32", v="f32", flash=False)) as exact:
        for ctx in (moved, exact):
            ctx.decode(tokens[:50])
            ctx.rm(0, 4, 20)
            ctx.add(0, 20, 50, -16)
            ctx.decode(tokens[50:])
        rows = [ctx.rows(0, "k", unrotate=True)[0] for ctx in (moved, exact)]
    model.close()
    assert rel_rms(*rows) < 0.02


# --- rows with and without scales ---


@pytest.mark.parametrize("there", [Mixed(sinks=4), OFF.with_(sinks=4)], ids=["to scales", "to none"])
def test_blocks_convert(open_ctx, there: Mixed) -> None:
    here = OFF.with_(sinks=4) if there.equalize else Mixed(sinks=4)
    source, target = open_ctx("llama-64", here), open_ctx("llama-64", there)
    tokens = prompt(120)
    want = [source.decode(tokens[:100])[-1:], source.decode(tokens[100:])][1]
    source.rm(0, 100, -1)
    target.put(source.export())
    for which in "kv":
        rows = [ctx.rows(0, which, unrotate=True)[0] for ctx in (source, target)]
        assert rel_rms(rows[1], rows[0]) < 0.12  # a second rounding to four bits
    assert rel_rms(target.decode(tokens[100:]), want) < 0.3


def test_scales_that_nobody_knows_are_refused(open_ctx) -> None:
    ctx, other = open_ctx("llama-64", Mixed()), open_ctx("llama-64", Mixed())
    ctx.decode(prompt(40))
    groups = ctx.export()
    groups[0]["layers"][1]["equalization"] ^= 1
    with pytest.raises(ValueError, match=r"layer 1: .*equali"):
        other.put(groups)
    assert other.pos_max() == -1


def test_a_state_with_other_scales_is_refused(open_ctx) -> None:
    on, off = open_ctx("llama-64", Mixed()), open_ctx("llama-64", OFF)
    for here, there in ((on, off), (off, on)):
        here.decode(prompt(60))
        state = here.save_seq()
        there.clear()
        assert there.load_seq(state) == 0
        assert there.pos_max() == -1
        here.clear()
        assert here.load_seq(state) == len(state)
        here.clear()


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, Llama]]:
    """The bundled model with equalisation and without."""
    llms = {}
    for equalize in ("1", "0"):
        with hidden(equalize=equalize):
            llms[equalize] = Llama(str(bundled.model_path()), kv="mixed", n_ctx=256, verbose=False)
    yield llms
    for llm in llms.values():
        llm.close()


def test_scales_are_part_of_the_identity(pair: dict[str, Llama]) -> None:
    on, off = (Identity.of(llm) for llm in pair.values())
    assert on.digest != off.digest
    assert "equalization=" in on.setting
    assert "equalization=" not in off.setting


def test_a_block_knows_its_scales(pair: dict[str, Llama]) -> None:
    on, off = pair.values()
    on.reset()
    on.eval(on.tokenize(b"Mira's kite is teal. The code of the mill is 4817."))
    block = on.kv.export()
    layers = [layer.equalization for layer in block.groups[0].layers]
    assert all(layers)
    again = KVBlock.from_arrays(block.describe(), block.to_arrays())
    assert [layer.equalization for layer in again.groups[0].layers] == layers
    on.reset()
    on.kv.clear()
    on.kv.load(again)
    assert on.kv.exact_tokens == len(block)
    off.kv.load(again)
    assert off.kv.exact_tokens == 0  # converted
