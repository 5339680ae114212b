"""A second context on the served model, for vectors of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import parse_kv
from mixedkv.engine.batch.batch import Batch
from mixedkv.errors import EngineError
from mixedkv.llama import Llama
from mixedkv.model.embedding_model import only_embeds, ranks
from mixedkv.model.footprint import Sliding
from mixedkv.model.gguf_file import ModelFile
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.streaming.streaming import context_bytes

Vectors = npt.NDArray[np.float32]

_DEFAULT_N_CTX = 2048
_MAX_INPUTS = 64  # in one slice
_MAX_STATES = 8  # of a recurrent model, whose sequences each take memory
_MAX_LOGITS = 1 << 24  # llama.cpp makes logits of every token that is embedded, and holds them twice
_LEAST_SLICE = 32
_MEAN, _CLS, _LAST, _RANK = 1, 2, 3, 4  # llama_pooling_type


def embedding_bytes(file: ModelFile, *, n_ctx: int = 0, n_batch: int = 512) -> int:
    """Estimate the memory that an `EmbeddingContext` takes."""
    n_ctx = n_ctx or min(_DEFAULT_N_CTX, int(file.get("context_length", _DEFAULT_N_CTX)))
    n_batch = max(n_batch, n_ctx) if only_embeds(file) else n_batch
    return (
        context_bytes(file, parse_kv("f16"), n_ctx + n_batch, 1, Sliding(n_ubatch=n_batch))
        + 2 * 4 * _MAX_LOGITS
    )


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Tokens of one input from position `first` on; `ends` if they are its last ones."""

    tokens: Sequence[int]
    first: int
    ends: bool


