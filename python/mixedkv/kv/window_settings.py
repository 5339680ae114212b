"""The settings of a live KV cache, whose recent window can be changed."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import llama_cpp

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.errors import CLOSED, ClosedError
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.context_lock import exclusive
from mixedkv.native.memory import memory_room
from mixedkv.sizes import format_bytes


class WindowSettings:
    """The context of a `KVCache`, the settings that it was made with, and its window as it is now."""

    def __init__(self, llama: llama_cpp.Llama, setting: KVSetting, busy: _core.Gate) -> None:
        self._owner, self._setting, self.busy = weakref.ref(llama), setting, busy

    @property
    def _llama(self) -> llama_cpp.Llama:
        """The `Llama`, which is freed with its last reference: this is none."""
        if (llama := self._owner()) is None:
            raise ClosedError(CLOSED)
        return llama

    @property
    def _address(self) -> int:
        return _llama_cpp.address(_llama_cpp.context(self._llama))

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(_llama_cpp.context(self._llama))

    @property
    def config(self) -> KVSetting:
        """The setting, a mixed one with its window as it is now. Any thread may ask."""
        return self._setting

    @property
    def quantization_threshold(self) -> int:
        """F16 tokens at most in the recent window of a sequence.

        Can be set while the cache lives. A smaller window takes effect at once, and its memory goes back to
        the system where the cache lies in that of the CPU. A larger one fills from new tokens only, since
        what has left it stays quantised; beyond `KVStats.threshold_capacity` it allocates F16 rows, whose
        memory stays with the cache.
        """
        return self._setting.window.threshold

    @quantization_threshold.setter
    def quantization_threshold(self, value: int) -> None:
        self.set_window(quantization_threshold=value)

    @property
    def group_size(self) -> int:
        """Tokens that leave the window together. Can be set, to the threshold at most."""
        return self._setting.window.group_size

    @group_size.setter
    def group_size(self, value: int) -> None:
        self.set_window(group_size=value)

    @property
    def sink_tokens(self) -> int:
        """First tokens of a sequence, kept in F16 for good. Can be set, as far as there is room."""
        return self._setting.window.sink_tokens

    @sink_tokens.setter
    def sink_tokens(self, value: int) -> None:
        self.set_window(sink_tokens=value)

    @exclusive
    def set_window(
        self,
        *,
        quantization_threshold: int | None = None,
        group_size: int | None = None,
        sink_tokens: int | None = None,
    ) -> None:
        """Set several of the window's settings at once; None leaves a setting unchanged.

        Raises:
            ValueError: a value is out of range, the cache is uniform, or it was made without F16 rows.
            MemoryError: a larger window takes more memory than there is. The window stays as it was.
        """
        now = self._setting
        if not isinstance(now, MixedKVConfig):
            raise ValueError(f"kv={str(now)!r} is a uniform cache: it has no window to set")
        window = (
            now.quantization_threshold if quantization_threshold is None else quantization_threshold,
            now.group_size if group_size is None else group_size,
            now.sink_tokens if sink_tokens is None else sink_tokens,
        )
        after = replace(now, quantization_threshold=window[0], group_size=window[1], sink_tokens=window[2])
        self._check_room(after)
        _core.set_window(self._address, *window)
        self._setting = after

    def _check_room(self, wanted: MixedKVConfig) -> None:
        """Raise MemoryError if the F16 rows of a wider window have no room in memory."""
        now, room = _core.stats(self._address), memory_room()
        if room is None or not now["hot_slots"] or wanted.quantization_threshold <= now["threshold_capacity"]:
            return
        rows = min(wanted.quantization_threshold, now["n_ctx_seq"]) * now["n_stream"]
        n_bytes = now["bytes_hot"] * rows // now["hot_slots"]  # beside those of now, until they have moved
        if n_bytes > room:
            raise MemoryError(
                f"quantization_threshold={wanted.quantization_threshold} takes {format_bytes(n_bytes)} of "
                f"F16 rows, and {format_bytes(room)} of memory are left: set a smaller window"
            )
