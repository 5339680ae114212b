"""The llama.cpp that an installed llama-cpp-python came with, which some tests compare with."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def stock_library() -> Path | None:
    """The folder of its libraries, None where it is not installed or came without them."""
    try:
        folder = Path(str(importlib.metadata.distribution("llama-cpp-python").locate_file("llama_cpp/lib")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return folder if any(folder.glob("*llama.*")) else None
