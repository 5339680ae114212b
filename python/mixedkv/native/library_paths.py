"""Paths of the C API, for programs that are compiled against it."""

from __future__ import annotations

from pathlib import Path

from mixedkv import _native


def include_dir() -> Path:
    """Return the folder of `mixedkv/mixedkv.h`, `llama.h` and the ggml headers it needs."""
    return _native.package_folder() / "include"


def cmake_dir() -> Path:
    """Return the folder of the CMake package, for `-Dmixedkv_DIR=`."""
    return _native.package_folder() / "share" / "cmake" / "mixedkv"
