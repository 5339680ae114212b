"""Finds the image encoder ("mmproj" file) that a repository of the Hugging Face Hub has beside a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mixedkv.model.gguf_file import read_model_file

_PATCHES = 4096  # of an image, at least: encoders that take any size have as many for a large one
_BEST = ("f16", "bf16", "q8_0", "")  # types of the file, by their names in it


def is_encoder(name: str) -> bool:
    """Return whether a file is called as image encoders are."""
    return name.endswith(".gguf") and "mmproj" in name.lower()


def choose_encoder(files: Iterable[str]) -> str | None:
    """Return the encoder to take of a repository's files, None if there is none."""
    found = sorted(filter(is_encoder, files))
    return next((file for kind in _BEST for file in found if kind in file.lower()), None)


def encoder_bytes(path: str | Path) -> int:
    """Estimate the memory that an encoder takes: its weights, and the activations of an image."""
    file = read_model_file(path)
    side, patch, width, n_ff = (
        int(file.get(f"vision.{name}", 0))
        for name in ("image_size", "patch_size", "embedding_length", "feed_forward_length")
    )
    n = max(_PATCHES, (side // max(patch, 1)) ** 2)
    return file.size + 4 * n * (8 * width + 3 * n_ff)


def encoder_beside(model: Path) -> Path | None:
    """Return the image encoder in the folder of a model, None if there is none or it cannot be read."""
    name = choose_encoder(each.name for each in model.parent.glob("*.gguf"))
    if name is None:
        return None
    path = model.parent / name
    try:
        file = read_model_file(path)
    except (ValueError, OSError):
        return None
    sees = file.architecture == "clip" and file.metadata.get("clip.has_vision_encoder")
    return path if sees else None
