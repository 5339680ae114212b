"""The model that comes with the package, and text with known answers for it. README.md here tells more."""

from __future__ import annotations

from pathlib import Path


def model_path() -> Path:
    """Return the bundled GGUF file."""
    return Path(__file__).parent / "recall-5m.q8_0.gguf"


def limits_of_the_model() -> str:
    """Return what somebody who asks the bundled model anything but its demo should know."""
    return (
        "the bundled model (5 MB) answers only questions about journals like its demo's, and talks nonsense "
        "otherwise; -m smollm2 downloads a small model (93 MB) that answers others"
    )
