"""The tables of kept KV and of the server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mixedkv.bench.output.cells import NONE, Row, Table, as_bytes, number, setting_name

_SHOWN_TURNS = 10


def store(rows: Sequence[Row]) -> Table:
    head = [
        "cache, where from",
        "first token",
        "",
        "of cold",
        "of disk",
        "restoring",
        "saving",
        "bytes",
        "of f16",
    ]
    return [head] + [
        [
            f"{setting_name(row)}, {row['tier'].replace('_', ' ')}",
            number(row.get("ttft"), ".4f"),
            _spread(row, "ttft"),
            number(row.get("vs_cold"), ".1%"),
            number(row.get("vs_disk"), ".0%"),
            number(row.get("restore"), ".4f"),
            number(row.get("save"), ".4f"),
            as_bytes(row.get("saved_bytes")),
            number(row.get("bytes_vs_f16"), ".1%"),
        ]
        for row in rows
    ]


def chat(rows: Sequence[Row]) -> Table:
    """Two lines for each cache: with its KV kept, and evaluated anew."""
    last = max(len(row.get("turns", ())) for row in rows)
    shown = sorted({*np.linspace(1, last, min(last, _SHOWN_TURNS)).astype(int).tolist()}) if last else []
    table = [["cache", "", *(f"turn {turn}" for turn in shown)]]
    for row in rows:
        turns = {turn["turn"]: turn for turn in row.get("turns", ())}
        for title, key, form in (
            ("kept", "ttft", ".4f"),
            ("anew", "ttft_cold", ".4f"),
            ("tokens evaluated", "n_evaluated", "d"),
        ):
            cells = [number(turns.get(turn, {}).get(key), form) for turn in shown]
            table.append([setting_name(row), title, *cells])
    return table


def serve(rows: Sequence[Row]) -> Table:
    head = [
        "server",
        "tok/s",
        "",
        "x one by one",
        "x stock",
        "first token: turn 1",
        "turn 2",
        "last turn",
        "cached",
    ]
    return [head] + [
        [
            setting_name(row),
            number(row.get("tps"), ".1f"),
            _spread(row, "tps"),
            number(row.get("vs_serial"), ".2f"),
            number(row.get("vs_stock"), ".2f"),
            *_by_turn(row),
            number(row.get("hit_ratio"), ".0%"),
        ]
        for row in rows
    ]


def _by_turn(row: Row) -> list[str]:
    """Milliseconds of the first turn, the second and the last."""
    turns = [f"{1e3 * turn['ttft']:.0f} ms" for turn in row.get("by_turn", ())]
    return [turns[i] if len(turns) > i else NONE for i in (0, 1)] + [turns[-1] if turns else NONE]


def stall(rows: Sequence[Row]) -> Table:
    head = [
        "server",
        "idle",
        "95%",
        "longest",
        "during",
        "95%",
        "longest",
        "during by idle",
        "prompt",
        "its first token",
    ]
    keys = ("idle", "idle_p95", "idle_max", "busy", "busy_p95", "busy_max")
    return [head] + [
        [
            setting_name(row),
            *(number(1e3 * row[key], ".1f") for key in keys),
            number(row["vs_idle"], ".2f"),
            number(row["n_prompt"], ",d"),
            number(1e3 * row["ttft"], ",.0f"),
        ]
        for row in rows
    ]


def _spread(row: Row, key: str) -> str:
    """Half the distance of the quartiles, where there are several rounds."""
    if len(row.get(f"{key}_samples", ())) < 2:
        return ""
    return f"+-{(row[f'{key}_high'] - row[f'{key}_low']) / row[key] / 2:.0%}"
