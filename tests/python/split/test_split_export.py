"""`mixedkv split export`: two files, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine import Engine
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.errors import InvalidModelFileError, UnsupportedModelError
from mixedkv.model.gguf_file import read_model_file
from mixedkv_split.export import export
from mixedkv_split.head import Head
from mixedkv_split.parts import BODY, HEAD, read_part
from support.models import zoo
from support.servers import split_servers

pytestmark = pytest.mark.full


def _tensors(path: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors}


def test_each_tensor_is_in_one_file_as_it_was(tmp_path: Path) -> None:
    parts = split_servers.split(model_path(), tmp_path)
    whole, head, body = (_tensors(path) for path in (model_path(), parts.head, parts.body))
    assert head == {name: data for name, data in whole.items() if name in head}
    assert whole.keys() == head.keys() | body.keys()
    assert all(body[name] == whole[name] for name in body.keys() - head.keys())
    assert parts.head_bytes + parts.body_bytes < 1.1 * model_path().stat().st_size


def test_the_body_has_no_words_and_no_embeddings(tmp_path: Path) -> None:
    parts = split_servers.split(model_path(), tmp_path)
    reader = gguf.GGUFReader(parts.body)
    (stand_in,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    assert stand_in.shape[1] == 1
    assert not stand_in.data.any()
    kept = [name for name in reader.fields if name.startswith("tokenizer.")]
    assert kept == ["tokenizer.ggml.model"]


def test_parts_know_each_other(tmp_path: Path) -> None:
    parts = split_servers.split(model_path(), tmp_path)
    head = read_part(read_model_file(parts.head), HEAD)
    body = read_part(read_model_file(parts.body), BODY)
    assert (head.pair, head.width) == (body.pair, body.width)
    other = split_servers.split(split_servers.write("llama-64", tmp_path), tmp_path)
    assert read_part(read_model_file(other.head), HEAD).pair != head.pair
    with pytest.raises(UnsupportedModelError, match="is not the head of a split model"):
        Head(parts.body)
    with pytest.raises(UnsupportedModelError, match="is not the head of a split model"):
        Head(model_path())


def test_files_of_another_version_are_refused_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mixedkv_split.export.VERSION", 2)
    parts = split_servers.split(split_servers.write("llama-64", tmp_path), tmp_path)
    with pytest.raises(UnsupportedModelError, match="has version 2 of the split format, this package has 1"):
        Head(parts.head)
    with pytest.raises(UnsupportedModelError, match="has version 2"):
        read_part(read_model_file(parts.body), BODY)


@pytest.mark.by_model
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma4", "gemma4 is not one of"),
        ("gpt-oss", "gpt-oss is not one of"),
        ("mamba", "mamba is not one of"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        split_servers.split(zoo.write(name, tmp_path), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.gguf"]


def test_embeddings_of_each_layer_are_refused_by_name(tmp_path: Path) -> None:
    g = zoo.make("gemma4")
    g.weight("per_layer_token_embd.weight", 32, zoo.N_VOCAB)
    g.write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="each layer of gemma4 embeds tokens anew"):
        split_servers.split(tmp_path / "model.gguf", tmp_path)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "body").write_text("mine")
    with pytest.raises(FileExistsError):
        export(model_path(), tmp_path / "head", tmp_path / "body")
    assert (tmp_path / "body").read_text() == "mine"
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_part_is_not_split_again(tmp_path: Path, part: str) -> None:
    parts = split_servers.split(model_path(), tmp_path)
    with pytest.raises((UnsupportedModelError, InvalidModelFileError), match="is a part of a split model"):
        export(getattr(parts, part), tmp_path / "head2", tmp_path / "body2")
    assert not (tmp_path / "head2").exists()


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    parts = split_servers.split(model_path(), tmp_path)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(parts.head.read_bytes()[:-1000])
    with pytest.raises(InvalidModelFileError, match="truncated"):
        Head(damaged)


def test_a_body_takes_no_text(tmp_path: Path) -> None:
    """llama.cpp would end the process."""
    parts = split_servers.split(model_path(), tmp_path)
    with Llama(parts.body, kv="f16", n_ctx=256, n_seq_max=2, kv_unified=True, verbose=False) as llm:
        with pytest.raises(UnsupportedModelError, match="no vocabulary"):
            llm.tokenize(b"the rain")
        with pytest.raises(UnsupportedModelError, match="no vocabulary"):
            llm("the rain")
        with pytest.raises(UnsupportedModelError, match="no vocabulary"):
            Tokenizer(llm)
        with Engine(llm) as engine, pytest.raises(ValueError, match="takes vectors"):
            engine.submit([0, 0])


def test_the_head_multiplies_as_llama_cpp_does(tmp_path: Path) -> None:
    """Embeddings and logits of the bundled model, which are Q8_0, to the bit of what numpy unpacks."""
    parts = split_servers.split(model_path(), tmp_path)
    (weights,) = (t for t in gguf.GGUFReader(model_path()).tensors if t.name == "token_embd.weight")
    unpacked = gguf.dequantize(weights.data, weights.tensor_type)
    with Head(parts.head, n_threads=1) as head:
        tokens = np.arange(0, head.tokenizer.n_vocab, 7)
        assert np.array_equal(head.embed(tokens), unpacked[tokens])
        hidden = np.random.default_rng(3).standard_normal((3, head.width)).astype(np.float32)
        logits = head.logits(hidden)
        assert np.abs(logits - hidden @ unpacked.T).max() < 0.05 * np.abs(logits).max()
        with pytest.raises(IndexError):
            head.embed([head.tokenizer.n_vocab])
