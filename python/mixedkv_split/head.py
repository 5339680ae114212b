"""The client's part of a split model: tokens become vectors, hidden states become logits."""

from __future__ import annotations

import os
import threading

import gguf
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.errors import InvalidModelFileError, NotFiniteError
from mixedkv.llama import Llama
from mixedkv.model.gguf_file import TensorFacts, read_model_file
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.detokenizer import Detokenizer
from mixedkv_split.parts import HEAD, OUTPUT, OUTPUT_BIAS, PREFIX, TOKEN_EMBD, read_part

Floats = npt.NDArray[np.float32]


class Head:
    """Embeddings, output matrix and tokenizer, from the file that `export` wrote. Any thread may use it.

    The matrices stay in the file, which is mapped into memory, and are multiplied as they lie there, with
    llama.cpp's own arithmetic.

    Args:
        n_threads: for the output matrix.
        chat_format: one of llama-cpp-python's, for a model without a chat template.

    Attributes:
        pair: what the body of this head has as well.
        width: numbers in a vector.

    Raises:
        UnsupportedModelError: the file is no head, or one of another version.
        InvalidModelFileError: it is no GGUF file, or damaged.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, n_threads: int | None = None, chat_format: str = ""
    ) -> None:
        file = read_model_file(path)
        part = read_part(file, HEAD)
        self.pair, self.width = part.pair, part.width
        tensors = {tensor.name: tensor for tensor in file.tensors}
        data = np.memmap(path, np.uint8, mode="r")
        scale, self._logit_scale, self._softcap = (
            np.float32(file.metadata.get(PREFIX + name, default))
            for name, default in (("embedding_scale", 1.0), ("logit_scale", 1.0), ("logit_softcap", 0.0))
        )
        self._embedding_scale = scale
        n_threads = n_threads or max(1, (os.cpu_count() or 2) // 2)
        try:
            self._embeddings = _matrix(data, tensors[TOKEN_EMBD], self.width, n_threads)
            self._output = (
                _matrix(data, tensors[OUTPUT], self.width, n_threads)
                if OUTPUT in tensors
                else self._embeddings
            )
        except (KeyError, ValueError) as error:
            raise InvalidModelFileError(f"{path} is damaged: export the model again ({error})") from None
        self._bias: Floats | None = None
        if bias := tensors.get(OUTPUT_BIAS):
            self._bias = gguf.dequantize(_bytes(data, bias), gguf.GGMLQuantizationType(bias.kind))
        self._lock = threading.Lock()
        self._llm = Llama(path, kv="f16", vocab_only=True, n_ctx=_VOCAB_N_CTX, verbose=False)
        self.tokenizer = Tokenizer(self._llm, chat_format)
        self.detokenizer = Detokenizer(_llama_cpp.vocab(self._llm))

    def embed(self, tokens: npt.ArrayLike) -> Floats:
        """Return the embeddings of tokens, [n, width].

        Raises:
            IndexError: a token is not of this model.
            NotFiniteError: some of them are no numbers.
        """
        with self._lock:
            rows = self._embeddings.rows(np.asarray(tokens, np.int32))
        if not np.isfinite(rows).all():
            raise NotFiniteError("the head's vectors of these tokens")
        return rows if self._embedding_scale == 1 else rows * self._embedding_scale

    def logits(self, hidden: Floats) -> Floats:
        """Return the logits [n, n_vocab] of hidden states [n, width].

        Raises:
            NotFiniteError: some of them are no numbers.
        """
        with self._lock:
            logits = self._output.multiply(hidden)
        if self._bias is not None:
            logits += self._bias
        if self._logit_scale != 1:
            logits *= self._logit_scale
        if self._softcap != 0:
            logits = np.tanh(logits * (np.float32(1) / self._softcap)) * self._softcap
        if not np.isfinite(logits).all():
            raise NotFiniteError("the head's logits")
        return logits

    def close(self) -> None:
        self._llm.close()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_VOCAB_N_CTX = 1 << 17  # tokens that a text may have; the server has the last word


def _bytes(data: npt.NDArray[np.uint8], tensor: TensorFacts) -> npt.NDArray[np.uint8]:
    return data[tensor.start : tensor.start + tensor.n_bytes]


def _matrix(data: npt.NDArray[np.uint8], tensor: TensorFacts, width: int, n_threads: int) -> _core.Matrix:
    n_in, n_rows = tensor.shape
    if n_in != width:
        raise ValueError(f"{tensor.name} has rows of {n_in}")
    return _core.Matrix(_bytes(data, tensor), tensor.kind, n_in, n_rows, n_threads)
