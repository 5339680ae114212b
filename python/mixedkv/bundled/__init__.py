"""The model that comes with the package, and text with known answers for it. README.md here tells more."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Return the bundled GGUF file."""
    return Path(__file__).parent / "recall-5m.q8_0.gguf"
