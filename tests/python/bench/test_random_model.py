"""Models of random weights can be served: they have a chat template and say letters."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv import Llama
from support.tools.random_model import RandomModel

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_a_random_model_says_letters(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    RandomModel(n_layer=1, n_embd=64, n_head=2, n_head_kv=1, n_ff=64, kind=kind).write(path)
    llm = Llama(path, n_ctx=256, n_threads=1, verbose=False)
    for seed in range(3):
        messages = [{"role": "user", "content": f"question {seed}"}]
        answer = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)
        text = answer["choices"][0]["message"]["content"]
        assert len(text) == 8
        assert set(text) <= set(" etaoinshrdlu"), text
    llm.close()
