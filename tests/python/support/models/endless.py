"""A model whose greedy answers have no end: what takes long, and is cut off, takes it anywhere."""

from __future__ import annotations

from pathlib import Path

from support.models import zoo
from support.models.zoo.vocabulary import PIECES


def write_endless_model(path: Path) -> Path:
    """Write a model of random weights. Bytes and control tokens have a logit of 0, never the largest."""
    model = zoo.make("llama-64")
    model.tensors["output.weight"][: -len(PIECES)] = 0  # it writes letters, not bytes
    model.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model.write(path)
    return path
