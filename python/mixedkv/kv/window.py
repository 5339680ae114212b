"""The window of F16 rows of a live cache: its settings as they are now."""

from __future__ import annotations

from dataclasses import replace

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.kv.cache_context import CacheContext
from mixedkv.native.context_lock import exclusive
from mixedkv.native.memory import memory_room
from mixedkv.sizes import format_bytes


class LiveWindow:
    """The setting of a cache, whose window can be changed while it lives.

    Attributes:
        setting: a mixed one with its window as it is now.
    """

    def __init__(self, context: CacheContext, setting: KVSetting) -> None:
        self._context, self.setting, self.busy = context, setting, context.busy

    @property
    def is_mixed(self) -> bool:
        return isinstance(self.setting, MixedKVConfig)

    def set(self, threshold: int | None, group_size: int | None, sink_tokens: int | None) -> None:
        """Set the window; None leaves a setting unchanged.

        Raises:
            ValueError: a value is out of range, the cache is uniform, or it was made without F16 rows.
            MemoryError: a larger window takes more memory than there is. The window stays as it was.
        """
        now = self.setting
        if not isinstance(now, MixedKVConfig):
            raise ValueError(f"kv={str(now)!r} is a uniform cache: it has no window to set")
        window = (
            now.quantization_threshold if threshold is None else threshold,
            now.group_size if group_size is None else group_size,
            now.sink_tokens if sink_tokens is None else sink_tokens,
        )
        after = replace(now, quantization_threshold=window[0], group_size=window[1], sink_tokens=window[2])
        self._check_room(after)
        _core.set_window(self._context.address, *window)
        self.setting = after

    def _check_room(self, requested: MixedKVConfig) -> None:
        """Raise MemoryError if the F16 rows of a wider window have no room in memory."""
        now, room = _core.stats(self._context.address), memory_room()
        if (
            room is None
            or not now["hot_slots"]
            or requested.quantization_threshold <= now["threshold_capacity"]
        ):
            return
        rows = min(requested.quantization_threshold, now["n_ctx_seq"]) * now["n_stream"]
        n_bytes = now["bytes_hot"] * rows // now["hot_slots"]  # beside those of now, until they have moved
        if n_bytes > room:
            raise MemoryError(
                f"quantization_threshold={requested.quantization_threshold} takes {format_bytes(n_bytes)} of "
                f"F16 rows, and {format_bytes(room)} of memory are left: set a smaller window"
            )

    @exclusive
    def short_from(self) -> list[int]:
        """Return for every sequence the first position that was evaluated without an F16 row of its window;
        -1 where there is none. Its rows are not exact from there on.
        """
        if not self.is_mixed:
            return [-1] * self._context.llama.context_params.n_seq_max
        return _core.short_from(self._context.address)

    @exclusive
    def release_hot_rows(self, seq: int = 0) -> None:
        """Allow F16 rows of an idle sequence to be evicted for others. A `checkpoint` that was taken before
        restores them.
        """
        if self.is_mixed:
            _core.release_hot_rows(self._context.address, seq)

    @exclusive
    def hold_hot_rows(self, seq: int = 0) -> None:
        """Take back `release_hot_rows`: the sequence goes on, though others may be evaluated before it."""
        if self.is_mixed:
            _core.hold_hot_rows(self._context.address, seq)

    @exclusive
    def drop_window(self, seq: int) -> None:
        """Have layers with a sliding window let go of a sequence, whose other rows stay. A `checkpoint` that
        was taken before restores them.
        """
        _core.drop_sliding(self._context.address, seq)
