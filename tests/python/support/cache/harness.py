"""A thin driver of one llama_context on llama_cpp's ctypes API, for tests that need what `Llama` hides:
several sequences, streams, a chosen micro-batch, sequence operations, states, aborts.

The library is whichever one `llama_cpp` loads: conftest.py imports mixedkv first, so it is ours; the child
process of test_stock_identity.py does not, so there it is the stock one. Only `Mixed` settings import
mixedkv.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import _logger

from support.cache.hidden import hidden

_logger.set_verbose(False)

TYPES = {  # enum ggml_type
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q5_0": 6,
    "q8_0": 8,
    "lm4": 38,
    "tc3": 36,
    "bf16": 30,
}
FLASH_OFF, FLASH_ON = 0, 1
# Of models that say nothing else. With it tests that need the cache in CPU memory are skipped.
N_GPU_LAYERS = int(os.environ.get("MIXEDKV_TEST_GPU_LAYERS", "0"))


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """One of llama.cpp's own caches."""

    k: str = "f16"
    v: str = "f16"
    flash: bool = True


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """A mixed cache; names as in struct mixedkv_config."""

    k: str = "q4_0"
    v: str = "q4_0"
    threshold: int = 32
    group: int = 16
    sinks: int = 0
    attention: str = "auto"
    equalize: bool = True
    flash: bool = True
    draft: int = 16
    budget: int = 2**32 - 1  # MIXEDKV_HOT_BUDGET_ALL: what the cache promises a sequence that is alone
    rounding: int = 16  # with 8 bits a window that is off by one row could not be told from rounding
    layers: tuple[tuple[int, int, str, str], ...] = ()  # first, last (-1: the model's), types of K and V

    def with_(self, **changes: Any) -> Mixed:
        return replace(self, **changes)

    def of_layer(self, il: int) -> Mixed:
        """As a cache has it whose layers all are as this one."""
        types = [(k, v) for first, last, k, v in self.layers if first <= il and (last < 0 or il <= last)]
        k, v = types[0] if types else (self.k, self.v)
        return self.with_(k=k, v=v, layers=())

    def hot_begin(self, q: int) -> int:
        """First position of the recent window for a query at position q."""
        n = q + 1
        return 0 if n <= self.threshold else -(-(n - self.threshold) // self.group) * self.group

    def is_hot(self, q: int, p: int) -> bool:
        """Whether key position p is in the hot set of a query at position q."""
        return p < self.sinks or p >= self.hot_begin(q)

    def is_held(self, q: int, p: int) -> bool:
        """Whether a sequence whose last token is at q has not let go of the F16 row at position p."""
        return self.is_hot(max(q - self.draft, -1) if self.threshold else q, p)

    @property
    def slots(self) -> int:
        """F16 rows that a sequence has room for."""
        return self.sinks + (self.threshold and self.threshold + self.draft)


class DecodeError(RuntimeError):
    def __init__(self, code: int) -> None:
        super().__init__(f"llama_decode returned {code}")
        self.code = code


class InitError(RuntimeError):
    """llama_init_from_model() returned NULL; the text is mixedkv's message, if it left one."""


class Model:
    def __init__(self, path: Path | str, extra_buffers: bool = True, n_gpu_layers: int | None = None) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = N_GPU_LAYERS if n_gpu_layers is None else n_gpu_layers
        params.use_extra_bufts = extra_buffers  # repacked weights, AMX
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError(f"cannot load {path}")
        self.ptr: Any = model
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    @property
    def address(self) -> int:
        return _address(self.ptr)

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_model_free(self.ptr)
            self.ptr = None


def _address(pointer: Any) -> int:
    return int(getattr(pointer, "value", pointer))


class Ctx:
    """One context. `kv` chooses the cache; the rest are llama.cpp's own parameters."""

    def __init__(
        self,
        model: Model,
        kv: Uniform | Mixed,
        *,
        n_ctx: int = 512,
        n_ubatch: int = 64,
        n_batch: int = 2048,
        n_seq_max: int = 1,
        unified: bool = False,
        swa_full: bool = True,
        n_threads: int = 1,
        n_rs_seq: int = 0,
    ) -> None:
        self.model, self.kv, self.n_seq_max = model, kv, n_seq_max
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, min(n_ubatch, n_batch)
        params.n_seq_max, params.kv_unified, params.swa_full = n_seq_max, unified, swa_full
        params.n_threads = params.n_threads_batch = n_threads
        params.n_rs_seq = n_rs_seq
        params.type_k, params.type_v = TYPES[kv.k], TYPES[kv.v]
        params.flash_attn_type = FLASH_ON if kv.flash else FLASH_OFF
        params.no_perf = True
        params.op_offload = False  # what lies in CPU memory is computed there, beside a device too
        if isinstance(kv, Mixed):
            from mixedkv import _core

            config = _core.CacheConfig(
                threshold=kv.threshold,
                group_size=kv.group,
                sink_tokens=kv.sinks,
                attention=kv.attention,
                n_draft=kv.draft,
                hot_budget=kv.budget,
                layers=[(first, last, TYPES[k], TYPES[v]) for first, last, k, v in kv.layers],
            )
            _core.configure_next(config)
        self._abort: Any = None  # keeps the callback alive
        self.abort_calls = 0
        variables = (
            {"equalize": str(int(kv.equalize)), "rounding": str(kv.rounding)} if isinstance(kv, Mixed) else {}
        )
        with hidden(**variables):
            self.ptr: Any = llama_cpp.llama_init_from_model(model.ptr, params)
        if not self.ptr:
            message = ""
            if isinstance(kv, Mixed):
                message = _core.last_error()
            if N_GPU_LAYERS and "offload_kqv" in message:  # needs a cache in CPU memory
                pytest.skip(message)
            raise InitError(message)
        self.mem = llama_cpp.llama_get_memory(self.ptr)
        self.n_ctx_seq = llama_cpp.llama_n_ctx_seq(self.ptr)

    def __enter__(self) -> Ctx:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_free(self.ptr)
            self.ptr = None

    @property
    def address(self) -> int:
        return _address(self.ptr)

    # --- decoding ---

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | int | None = None,
        seq_ids: Sequence[Sequence[int]] | int = 0,
        logits_at: str | Iterable[int] = "all",
    ) -> np.ndarray:
        """Logits [n_outputs, n_vocab]. `positions`: one each, the first one, or None: after what is there.
        `seq_ids`: a list per token or one sequence. `logits_at`: "all", "last" or indices into the batch."""
        n = len(tokens)
        seqs = [[seq_ids]] * n if isinstance(seq_ids, int) else [list(s) for s in seq_ids]
        if positions is None:
            positions = self.pos_max(seqs[0][0]) + 1
        if isinstance(positions, int):
            positions = range(positions, positions + n)
        expected = (
            {"all": range(n), "last": [n - 1]}[logits_at] if isinstance(logits_at, str) else list(logits_at)
        )
        batch = llama_cpp.llama_batch_init(n, 0, max(len(s) for s in seqs))
        try:
            batch.n_tokens = n
            for i, (token, pos, ids) in enumerate(zip(tokens, positions, seqs, strict=True)):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), int(pos), len(ids)
                for j, seq in enumerate(ids):
                    batch.seq_id[i][j] = seq
                batch.logits[i] = i in expected
            code = llama_cpp.llama_decode(self.ptr, batch)
            if code != 0:
                raise DecodeError(code)
            return np.stack([self._logits(i) for i in expected])
        finally:
            llama_cpp.llama_batch_free(batch)

    def _logits(self, i: int) -> np.ndarray:
        row = llama_cpp.llama_get_logits_ith(self.ptr, i)
        return np.ctypeslib.as_array(row, (self.model.n_vocab,)).copy()

    def abort_after(self, n_calls: int | None) -> None:
        """The abort callback says stop from its n-th call on; None removes it. `abort_calls` counts them."""
        if N_GPU_LAYERS:
            pytest.skip("llama.cpp asks the abort callback on the CPU alone")
        self.abort_calls = 0

        def callback(_data: object) -> bool:
            self.abort_calls += 1
            return self.abort_calls > (n_calls or 0)

        self._abort = llama_cpp.ggml_abort_callback(callback if n_calls is not None else 0)
        llama_cpp.llama_set_abort_callback(self.ptr, self._abort, None)

    # --- sequences ---

    def rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        return bool(llama_cpp.llama_memory_seq_rm(self.mem, seq, p0, p1))

    def cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        llama_cpp.llama_memory_seq_cp(self.mem, src, dst, p0, p1)

    def keep(self, seq: int) -> None:
        llama_cpp.llama_memory_seq_keep(self.mem, seq)

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        llama_cpp.llama_memory_seq_add(self.mem, seq, p0, p1, delta)

    def div(self, seq: int, p0: int, p1: int, d: int) -> None:
        llama_cpp.llama_memory_seq_div(self.mem, seq, p0, p1, d)

    def clear(self, data: bool = True) -> None:
        llama_cpp.llama_memory_clear(self.mem, data)

    def pos_min(self, seq: int = 0) -> int:
        return llama_cpp.llama_memory_seq_pos_min(self.mem, seq)

    def pos_max(self, seq: int = 0) -> int:
        return llama_cpp.llama_memory_seq_pos_max(self.mem, seq)

    def can_shift(self) -> bool:
        return bool(llama_cpp.llama_memory_can_shift(self.mem))

    def context_shift(self, keep: int, discard: int, seq: int = 0) -> None:
        """As llama.cpp's tools do when a context is full: drop [keep, keep + discard), close the gap."""
        end = self.pos_max(seq) + 1
        self.rm(seq, keep, keep + discard)
        self.add(seq, keep + discard, end, -discard)

    # --- states ---

    def save(self) -> bytes:
        size = llama_cpp.llama_state_get_size(self.ptr)
        buffer = (ctypes.c_uint8 * size)()
        n = llama_cpp.llama_state_get_data(self.ptr, buffer, size)
        return bytes(buffer[:n])

    def load(self, data: bytes) -> int:
        """Bytes read; 0: refused."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return llama_cpp.llama_state_set_data(self.ptr, buffer, len(data))

    def save_seq(self, seq: int = 0) -> bytes:
        size = llama_cpp.llama_state_seq_get_size(self.ptr, seq)
        buffer = (ctypes.c_uint8 * size)()
        n = llama_cpp.llama_state_seq_get_data(self.ptr, buffer, size, seq)
        return bytes(buffer[:n])

    def load_seq(self, data: bytes, seq: int = 0) -> int:
        """Bytes read; 0: refused."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return llama_cpp.llama_state_seq_set_data(self.ptr, buffer, len(data), seq)

    # --- rows of a token range, as mixedkv._core gives and takes them ---

    def export(self, seq: int = 0, p0: int = 0, p1: int = -1) -> list[dict[str, Any]]:
        from mixedkv import _core

        return _core.export_rows(self.address, seq, p0, p1)

    def put(self, groups: list[dict[str, Any]], seq: int = 0, shift: int = 0, drop_from: int = -1) -> None:
        from mixedkv import _core

        _core.import_rows(self.address, seq, groups, shift, drop_from)

    # --- what mixedkv tells ---

    def stats(self) -> dict[str, Any]:
        from mixedkv import _core

        return _core.stats(self.address)

    def layers(self) -> list[dict[str, Any]]:
        from mixedkv import _core

        return _core.layers(self.address)

    def sequences(self) -> dict[int, dict[str, Any]]:
        from mixedkv import _core

        return {s["seq_id"]: s for s in _core.sequences(self.address)}

    def rows(
        self, il: int, which: str, seq: int = 0, p0: int = 0, p1: int = -1, unrotate: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows float32 [n, n_head_kv, head], positions [n], hot flags [n]."""
        from mixedkv import _core

        data, positions, hot = _core.read_rows(self.address, il, seq, which, p0, p1, unrotate)
        return np.asarray(data), np.asarray(positions), np.asarray(hot).astype(bool)

    def short_from(self, seq: int = 0) -> int:
        """First position that was evaluated without an F16 row of its window; -1: none."""
        from mixedkv import _core

        return _core.short_from(self.address)[seq]

    def release_hot_rows(self, seq: int) -> None:
        from mixedkv import _core

        _core.release_hot_rows(self.address, seq)

    def hold_hot_rows(self, seq: int) -> None:
        from mixedkv import _core

        _core.hold_hot_rows(self.address, seq)

    def window_is_whole(self, seq: int = 0, pos: int | None = None) -> bool:
        from mixedkv import _core

        return _core.window_is_whole(self.address, seq, self.pos_max(seq) + 1 if pos is None else pos)

    def scales(self, il: int) -> np.ndarray | None:
        """What K of a layer is stored times, float32 [n_head_kv, head]; None: as it is."""
        from mixedkv import _core

        return _core.scales(self.address, il)

    def set_window(self, threshold: int, group: int, sinks: int) -> None:
        from mixedkv import _core

        _core.set_window(self.address, threshold, group, sinks)


# --- measures ---


def prompt(n: int, seed: int = 1) -> list[int]:
    """Random tokens of the zoo's vocabulary."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, 259, n)]


def rel_rms(a: np.ndarray, b: np.ndarray) -> float:
    """RMS of a - b relative to the spread of b's logits."""
    spread = np.sqrt(np.mean((b - b.mean(axis=-1, keepdims=True)) ** 2))
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)) / spread)
