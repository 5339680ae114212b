"""The hot-set rule, against the rule told as a story, and against what is read of it elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from mixedkv import MixedKVConfig, UniformKV
from mixedkv._core import HotWindow

pytestmark = pytest.mark.core

LONGEST = 26


def windows() -> Iterator[HotWindow]:
    """All small ones that a cache can have."""
    for threshold in range(9):
        for group in range(1, max(threshold, 1) + 1):
            for sinks in (0, 1, 2, 5):
                for n_draft in (0, 3) if threshold else (0,):
                    yield HotWindow(threshold, group, sinks, n_draft)


def hot_by_story(window: HotWindow, n: int) -> set[int]:
    """Tokens arrive one by one; whenever more than the threshold are hot the oldest group leaves."""
    recent: deque[int] = deque()
    for p in range(n):
        recent.append(p)
        if len(recent) > window.threshold:
            for _ in range(min(window.group_size, len(recent))):
                recent.popleft()
    return {*recent, *range(min(window.sink_tokens, n))}


def test_the_rule_is_the_story() -> None:
    for window in windows():
        for q in range(LONGEST):
            assert {p for p in range(q + 1) if window.contains(p, q)} == hot_by_story(window, q + 1), (
                window,
                q,
            )


def test_a_cut_is_exact_exactly_where_the_f16_rows_are_still_there() -> None:
    for window in windows():
        for n in range(1, LONGEST):
            last = max(n - 1 - window.n_draft, -1)  # the last query whose window let rows go
            held = {p for p in range(n) if window.contains(p, last)}
            assert held == {p for p in range(n) if p >= window.held_begin(n - 1) or p < window.sink_tokens}, (
                window,
                n,
            )
            for at in range(n):
                expected = {p for p in range(at) if window.contains(p, at)}
                assert window.cut_is_exact(n, at) == (expected <= held), (window, n, at)
            assert window.cut_is_exact(n, n)


def test_settings_have_it() -> None:
    config = MixedKVConfig(quantization_threshold=48, group_size=24, sink_tokens=3)
    assert config.window == HotWindow(48, 24, 3, 16)
    assert UniformKV().window.cut_is_exact(100, 7)


def test_windows_are_values() -> None:
    assert HotWindow(48, 24, 3) == HotWindow(48, 24, 3, 0) != HotWindow(48, 24, 3, 16)
    assert len({HotWindow(), HotWindow(0, 1), HotWindow(8, 1)}) == 2
    assert HotWindow() != (0, 1, 0, 0)
    assert str(HotWindow(48, 24, 3)) == "HotWindow(48, 24, 3, 0)"
