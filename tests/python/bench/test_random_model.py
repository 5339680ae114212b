"""Models of random weights can be served: they have a chat template and say letters."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from mixedkv import Llama
from support.models.random_model import RandomModel

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("kind", ["f16", "q4_0", "q4_k_m"])
def test_a_random_model_says_letters(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    RandomModel(n_layer=1, n_embd=256, n_head=2, n_head_kv=1, n_ff=256, kind=kind).write(path)
    llm = Llama(path, n_ctx=256, n_threads=1, verbose=False)
    for seed in range(3):
        messages = [{"role": "user", "content": f"question {seed}"}]
        answer = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)
        text = answer["choices"][0]["message"]["content"]
        assert len(text) == 8
        assert set(text) <= set(" etaoinshrdlu"), text
    llm.close()


@pytest.mark.parametrize("kind", ["f16", "q4_0", "q4_k_m"])
def test_weights_have_a_deviation(kind: str, tmp_path: Path) -> None:
    """Rows are as long in each type, so that activations neither vanish nor overflow through many layers."""
    path = tmp_path / "random.gguf"
    RandomModel(n_layer=8, n_embd=256, n_head=2, n_head_kv=1, n_ff=512, kind=kind).write(path)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name in ("token_embd", "blk.0.attn_q", "blk.0.attn_v", "blk.1.attn_v", "blk.0.ffn_down"):
        tensor = tensors[f"{name}.weight"]
        values = dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(1 / np.sqrt(values.shape[-1]), rel=0.05), name
        assert abs(values.mean()) < 0.12 * values.std(), name  # Q4_0 goes from -8 to 7


def test_the_mix_of_q4_k_m(tmp_path: Path) -> None:
    """An eighth of the layers at both ends and every third between have V and the way down in Q6_K."""
    path = tmp_path / "random.gguf"
    RandomModel(n_layer=16, n_embd=256, n_head=2, n_head_kv=1, n_ff=256, kind="q4_k_m").write(path)
    types = {each.name: each.tensor_type for each in gguf.GGUFReader(path).tensors}
    finer = [i for i in range(16) if types[f"blk.{i}.ffn_down.weight"] == gguf.GGMLQuantizationType.Q6_K]
    assert finer == [0, 1, 4, 7, 10, 13, 14, 15]
    assert finer == [
        i for i in range(16) if types[f"blk.{i}.attn_v.weight"] == gguf.GGMLQuantizationType.Q6_K
    ]
    assert types["output.weight"] == gguf.GGMLQuantizationType.Q6_K
    assert types["token_embd.weight"] == types["blk.0.ffn_up.weight"] == gguf.GGMLQuantizationType.Q4_K
