"""Waits grow with failures in a row, and end with a success."""

from __future__ import annotations

import pytest

from mixedkv.backoff import Backoff

pytestmark = pytest.mark.core


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.failed() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.succeeded()
    assert (backoff.seconds, backoff.left, backoff.failed()) == (0.0, 0.0, 1.0)


def test_a_wait_ends_and_can_begin_again() -> None:
    now = 10.0
    backoff = Backoff(2.0, 60.0, lambda: now)
    assert backoff.left == 0.0
    backoff.failed()
    now = 11.5
    assert backoff.left == 0.5
    now = 12.0
    assert backoff.left == 0.0
    backoff.wait()
    assert (backoff.left, backoff.seconds) == (2.0, 2.0)
