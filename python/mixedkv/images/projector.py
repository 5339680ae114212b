"""The encoder that makes vectors of images for a model, of a GGUF file of its own ("mmproj")."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import _core
from mixedkv.errors import UnsupportedModelError
from mixedkv.images.pixels import Pixels, read_pixels
from mixedkv.images.prompt_image import ImageVectors, PromptImage, ids_of
from mixedkv.llama import Llama
from mixedkv.model.fingerprint import fingerprint
from mixedkv.native import llama_cpp as _llama_cpp

_KEPT = 1 << 28  # bytes of vectors of the latest images
_MARKER = b"<image>"  # of the library, nothing else is in the text


class Projector:
    """Encodes images, one at a time, on the thread that calls; what it made of the latest ones is kept.

    Args:
        llm: the model that sees them. Closing it closes the encoder.
        path: GGUF file.
        n_threads: None for the model's.
        verbose: show the library's log.

    Raises:
        ValueError: Pillow is not installed.
        UnsupportedModelError: the file is not of this model.
        InvalidModelFileError, OSError: it cannot be read.
    """

    def __init__(
        self, llm: Llama, path: str | os.PathLike[str], n_threads: int | None = None, *, verbose: bool = False
    ) -> None:
        try:
            import PIL  # noqa: F401
        except ModuleNotFoundError:
            raise ValueError(
                "images need pillow, which is not installed: pip install 'mixedkv[server]'"
            ) from None
        self._hash = fingerprint(path).encode()
        from llama_cpp import mtmd_cpp  # loads the library

        self._mtmd: Any = mtmd_cpp
        self._width = int(llama_cpp.llama_model_n_embd_inp(_llama_cpp.model(llm)))
        self._n_ubatch = int(llm.context_params.n_ubatch)
        self._kept: OrderedDict[bytes, PromptImage] = OrderedDict()
        self._one_at_a_time = threading.Lock()
        if not verbose:
            self._mtmd.mtmd_log_set(_llama_cpp.no_log, None)
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu = False
        params.print_timings = params.warmup = False
        params.media_marker = _MARKER
        params.n_threads = n_threads or int(llm.context_params.n_threads)
        with _core.Assertions() as assertions:
            self._context = self._mtmd.mtmd_init_from_file(os.fsencode(path), _llama_cpp.model(llm), params)
        if not self._context:
            raise UnsupportedModelError(
                f"{os.fspath(path)}: llama.cpp takes it for no image encoder of this model: use the mmproj "
                f"file that was made with the model. {assertions.failed}".rstrip()
            )
        llm.at_close(self.close)
        if not self._mtmd.mtmd_support_vision(self._context):
            self.close()
            raise UnsupportedModelError(f"{os.fspath(path)}: it encodes no images")

    def close(self) -> None:
        with self._one_at_a_time:
            if self._context:
                self._mtmd.mtmd_free(self._context)
                self._context = None

    def read(self, data: bytes, decode: Callable[[bytes], Pixels] = read_pixels) -> PromptImage:
        """Encode an image file as part of a prompt.

        Args:
            decode: makes pixels of it.

        Raises:
            ValueError: it is no image, or none that this encoder or the context can take.
        """
        pixels = decode(data)
        digest = hashlib.sha256(self._hash + str(pixels.shape).encode() + pixels.tobytes()).digest()
        with self._one_at_a_time:
            image = self._kept.pop(digest, None) or self._encode(pixels, digest)
            self._kept[digest] = image
            while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
            return image

    def _encode(self, pixels: Pixels, digest: bytes) -> PromptImage:
        if not self._context:
            raise ValueError("the model is closed")
        tokens: list[int] = []
        parts: list[ImageVectors] = []
        for i, chunk in enumerate(self._chunks(pixels)):
            if self._mtmd.mtmd_input_chunk_get_type(chunk) == self._mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                tokens += self._text(chunk)
                continue
            part = self._part(chunk, digest, i)
            tokens += part.ids.tolist()
            parts.append(part)
        return PromptImage(tokens, tuple(parts))

    def _chunks(self, pixels: Pixels) -> Iterator[Any]:
        """Yield what the library makes of an image: texts and tiles of the image."""
        mtmd, (height, width, _) = self._mtmd, pixels.shape
        data = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd.mtmd_bitmap_init(width, height, data)
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(_MARKER, len(_MARKER), False, True)
            bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
            if code := mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
                raise ValueError(f"this model's encoder does not take it (mtmd_tokenize: {code})")
            for i in range(mtmd.mtmd_input_chunks_size(chunks)):
                yield mtmd.mtmd_input_chunks_get(chunks, i)
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _text(self, chunk: Any) -> list[int]:
        n = ctypes.c_size_t()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        return list(tokens[: n.value])

    def _part(self, chunk: Any, digest: bytes, part: int) -> ImageVectors:
        mtmd = self._mtmd
        image = mtmd.mtmd_input_chunk_get_tokens_image(chunk)
        n = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        causal = not mtmd.mtmd_decode_use_non_causal(self._context, chunk)
        if not causal and n > self._n_ubatch:
            raise ValueError(
                f"the image needs {n} vectors in one step, and a step takes {self._n_ubatch}: raise n_batch"
            )
        if mtmd.mtmd_encode_chunk(self._context, chunk) != 0:
            raise ValueError("the encoder failed")
        output = mtmd.mtmd_get_output_embd(self._context)
        vectors = np.ctypeslib.as_array(output, (n, self._width)).astype(np.float32, copy=True)
        ids = ids_of(digest, part, int(mtmd.mtmd_input_chunk_get_n_pos(chunk)))
        grid = None
        if mtmd.mtmd_decode_use_mrope(self._context):
            places = (mtmd.mtmd_image_tokens_get_decoder_pos(image, 0, i) for i in range(n))
            grid = np.array([(place.t, place.y, place.x) for place in places], np.int32).T
        return ImageVectors(ids, vectors, grid, causal)
