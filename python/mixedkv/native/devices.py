"""Asks ggml what memory GPUs have."""

from __future__ import annotations

import ctypes

import llama_cpp
from llama_cpp import _ggml

_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


def gpu_room() -> int | None:
    """Return the bytes that are free on all GPUs together; None without one, or in a build that has none."""
    if not llama_cpp.llama_supports_gpu_offload():
        return None
    ggml = _ggml.libggml
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    rooms = []
    for i in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(i)))
        if ggml.ggml_backend_dev_type(device) == _GPU:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
            rooms.append(free.value)
    return sum(rooms) if rooms else None
