"""Images for tests, and what llama.cpp's own multimodal library makes of a prompt with them."""

from __future__ import annotations

import base64
import ctypes
import io
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import Llama

BEFORE, BEHIND = "What do you see here? ", " Say it in one word, please."
KINDS = {"llama-128": "mlp", "gemma3": "gemma3", "qwen2vl": "qwen2vl_merger"}  # with their projectors


def png(seed: int = 0, height: int = 40, width: int = 60) -> bytes:
    from PIL import Image  # of an extra: tests without images do without

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def logits_of_library(llm: Llama, mmproj: Path, image: bytes) -> np.ndarray:
    """Of what follows BEFORE, the image and BEHIND, as mtmd's own helpers evaluate it in sequence 0."""
    from llama_cpp import mtmd_cpp as mtmd
    from PIL import Image

    llm.kv.clear()

    pixels = np.ascontiguousarray(Image.open(io.BytesIO(image)).convert("RGB"))
    params = mtmd.mtmd_context_params_default()
    params.use_gpu = params.warmup = params.print_timings = False
    context: Any = mtmd.mtmd_init_from_file(str(mmproj).encode(), llm.model, params)
    bitmap = mtmd.mtmd_bitmap_init(
        pixels.shape[1], pixels.shape[0], pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    )
    chunks = mtmd.mtmd_input_chunks_init()
    text = BEFORE.encode() + mtmd.mtmd_default_marker() + BEHIND.encode()
    given = mtmd.mtmd_input_text(text, len(text), False, True)
    try:
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(given), bitmaps, 1) == 0
        end = llama_cpp.llama_pos()
        assert mtmd.mtmd_helper_eval_chunks(context, llm.ctx, chunks, 0, 0, 512, True, ctypes.byref(end)) == 0
        row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        return np.ctypeslib.as_array(row, (llm.n_vocab(),)).copy()
    finally:
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        mtmd.mtmd_free(context)
