"""Metadata of another type than what is read is refused in a line, or taken where it means a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.cli.main import main
from mixedkv.errors import InvalidModelFileError, UnsupportedModelError
from mixedkv.model.gguf_copy import copy_metadata, write_and_close
from support.models.adapters import write_adapter

pytestmark = pytest.mark.full

_KIND = gguf.GGUFValueType
KEYS = (
    *("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "vocab_size", "pooling_type", "attention.causal"),
    *("attention.sliding_window", "nextn_predict_layers"),
)
VALUES: dict[str, tuple[Any, Any]] = {
    "text": ("abc", _KIND.STRING),
    "float": (2.5, _KIND.FLOAT32),
    "list of texts": (["a"], _KIND.ARRAY),
}


def changed(path: Path, key: str, value: Any, kind: Any) -> Path:
    reader, writer = gguf.GGUFReader(model_path()), gguf.GGUFWriter(path, "llama")
    del_key = reader.fields.pop(key, None)
    copy_metadata(reader, writer)
    writer.add_key_value(key, value, kind, _KIND.STRING if kind == _KIND.ARRAY else None)
    assert del_key is None or del_key.name == key
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    write_and_close(writer)
    return path


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_another_type_is_refused_in_a_line(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (value, kind) in VALUES.items():
        path = changed(tmp_path / "m.gguf", f"llama.{key}", value, kind)
        if name != "list of texts":  # whose values are not kept
            with pytest.raises(InvalidModelFileError, match=key):
                Llama(path, verbose=False)
        assert main(["run", "-m", str(path), "-p", "Hi", "-n", "1", "--threads", "1", "-c", "256"]) in (0, 2)
        err = capsys.readouterr().err
        assert "Traceback" not in err
        assert name == "list of texts" or f"its {key} is" in err


def test_an_activated_adapter_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = write_adapter(tmp_path / "plain.gguf", model_path(), 1)
    reader, path = gguf.GGUFReader(plain), tmp_path / "activated.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    copy_metadata(reader, writer)
    writer.add_array("adapter.alora.invocation_tokens", [5, 6])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    write_and_close(writer)
    Llama(model_path(), lora_path=str(plain), n_ctx=256, verbose=False).close()
    with pytest.raises(UnsupportedModelError, match=r"activated LoRA \(aLoRA\).*\[5, 6\]"):
        Llama(model_path(), lora_path=str(path), n_ctx=256, verbose=False)
    assert main(["serve", "--lora", f"a={path}", "--port", "0"]) == 2
    assert "activated LoRA" in capsys.readouterr().err
