"""Packed sessions of old versions load and go on; blocks become packed sessions and come back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from golden import make_golden as made
from mixedkv import Llama
from mixedkv.cli.main import main
from mixedkv.store import (
    Identity,
    KVStore,
    block_from_packed,
    load_packed,
    pack_kv_cache_v2,
    packed_from_block,
    rotary_of,
    unpack_kv_cache,
    unpack_kv_cache_v2,
)
from support.cache.divergence import divergence
from support.models import zoo
from support.servers import split_servers

pytestmark = pytest.mark.full

_FILES = [("packed-v2-session.bin", 2), ("packed-flat-session.bin", 1)]


def _llama(path: Path, kv: str) -> Llama:
    return Llama(path, kv=kv, n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)


def _go_on(llm: Llama, token: int, n: int) -> tuple[list[int], np.ndarray]:
    """The likeliest tokens after one more, and the logits that they were chosen from."""
    answer, logits = [], []
    for _ in range(n):
        llm.eval([token])
        logits.append(llm.scores[llm.n_tokens - 1].copy())
        answer.append(token := int(logits[-1].argmax()))
    return answer, np.array(logits)


@pytest.mark.parametrize(("name", "n_layer"), _FILES)
@pytest.mark.parametrize("kv", ["f16", "q8_0", "mixed"])
def test_packed_sessions_go_on(name: str, n_layer: int, kv: str, tmp_path: Path) -> None:
    layers = unpack_kv_cache((made.FOLDER / name).read_bytes())
    with _llama(made.session_model(n_layer, tmp_path), kv) as llm:
        load_packed(llm, layers, made.SESSION, rotary="interleaved")
        assert llm.n_tokens == len(made.SESSION)
        assert llm.kv.exact_tokens == (len(made.SESSION) if kv == "f16" else 0)
        answer, logits = _go_on(llm, 30, 12)
    with _llama(made.session_model(n_layer, tmp_path), "f16") as llm:
        llm.eval(made.SESSION)
        expected, expected_logits = _go_on(llm, 30, 12)
    if kv == "f16":
        assert answer == expected
        assert np.abs(logits - expected_logits).max() < 0.02 * np.abs(expected_logits).max()
    kld = divergence(
        *(x[:1] - np.logaddexp.reduce(x[:1], 1, keepdims=True) for x in (expected_logits, logits))
    )[0]
    assert kld < 5e-3


@pytest.mark.parametrize("n_wrong", [1, 10])
def test_a_session_with_some_wrong_rows_is_refused(n_wrong: int, tmp_path: Path) -> None:
    """Its first and last tokens are right, and so is the median of all."""
    name, n_layer = _FILES[0]
    layers = [(k.copy(), v.copy()) for k, v in unpack_kv_cache((made.FOLDER / name).read_bytes())]
    rng, n = np.random.default_rng(1), len(made.SESSION)
    for at in rng.choice(np.arange(5, n - 5), n_wrong, replace=False):
        for k, _ in layers:
            rows = k[at] if k.ndim == 3 else k[0, :, at]
            rows[...] = rng.normal(0, np.abs(rows).mean(), rows.shape)
    with _llama(made.session_model(n_layer, tmp_path), "f16") as llm:
        with pytest.raises(ValueError, match=r"K of layer \d at position"):
            load_packed(llm, layers, made.SESSION, rotary="interleaved")
        assert llm.kv.positions(0) == (-1, -1)


@pytest.mark.parametrize("architecture", ["llama-64", "qwen2", "qwen3"])
def test_blocks_come_back(architecture: str, tmp_path: Path) -> None:
    with _llama(split_servers.write(architecture, tmp_path), "f16") as llm:
        llm.eval(list(range(3, 50)))
        block = llm.kv.export()
        packed = unpack_kv_cache_v2(pack_kv_cache_v2(packed_from_block(block)))
        expected, expected_logits = _go_on(llm, 60, 8)
        llm.reset()
        llm.kv.clear()
        llm.kv.load(block_from_packed(packed, block.tokens, llm, rotary=rotary_of(llm)))
        assert llm.kv.exact_tokens == 0  # nobody has compared them
        answer, logits = _go_on(llm, 60, 8)
    assert answer == expected
    assert np.array_equal(logits, expected_logits)
    shape = packed[0][0].shape
    assert shape == (47, block.groups[0].layers[0].n_head_kv, block.groups[0].layers[0].head_size_k)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = made.session_model(2, tmp_path)
    layers = unpack_kv_cache((made.FOLDER / "packed-v2-session.bin").read_bytes())
    with _llama(path, "mixed") as llm:
        for wrong, tokens, message in (
            (layers[:1], made.SESSION, "has 1 layers, the model keeps rows of 2"),
            (layers, made.SESSION[:-1], r"layer 0: its key has the shape"),
            (layers, [], "tokens: give the id"),
            (made.layers(), made.SESSION, r"its key has the shape \(3, 2, 4\): these tokens"),
            (((layers[0][0], layers[0][1][:, :1]), layers[1]), made.SESSION, "layer 0: its value"),
        ):
            with pytest.raises(ValueError, match=message):
                block_from_packed(wrong, tokens, llm, rotary="interleaved")
        llm.eval(made.SESSION)
        with pytest.raises(ValueError, match="load the block into a cache with kv='f16'"):
            packed_from_block(llm.kv.export())


def test_a_mixed_cache_becomes_a_packed_one_by_way_of_f16(tmp_path: Path) -> None:
    path = made.session_model(2, tmp_path)
    with _llama(path, "mixed") as mixed, _llama(path, "f16") as plain:
        mixed.eval(made.SESSION)
        plain.kv.load(mixed.kv.export())
        packed = packed_from_block(plain.kv.export())
        for il, (k, v) in enumerate(packed):
            layer = mixed.kv.layer(il)
            for have, rows in ((k, layer.k(basis="model")), (v, layer.v(basis="model"))):
                assert np.abs(have - rows).max() < 2e-3 * np.abs(rows).max()


def test_flat_and_two_dimensional_rows_are_the_same(tmp_path: Path) -> None:
    layers = unpack_kv_cache((made.FOLDER / "packed-v2-session.bin").read_bytes())
    flat = [(k.reshape(len(k), -1), v.reshape(len(v), -1)) for k, v in layers]
    with _llama(made.session_model(2, tmp_path), "f16") as llm:
        one, other = (
            block_from_packed(rows, made.SESSION, llm, rotary="interleaved") for rows in (layers, flat)
        )
    assert max(made.SESSION) < zoo.N_VOCAB
    for a, b in zip(one.groups[0].layers, other.groups[0].layers, strict=True):
        assert np.array_equal(a.k, b.k)
        assert np.array_equal(a.v, b.v)


def _of_transformers(packed: tuple) -> tuple:
    """As transformers has it: [1, heads, tokens, size], the halves of K's heads turned together."""

    def half(k: np.ndarray) -> np.ndarray:
        return np.concatenate([k[..., 0::2], k[..., 1::2]], axis=2)

    return tuple((half(k).transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None]) for k, v in packed)


