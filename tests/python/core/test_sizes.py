"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest

from mixedkv.sizes import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("2GiB", 2**31), ("500M", 500 * 2**20), (" 4096 ", 4096), (".5 kb", 512)]
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5 min", 90), ("90", 90), ("2W", 1_209_600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1d", "1 month", "d", "1e9d", "nan", "\u0663d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)
