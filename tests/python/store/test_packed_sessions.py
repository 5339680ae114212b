"""Packed sessions of old versions load and go on; blocks become packed sessions and come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from golden import make_golden as made
from mixedkv import Llama
from mixedkv.store import (
    block_from_packed,
    pack_kv_cache_v2,
    packed_from_block,
    unpack_kv_cache,
    unpack_kv_cache_v2,
)
from support import split_support, zoo
from support.divergence import divergence

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
        llm.kv.load(block_from_packed(layers, made.SESSION, llm.kv.layers))
        assert llm.n_tokens == len(made.SESSION)
        answer, logits = _go_on(llm, 30, 12)
    with _llama(made.session_model(n_layer, tmp_path), "f16") as llm:
        llm.eval(made.SESSION)
        expected, wanted = _go_on(llm, 30, 12)
    if kv == "f16":
        assert answer == expected
        assert np.abs(logits - wanted).max() < 0.02 * np.abs(wanted).max()
    kld = divergence(*(x[:1] - np.logaddexp.reduce(x[:1], 1, keepdims=True) for x in (wanted, logits)))[0]
    assert kld < 5e-3


@pytest.mark.parametrize("architecture", ["llama-64", "qwen2", "qwen3"])
def test_blocks_come_back(architecture: str, tmp_path: Path) -> None:
    with _llama(split_support.write(architecture, tmp_path), "f16") as llm:
        llm.eval(list(range(3, 50)))
        block = llm.kv.export()
        packed = unpack_kv_cache_v2(pack_kv_cache_v2(packed_from_block(block)))
        expected, wanted = _go_on(llm, 60, 8)
        llm.reset()
        llm.kv.clear()
        llm.kv.load(block_from_packed(packed, block.tokens, llm.kv.layers))
        answer, logits = _go_on(llm, 60, 8)
    assert answer == expected
    assert np.array_equal(logits, wanted)
    shape = packed[0][0].shape
    assert shape == (47, block.groups[0].layers[0].n_head_kv, block.groups[0].layers[0].head_size_k)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    path = made.session_model(2, tmp_path)
    layers = unpack_kv_cache((made.FOLDER / "packed-v2-session.bin").read_bytes())
    with _llama(path, "mixed") as llm:
        shapes = llm.kv.layers
        for wrong, tokens, message in (
            (layers[:1], made.SESSION, "has 1 layers, the model keeps rows of 2"),
            (layers, made.SESSION[:-1], r"layer 0: its key has the shape"),
            (layers, [], "tokens: give the id"),
            (made.layers(), made.SESSION, r"its key has the shape \(3, 2, 4\): these tokens"),
            (((layers[0][0], layers[0][1][:, :1]), layers[1]), made.SESSION, "layer 0: its value"),
        ):
            with pytest.raises(ValueError, match=message):
                block_from_packed(wrong, tokens, shapes)
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
        one, other = (block_from_packed(rows, made.SESSION, llm.kv.layers) for rows in (layers, flat))
    assert max(made.SESSION) < zoo.N_VOCAB
    for a, b in zip(one.groups[0].layers, other.groups[0].layers, strict=True):
        assert np.array_equal(a.k, b.k)
        assert np.array_equal(a.v, b.v)