class EmbeddingContext:
    """A context for embeddings, or for the scores of a ranking model. It uses the weights of `llm` and is
    freed with it. Not thread-safe.

    With causal attention an input can be evaluated in spans, since its rows stay in the cache until its end;
    otherwise it is one span.

    Args:
        llm: a loaded model; its own context is not touched.
        file: its header.
        n_ctx: tokens of the longest input; 0 takes 2048, or the model's if that is less.
        n_batch: maximum number of tokens in one slice; for a model that takes no spans, that of the longest
            input.

    Raises:
        ValueError: the model gives no vectors, is not made for this n_ctx, or there is no memory.
    """

    def __init__(self, llm: Llama, file: ModelFile, *, n_ctx: int = 0, n_batch: int = 512) -> None:
        if not _llama_cpp.has_vocabulary(llm):
            raise ValueError("embeddings: the body of a split model reads no text: use the whole model")
        self._model, self._streaming = _llama_cpp.model(llm), llm.streaming
        n_train = int(llama_cpp.llama_model_n_ctx_train(self._model))
        if n_ctx > n_train:
            raise ValueError(f"embedding_n_ctx={n_ctx}: this model takes {n_train} tokens at most")
        self.n_ctx, self.n_train = n_ctx or min(_DEFAULT_N_CTX, n_train), n_train
        self.pooling, self.ranks = self._choose_pooling(file), ranks(file)
        numbers = llama_cpp.llama_model_n_cls_out if self.ranks else llama_cpp.llama_model_n_embd_out
        self.n_embd = int(numbers(self._model))
        self.can_split = not only_embeds(file)
        n_vocab = int(llm.n_vocab())
        self.n_slice = min(n_batch, max(_LEAST_SLICE, _MAX_LOGITS // n_vocab))
        n_ubatch = self.n_slice if self.can_split else max(self.n_slice, self.n_ctx)
        self.n_seq = min(_MAX_STATES if not llm.kv.can_cut else _MAX_INPUTS, n_ubatch)
        self._batch = Batch(n_ubatch)
        self._held = 0  # the sequence whose input goes on
        self._holds = self._is_spoiled = False  # rows of that input gave values that are no numbers
        self._ctx = self._make(llm, n_ubatch)
        self._memory = llama_cpp.llama_get_memory(self._ctx)
        self._threads: _core.Threads | None = None
        llm.at_close(self.close)
        self._threads = _core.Threads(_llama_cpp.address(self._ctx))

    def _choose_pooling(self, file: ModelFile) -> int:
        pooling = file.get("pooling_type", 0)
        if llama_cpp.llama_model_has_encoder(self._model):
            raise ValueError("embeddings: a model of an encoder and a decoder gives no vectors here")
        return pooling if pooling in (_MEAN, _CLS, _LAST, _RANK) else _MEAN

    def _make(self, llm: Llama, n_ubatch: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        # one input that goes on, and a slice of others
        params.n_ctx = self.n_ctx + (n_ubatch if self.can_split else 0)
        params.n_batch = params.n_ubatch = n_ubatch
        params.n_seq_max, params.kv_unified = self.n_seq, True
        params.embeddings, params.pooling_type = True, self.pooling
        params.n_threads = params.n_threads_batch = llm.context_params.n_threads_batch
        # as llama_cpp.Llama; with it V would be summed in F16
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = llm.context_params.offload_kqv
        params.no_perf = True
        ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not ctx:
            raise ValueError(
                f"embeddings: llama.cpp could not make a context of {params.n_ctx} tokens; verbose shows why"
            )
        return ctx

    def evaluate(self, spans: Sequence[InputSpan]) -> Vectors:
        """Evaluate a slice and return the pooled vector of each span, [len(spans), n_embd]; NaN where the
        model's values are no numbers.

        The first span may go on with the input of the last one before; all others begin an input. Every
        span but the last ends its input, whose rows are then dropped.

        Raises:
            EngineError: llama.cpp failed; the input that went on is lost.
            ModelReadError: likewise, as a layer that is streamed could not be read.
        """
        if not spans[0].first:
            self.clear()  # the request for the rest was cancelled
        assert self._holds == bool(spans[0].first)
        seqs = [(self._held + i) % self.n_seq for i in range(len(spans))]
        vectors = np.full((len(spans), self.n_embd), np.nan, np.float32)
        n_known = int(self._is_spoiled)  # its rows have gone: there is nothing to go on from
        if spans[n_known:]:
            vectors[n_known:] = self._run_apart_if_spoiled(spans[n_known:], seqs[n_known:])
        self._held, self._holds = seqs[-1], not spans[-1].ends
        self._is_spoiled = self._holds and not np.isfinite(vectors[-1]).all()
        if self._holds:
            for seq in seqs if self._is_spoiled else seqs[:-1]:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)
        else:
            self.clear()
        if not np.isfinite(vectors).all():
            self._clear_unused()
        return vectors

    def _run_apart_if_spoiled(self, spans: Sequence[InputSpan], seqs: Sequence[int]) -> Vectors:
        """Evaluate spans together, or one by one where one gives values that are no numbers: llama.cpp's
        attention multiplies masked rows, so it spoils the others.
        """
        vectors = self._run(spans, seqs)
        if len(spans) == 1 or np.isfinite(vectors).all():
            return vectors
        runs = list(enumerate(zip(spans, seqs, strict=True)))
        can_run = [self._remove(seq, span.first) for _, (span, seq) in runs]
        self._clear_unused()
        for i, (span, seq) in runs:
            vectors[i] = self._run([span], [seq])[0] if can_run[i] else np.nan
            if not np.isfinite(vectors[i]).all():
                self._remove(seq, 0)
                self._clear_unused()
        return vectors

    def _remove(self, seq: int, p0: int) -> bool:
        """Remove a sequence's rows from `p0` on; return whether that was possible."""
        return not self._memory or bool(llama_cpp.llama_memory_seq_rm(self._memory, seq, p0, -1))

    def _clear_unused(self) -> None:
        if self._memory:
            _core.clear_unused(_llama_cpp.address(self._ctx))

    def _run(self, spans: Sequence[InputSpan], seqs: Sequence[int]) -> Vectors:
        """Run one llama_decode and return the pooled vectors."""
        self._batch.clear()
        for span, seq in zip(spans, seqs, strict=True):
            self._batch.add(span.tokens, span.first, seq, logits=True, every=True)
        code = self._batch.decode(self._ctx)
        if code != 0:
            self.clear()
            if self._streaming is not None:
                self._streaming.check()
            raise EngineError(f"llama_decode returned {code}")
        return np.stack([self._pooled(seq) for seq in seqs])

    def _pooled(self, seq: int) -> Vectors:
        vector = llama_cpp.llama_get_embeddings_seq(self._ctx, seq)
        if not vector:
            raise EngineError("llama.cpp gave no vector")
        return np.ctypeslib.as_array(vector, (self.n_embd,)).copy()

    def join(self, vectors: Sequence[Vectors], sizes: Sequence[int]) -> Vectors:
        """Return the vector of an input, of length 1, from those of its spans and their numbers of tokens;
        for a ranking model return its score.
        """
        if self.ranks:
            return vectors[-1]
        if self.pooling == _MEAN:
            vector = np.average(np.asarray(vectors, np.float64), axis=0, weights=sizes)
        else:
            vector = np.asarray(vectors[0 if self.pooling == _CLS else -1], np.float64)
        norm = np.linalg.norm(vector)
        return (vector / norm if norm > 0 else vector).astype(np.float32)

    def clear(self) -> None:
        """Drop all rows."""
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, False)
        self._holds = self._is_spoiled = False

    def close(self) -> None:
        """Free the context; `llm.close` calls it."""
        if self._ctx:
            if self._threads is not None:
                self._threads.close()
            llama_cpp.llama_free(self._ctx)
            self._ctx = None