@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_another_rotary_layout_is_converted_or_refused(kv: str, tmp_path: Path) -> None:
    path, tokens = made.session_model(2, tmp_path), np.array(made.SESSION, np.int32)
    with _llama(path, "f16") as llm:
        llm.eval(tokens)
        own = packed_from_block(llm.kv.export())
    theirs = _of_transformers(own)
    with _llama(path, kv) as llm, KVStore(None) as store:
        for wrong, rotary in ((theirs, "interleaved"), (own, "half")):
            with pytest.raises(ValueError, match=r"not this model's: .* rotary="):
                load_packed(llm, wrong, tokens, rotary=rotary)
            assert llm.n_tokens == 0
            assert llm.kv.positions(0) == (-1, -1)
        with pytest.raises(ValueError, match="not this model's"):  # of other tokens
            load_packed(llm, theirs, tokens[::-1].copy(), rotary="half")
        assert load_packed(llm, theirs, tokens, rotary="half") < 0.02
        assert llm.kv.exact_tokens == (len(tokens) if kv == "f16" else 0)
        assert (store.save(llm).n_stored > 0) == (kv == "f16")
        with pytest.raises(ValueError, match="is not empty"):
            load_packed(llm, theirs, tokens, rotary="half")


def _import(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    code = main(["cache", "import", *map(str, args)])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_a_command_stores_a_packed_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of transformers' shape and rotary layout, which it finds out; then its rows are there."""
    model, folder = made.session_model(2, tmp_path), tmp_path / "kv"
    with _llama(model, "f16") as llm:
        llm.eval(made.SESSION)
        own = packed_from_block(llm.kv.export())
    packed, tokens = tmp_path / "theirs.bin", tmp_path / "tokens.json"
    for layers, tenant in ((_of_transformers(own), ""), (own, "ada")):
        packed.write_bytes(pack_kv_cache_v2(layers))
        tokens.write_text(str(made.SESSION))
        to = ("-m", model, "--store", folder, "--tokens", tokens, "--tenant", tenant)
        assert _import(capsys, packed, *to)[0] == 0
        with _llama(model, "f16") as llm, KVStore(folder) as store:
            restored = store.restore(llm, [*made.SESSION, 30], tenant=tenant)
            assert (restored.n_tokens, restored.exact) == (len(made.SESSION), True)
            answer, _ = _go_on(llm, 30, 8)
        with _llama(model, "f16") as llm:
            llm.eval(made.SESSION)
            assert answer == _go_on(llm, 30, 8)[0]
    for wrong, message in (
        (made.SESSION[::-1], "not this model's"),
        ([*made.SESSION[:-1], 10**6], "token 1000000 is not one of this model's"),
        ({"ids": 1}, "give a JSON list"),
        ([], "give the id of each token"),
    ):
        tokens.write_text(json.dumps(wrong))
        code, told = _import(capsys, packed, *to)
        assert (code, told.count("\n")) == (2, 1)
        assert message in told


def test_rows_that_nobody_compared_are_not_stored(tmp_path: Path) -> None:
    with _llama(made.session_model(2, tmp_path), "f16") as llm, KVStore(None) as store:
        llm.eval(made.SESSION)
        packed = packed_from_block(llm.kv.export())
        block = block_from_packed(packed, made.SESSION, llm, rotary="interleaved")
        with pytest.raises(ValueError, match="another program made its rows"):
            store.put(Identity.of(llm), block)
        assert block.slice(0, 3).foreign
        with pytest.raises(ValueError, match=r"rotary='neox': use 'interleaved' or 'half'"):
            block_from_packed(packed, made.SESSION, llm, rotary="neox")  # type: ignore[arg-type]


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_a_session_of_another_layout_is_refused_on_a_real_model(real_model_q4_1: Path) -> None:
    with _llama(real_model_q4_1, "f16") as llm:
        tokens = llm.tokenize(b"The quick brown fox jumps over the lazy dog, and then it sleeps until noon.")
        llm.eval(tokens)
        own = packed_from_block(llm.kv.export())
        llm.kv.remove(0)
        with pytest.raises(ValueError, match="not this model's"):
            load_packed(llm, _of_transformers(own), tokens, rotary="interleaved")
        load_packed(llm, _of_transformers(own), tokens, rotary="half")
        assert llm.kv.exact_tokens == len(tokens)
