"""The setting of a live KV cache, of which the recent window can be changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig, check_window
from mixedkv.kv.busy import BusyGuard, exclusive


class WindowSettings(ABC):
    """What a `KVCache` was made with, and its window as it is now."""

    def __init__(self, setting: KVSetting) -> None:
        self._setting = self._made = setting
        self.busy = BusyGuard(lambda: self._address)

    @property
    @abstractmethod
    def _address(self) -> int:
        """Of the context."""

    @abstractmethod
    def limit_exact(self, p: int) -> None:
        """Rows of sequence 0 from `p` on are not exact."""

    @property
    def config(self) -> KVSetting:
        """The setting, a mixed one with its window as it is now. Any thread may ask."""
        return self._setting

    @property
    def quantization_threshold(self) -> int:
        """F16 tokens at most in the recent window of a sequence.

        Can be set up to the value the cache was made with. A smaller window takes effect at once; a larger
        one fills from new tokens only, since what has left it stays quantised.
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
        """First tokens of a sequence, kept in F16 for good. Can be set, to the value at creation at most."""
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
        """Set several of the window's settings at once; what is None stays.

        Raises:
            ValueError: a value is out of range, above what the cache was made with, or the cache is uniform.
        """
        now = self._setting
        if not isinstance(now, MixedKVConfig) or not isinstance(self._made, MixedKVConfig):
            raise ValueError(f"kv={str(now)!r} is a uniform cache: it has no window to set")
        window = (
            now.quantization_threshold if quantization_threshold is None else quantization_threshold,
            now.group_size if group_size is None else group_size,
            now.sink_tokens if sink_tokens is None else sink_tokens,
        )
        check_window(*window)
        _check_capacity("quantization_threshold", window[0], self._made.quantization_threshold)
        _check_capacity("sink_tokens", window[2], self._made.sink_tokens)
        _core.set_window(self._address, *window)
        after = replace(now, quantization_threshold=window[0], group_size=window[1], sink_tokens=window[2])
        if after != now:
            self._setting = after
            self.limit_exact(0)


def _check_capacity(field: str, value: int, capacity: int) -> None:
    if value > capacity:
        raise ValueError(
            f"{field}={value} is more than the {capacity} this cache was made with: "
            f"make the Llama with a larger {field}"
        )
