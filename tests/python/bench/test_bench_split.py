"""A small run of `mixedkv bench split`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.bench_support import run

pytestmark = pytest.mark.nightly


def test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--repeats", "3", "--n-prompt", "160", "--n-gen", "8", "--threads", "1"]
    all_rows = run(tmp_path / "s.json", "split", "--kv", "f16", *small)["rows"]
    rows = [row for row in all_rows if row["test"] == "split"]
    assert [row["delay_ms"] for row in rows] == [0, 5, 20, 100]
    for row in rows:
        assert row["round_trip_ms"] > row["delay_ms"]
        assert row["token_ms"] > row["delay_ms"]
        assert row["prompt_ms"] > row["delay_ms"]
        assert row["sent_bytes"] == row["received_bytes"] == 2 * 256
        assert row["repeating_ms"] > row["delay_ms"]
    assert rows[-1]["drafted_ms"] < 0.7 * rows[-1]["repeating_ms"]
    clients = [row for row in all_rows if row["test"] == "split_clients"]
    assert [row["n_clients"] for row in clients] == [1, 4, 8]
    for row in clients:
        assert min(row["tokens_per_second"], row["local_tokens_per_second"], row["ratio"]) > 0
    assert "Split, f16 no flash cache" in capsys.readouterr().out
