"""Every kind of model streams to the same bits; of those with routed experts what all tokens need stays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.errors import UnsupportedModelError
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.streaming import streaming
from mixedkv.streaming.layer_choice import LayerSizes
from support.models import zoo

pytestmark = [pytest.mark.full, pytest.mark.by_model]

TOKENS = list(range(3, 35))


def _open(path: Path, **options: Any) -> Llama:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where memory may not be locked
        return Llama(path, kv="f16", n_ctx=256, n_threads=1, verbose=False, **options)


def _logits(llm: Llama) -> list[bytes]:
    found = []
    for tokens in (TOKENS, [40], [41]):
        llm.eval(tokens)
        values = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        found.append(np.ctypeslib.as_array(values, (llm.n_vocab(),)).tobytes())
    return found


@pytest.mark.parametrize("name", [name for name in zoo.KINDS if name != "bert"])
def test_the_bits_of_the_resident_run(zoo_path: Callable[[str], Path], name: str) -> None:
    path = zoo_path(name)
    file = read_model_file(path)
    try:
        model_shape(file)
    except UnsupportedModelError:  # what its states take is not known
        with pytest.raises(UnsupportedModelError, match="memory for its KV cache is not known"):
            _open(path, stream_layers=1)
        return
    with _open(path, stream_mode="resident") as llm:
        expected = _logits(llm)
    sizes = LayerSizes.of(file)
    layers: Any = "auto" if sizes.routed else len(sizes.layers)
    with _open(path, stream_layers=layers) as llm:
        assert _logits(llm) == expected
        assert llm.streaming is not None
        assert llm.streaming.stats().mode == ("resident" if sizes.routed else "direct")


@pytest.mark.parametrize("name", ["qwen3moe", "glm4moe"])
def test_experts_are_read_as_they_are_chosen(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = zoo_path(name)
    with _open(path, stream_mode="resident") as llm:
        expected = _logits(llm)
    sizes = LayerSizes.of(read_model_file(path))
    kept = sizes.rest + sum(sizes.layers)
    assert sizes.routed > 0
    if name == "glm4moe":
        assert {"ffn_up_shexp", "ffn_up"} <= sizes.matrices  # what all tokens share, and the dense layer
    monkeypatch.setattr(streaming, "_SLACK", 0)
    monkeypatch.setattr(streaming, "compute_bytes", lambda *_: 0)
    monkeypatch.setattr(streaming, "context_bytes", lambda *_: 0)
    monkeypatch.setattr(streaming, "_room", lambda _: kept + sizes.routed - 1)
    with _open(path, memory="1GiB") as llm:
        assert llm.streaming is not None
        stats = llm.streaming.stats()
        assert stats.mode == "mmap"
        assert stats.layers == ()
        assert stats.bytes_resident == kept
        assert stats.bytes_locked in (0, kept)  # 0: it may not be
        assert _logits(llm) == expected
    monkeypatch.setattr(streaming, "_room", lambda _: kept - 1)
    with pytest.raises(ValueError, match=r"weights that all tokens need are .* KiB; .*raise memory"):
        _open(path, memory="1GiB")
    with pytest.raises(UnsupportedModelError, match=r"stream_layers=2: .* has routed experts.*Use 'auto'"):
        _open(path, stream_layers=2)
