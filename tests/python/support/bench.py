"""What the tests of `mixedkv bench` share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mixedkv.cli import main
from mixedkv_bench.output import read_result

Row = dict[str, Any]


def run(path: Path, *arguments: str) -> list[Row]:
    """The rows that a run of `mixedkv bench` writes, which must be right."""
    assert main(["bench", *arguments, "--threads", "1", "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    head, rows = read_result(path)
    assert [head.as_json(), *(row.as_json() for row in rows)] == lines
    return lines[1:]


def by_kv(rows: list[Row], **expected: object) -> dict[str, Row]:
    """Rows by their spec, of those that have the wanted values."""
    chosen = [row for row in rows if all(row.get(key) == value for key, value in expected.items())]
    assert len({row["kv"] for row in chosen}) == len(chosen), "several rows of one setting"
    return {row["kv"]: row for row in chosen}
