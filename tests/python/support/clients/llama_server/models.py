"""Small models in the place of those of the Hub that llama-server's tests name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.model.gguf_file import read_model_file
from support.models.adapters import write_adapter
from support.models.fim import write_fim_model
from support.models.images import png
from support.models.random_model import RandomModel
from support.models.zoo import SHAPES, encoder
from support.models.zoo.projector import write_projector

_N_EMBEDDED = 1024  # tokens, twice as many as bge-small has: its tokens are words
_CONSTANT = 4.0  # of the first element of each vector, which no layer changes
_AGAINST = -16.0  # of that element in the output rows of tokens that are not to be chosen


def write_models(folder: Path) -> None:
    """Write `tiny` to chat, `fim` to fill in, `bert` to embed, `ranker` to rank, `mmproj` and `lora`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = RandomModel(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, head_size=64, n_ff=512)
    model.write(folder / "tiny.gguf")
    _write_on(folder / "tiny.gguf")
    write_adapter(folder / "lora.gguf", folder / "tiny.gguf", 7, size=0.5)
    _longer(encoder.bert).write(folder / "bert.gguf")
    _longer(encoder.ranker).write(folder / "ranker.gguf")
    write_projector("mlp", int(read_model_file(folder / "tiny.gguf").get("embedding_length")), folder)
    with Llama(model_path(), vocab_only=True, verbose=False) as llm:
        names = ("<|user|>", "<|end|>", "<|assistant|>")
        before, after, missing = (
            llm.tokenize(name.encode(), add_bos=False, special=True)[0] for name in names
        )
    write_fim_model(folder / "fim.gguf", (before, after, missing))
    for i in range(2):
        (folder / f"img{i}.png").write_bytes(png(i))


def _write_on(path: Path) -> None:
    """Make a random model write letters to the end of its context, as stories260K writes stories. Nothing but
    a letter, or what a grammar forces, is ever likely.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    tensors["token_embd.weight"].data[:, 0] = _CONSTANT
    for name, tensor in tensors.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensor.data[0] = 0
    letters = (tensors["output.weight"].data != 0).any(axis=1)
    tensors["output.weight"].data[~letters, 0] = _AGAINST
    tensors["output.weight"].data[letters, 0] = 0
    for tensor in tensors.values():
        tensor.data.flush()


def _longer(make: Any) -> Any:
    model = make(SHAPES["bert"])
    model.keys["context_length"] = _N_EMBEDDED
    model.weight("position_embd.weight", 64, _N_EMBEDDED)
    return model
