"""One model and its contexts on llama_cpp's low-level API, for measurements that `Llama` would hide."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config.mixed import ggml_type
from mixedkv.errors import not_finite_at
from mixedkv.kv.stats import LayerStats
from mixedkv.limits import padded
from mixedkv.native.batch import NativeBatch, decode
from mixedkv.native.large_pages import move_to_large_pages
from mixedkv.native.llama_cpp import address
from mixedkv_bench.harness.cache_settings import Setting

MICRO_BATCH = 512
_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR


class CannotRunError(ValueError):
    """This model cannot run this setting; the text says why."""


class CacheFacts(TypedDict, total=False):
    """Fields of a row of a cache."""

    kv_bytes: int
    bits_per_element: float | None
    attention: str


class LoadedModel:
    """A model in memory, read by any number of contexts.

    Raises:
        ValueError: llama.cpp refuses the file.
    """

    def __init__(self, path: Path) -> None:
        log.start()
        params = llama_cpp.llama_model_default_params()
        self.path = path
        self.ptr: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.ptr:
            raise ValueError(f"{path} cannot be loaded: {log.text() or 'llama.cpp refuses it'}")
        move_to_large_pages(_core.mapped_weights(address(self.ptr)))  # as `Llama` does
        self.vocab = llama_cpp.llama_model_get_vocab(self.ptr)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.bos = int(llama_cpp.llama_vocab_bos(self.vocab))
        self.adds_bos = bool(llama_cpp.llama_vocab_get_add_bos(self.vocab)) and self.bos >= 0

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Return the tokens of a text, without the one that begins a document."""
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), False, special)
        if n < 0:
            raise ValueError(f"llama.cpp cannot tokenize a text of {len(data)} bytes")
        return list(tokens[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return b"".join(self._token_bytes(token) for token in tokens).decode("utf-8", errors="replace")

    def _token_bytes(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[: max(n, 0)]

    def random_tokens(self, n: int, seed: int = 1) -> npt.NDArray[np.int32]:
        """Return tokens of no meaning: the time a token takes does not depend on which it is."""
        return np.random.default_rng(seed).integers(0, self.n_vocab, n, dtype=np.int32)

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_model_free(self.ptr)
            self.ptr = None


class Context:
    """A cache of one setting, with one sequence; `decode_rows` knows more, which then share the cache.

    Raises:
        CannotRunError: the model cannot have this cache, or there is no memory for it.
    """

    def __init__(
        self, model: LoadedModel, setting: Setting, *, n_ctx: int, threads: int, n_seq: int = 1
    ) -> None:
        self.model, self.setting, self.n_seq = model, setting, n_seq
        self.n_past = 0
        self.ptr: Any = self._make(n_ctx, threads)
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.ptr))
        self._memory = llama_cpp.llama_get_memory(self.ptr)
        self._batch = NativeBatch(np.zeros(MICRO_BATCH, np.int32))

    def _make(self, n_ctx: int, threads: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, MICRO_BATCH, MICRO_BATCH
        params.n_seq_max, params.kv_unified = self.n_seq, self.n_seq > 1
        params.n_threads = params.n_threads_batch = threads
        params.type_k, params.type_v = ggml_type(self.setting.kv.type_k), ggml_type(self.setting.kv.type_v)
        params.flash_attn_type = int(self.setting.flash_attn)
        params.swa_full, params.no_perf = False, True  # windows alone, as `mixedkv.Llama` has them
        try:
            self.setting.kv.check_context(padded(n_ctx))
        except ValueError as error:
            raise CannotRunError(str(error)) from None
        log.start()
        reason = self._init(params)
        if not self.ptr:
            raise CannotRunError(reason or log.text() or "llama.cpp could not make a context")
        self._threads = _core.Threads(self.address)  # as `mixedkv.Llama` has them
        return self.ptr

    def _init(self, params: Any) -> str:
        """Make the context, and return the reason where there is none."""
        native = self.setting.kv.native()
        try:
            if native is not None:
                _core.configure_next(native)
            self.ptr = llama_cpp.llama_init_from_model(self.model.ptr, params)
        finally:
            _core.withdraw()
        return "" if self.ptr or native is None else _core.last_error()

    @property
    def address(self) -> int:
        return int(getattr(self.ptr, "value", self.ptr))

    def close(self) -> None:
        if self.ptr:
            self._threads.close()
            llama_cpp.llama_free(self.ptr)
            self.ptr = None

    def decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, outputs: str = "last") -> None:
        """Append at most `MICRO_BATCH` tokens to the sequence and wait until they are computed.

        `outputs` says which of them get logits: "last" or "all".
        """
        n = len(tokens)
        self._batch.logits[:n] = outputs == "all"
        self._batch.logits[n - 1] = True
        self._decode(tokens, np.arange(self.n_past, self.n_past + n))
        self.n_past += n

    def decode_rows(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int_],
        seqs: npt.NDArray[np.int_],
        needed: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Evaluate tokens of any sequences, and wait until they are computed; those `needed`, or all, get
        logits.
        """
        self._batch.seq[: len(seqs)] = seqs
        self._batch.logits[: len(tokens)] = True if needed is None else needed
        self._decode(tokens, positions)
        self._batch.seq[:] = 0

    def _decode(self, tokens: Sequence[int] | npt.NDArray[np.int32], positions: npt.NDArray[np.int_]) -> None:
        n = len(tokens)
        self._batch.inputs[:n], self._batch.pos[:n] = tokens, positions
        self._batch.native.n_tokens = n
        if (status := decode(self.ptr, self._batch.native)) != 0:
            raise CannotRunError(f"llama_decode failed with status {status}. {log.text()}")
        llama_cpp.llama_synchronize(self.ptr)
        if found := _core.take_not_finite(self.address):
            raise CannotRunError(str(not_finite_at(min(found.values()))))

    def copy(self, seq: int) -> None:
        """Let another sequence begin with all tokens of sequence 0; they share the rows."""
        llama_cpp.llama_memory_seq_cp(self._memory, 0, seq, -1, -1)

    def remove(self, seq: int) -> None:
        """Take a sequence out."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def feed(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Append any number of tokens, in micro-batches."""
        for i in range(0, len(tokens), MICRO_BATCH):
            self.decode(tokens[i : i + MICRO_BATCH])

    def logits(self, n: int = 1) -> npt.NDArray[np.float32]:
        """Return the logits [n, n_vocab] of the last `decode`, which asked for n of them. A view, until the
        next one.
        """
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.ptr), (n, self.model.n_vocab))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self.n_past = 0

    def save(self) -> npt.NDArray[np.uint8]:
        """Return the sequence's state, hot rows included."""
        size = llama_cpp.llama_state_seq_get_size(self.ptr, 0)
        data = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data(self.ptr, _pointer(data), size, 0)
        if written != size:
            raise CannotRunError(f"the state could not be saved. {log.text()}")
        return data

    def restore(self, state: npt.NDArray[np.uint8], n_past: int, seq: int = 0) -> None:
        """Put back a state of `n_past` tokens, into a sequence.

        Raises:
            CannotRunError: llama.cpp refuses it.
        """
        log.start()
        if llama_cpp.llama_state_seq_set_data(self.ptr, _pointer(state), state.size, seq) != state.size:
            raise CannotRunError(f"the state could not be restored. {log.text()}")
        self.n_past = n_past

    def facts(self) -> CacheFacts:
        """Return kv_bytes from llama.cpp's own memory breakdown, bits_per_element and attention.

        Raises:
            CannotRunError: the model keeps no keys and values.
        """
        path, stats = self.attention(), _core.stats(self.address)
        n = stats["n_elements"]
        return {
            "kv_bytes": stats["bytes_total"],
            "bits_per_element": round(8 * stats["bytes_total"] / n, 4) if n else None,
            "attention": path,
        }

    def attention(self) -> str:
        """Return who reads the rows, as `LayerStats.attention`; where layers differ, names joined by "+".

        Raises:
            CannotRunError: the model keeps no keys and values.
        """
        try:
            layers = _core.layers(self.address)
        except LookupError:
            raise CannotRunError("the model keeps no keys and values: it has no cache to measure") from None
        return "+".join(sorted({LayerStats.of(layer).attention for layer in layers})) or "llama.cpp"


def _pointer(data: npt.NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class _Log:
    """Keeps what llama.cpp says about an error, and shows none of it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._callback = llama_cpp.llama_log_callback(self._keep)

    def start(self) -> None:
        self._lines.clear()
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def text(self) -> str:
        """Return the errors since `start`, in one line."""
        return "; ".join(self._lines[-2:])

    def _keep(self, level: int, text: bytes, _data: object) -> None:
        if level == _LOG_ERROR:
            self._lines.append(text.decode(errors="replace").strip())


log = _Log()
