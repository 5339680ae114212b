"""The context that a cache lies in, as the parts of a `KVCache` share it."""

from __future__ import annotations

import weakref
from typing import Any

import llama_cpp

from mixedkv import _core
from mixedkv.errors import CLOSED, ClosedError
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.context_lock import ContextGate


class CacheContext:
    """The context of one `Llama`, which it does not keep alive.

    Args:
        busy: the context's lock.
    """

    def __init__(self, llama: llama_cpp.Llama, busy: ContextGate) -> None:
        self._llama, self.busy = weakref.ref(llama), busy

    @property
    def llama(self) -> llama_cpp.Llama:
        """The `Llama`, from a weak reference.

        Raises:
            ClosedError: it is gone.
        """
        if (llama := self._llama()) is None:
            raise ClosedError(CLOSED)
        return llama

    @property
    def handle(self) -> Any:
        """The llama_context."""
        return _llama_cpp.context(self.llama)

    @property
    def address(self) -> int:
        """The native pointer of the llama_context, as `_core` takes it."""
        return _llama_cpp.address(self.handle)

    @property
    def memory(self) -> Any:
        """The context's llama_memory."""
        return llama_cpp.llama_get_memory(self.handle)

    @property
    def is_recurrent(self) -> bool:
        """True if all layers keep a state instead of rows."""
        return _llama_cpp.is_recurrent(self.llama)

    @property
    def can_cut(self) -> bool:
        """True if part of a sequence can be removed: not where recurrent layers keep a state of all of it."""
        return not (self.is_recurrent or _llama_cpp.is_hybrid(self.llama))

    @property
    def slides(self) -> bool:
        """True if layers have a sliding window."""
        return int(llama_cpp.llama_model_n_swa(_llama_cpp.model(self.llama))) > 0

    def layers(self) -> list[_core.Layer]:
        """Return the layers that have rows."""
        return [] if self.is_recurrent else _core.layers(self.address)

    def positions(self, seq: int) -> tuple[int, int]:
        """Return the lowest and highest position that all layers still hold of a sequence; (-1, -1) when it
        is empty.
        """
        memory = self.memory
        self.check_sequence("seq", seq)
        low = llama_cpp.llama_memory_seq_pos_min(memory, seq)
        return int(low), int(llama_cpp.llama_memory_seq_pos_max(memory, seq))

    def remove(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions [p0, p1) of a sequence, of all where they are negative; False if its memory cannot
        lose a part.
        """
        return bool(llama_cpp.llama_memory_seq_rm(self.memory, seq, p0, p1))

    def check_sequence(self, field: str, seq: int) -> None:
        n_seq_max = self.llama.context_params.n_seq_max
        if not 0 <= seq < n_seq_max:
            raise ValueError(f"{field}={seq}: this context has the sequences 0 to {n_seq_max - 1}")
