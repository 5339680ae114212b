"""The rows as tables for a terminal, plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mixedkv.bench.output import report_kept
from mixedkv.bench.output.cells import NONE, Row, Table, as_bytes, number, setting_name
from mixedkv.bench.output.schema import ROWS

_GAP = "  "


def render(data: dict[str, Any]) -> str:
    """All tables of a result, with what was run on top."""
    machine, model = data["machine"], data["model"]
    heads = (
        f", {_list(model['n_head'])} query heads over {_list(model['n_head_kv'])} KV heads "
        f"of size {_list(model['head_size_k'])}"
    )
    lines = [
        f"{model['name']}: {model['n_layer']} layers{heads if model['n_head'] else ''}",
        f"{machine['cpu']}, {machine['cores']} cores, {data['versions']['isa']} kernels, "
        f"load {machine['load_average'][0]:.1f} at the start",
    ]
    for test, title in _TITLES.items():
        rows = [row for row in data["rows"] if row["test"] == test]
        for heading, group in _groups(test, rows):
            lines += ["", title + heading, *_align(_TABLES[test](group)), *_notes(group)]
    if data["interrupted"]:
        lines += ["", "Interrupted: what was measured until then."]
    return "\n".join(lines)


def _groups(test: str, rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """One table per depth, mode or context, with the end of its title."""
    key, text = {
        "speed": ("depth", " at a depth of {} tokens"),
        "memory": ("n_ctx", " of a context of {} tokens"),
        "quality": ("mode", ", {}"),
        "recall": ("n_ctx", " in a context of {} tokens"),
        "store": ("n_prompt", ": a prompt of {} tokens, seconds to the first token"),
        "chat": ("n_gen", ": seconds to the first token by turn, answers of {} tokens"),
        "serve": ("clients", " with {} at a time"),
        "stall": ("streams", " of {} answers while a long prompt is evaluated, milliseconds"),
    }[test]
    for value in dict.fromkeys(row.get(key) for row in rows):
        group = [row for row in rows if row.get(key) == value]
        shown = {"batch": "in large batches", "token": "token by token"}.get(value, value)
        yield text.format(shown), group


def _speed(rows: Sequence[Row]) -> Table:
    n_prompt, n_gen = rows[0]["n_prompt"], rows[0]["n_gen"]
    head = ["cache", "attention", f"prompt of {n_prompt}, tok/s", "", "x f16", "x same type"]
    head += [f"generating {n_gen}, tok/s", "", "x f16", "x same type"]
    return [head] + [
        [setting_name(row), row.get("attention", NONE)]
        + [cell for key in ("pp", "tg") for cell in _rate_cells(row, key)]
        for row in rows
    ]


def _rate_cells(row: Row, key: str) -> list[str]:
    if f"{key}_tps" not in row:
        return [NONE, "", NONE, NONE]
    spread = (row[f"{key}_high"] - row[f"{key}_low"]) / row[f"{key}_tps"]
    ratios = [number(row.get(f"{key}_vs_{base}"), ".2f") for base in ("f16", "uniform")]
    return [
        f"{row[f'{key}_tps']:.1f}",
        f"+-{spread / 2:.0%}" if len(row[f"{key}_samples"]) > 1 else "",
        *ratios,
    ]


def _memory(rows: Sequence[Row]) -> Table:
    budget = as_bytes(rows[0].get("budget_bytes"))
    return [["cache", "bytes", "bits/element", "peak of the process", f"longest context in {budget}"]] + [
        [
            setting_name(row),
            as_bytes(row.get("kv_bytes")),
            number(row.get("bits_per_element"), ".2f"),
            as_bytes(row.get("peak_rss_bytes")),
            number(row.get("longest_n_ctx"), ","),
        ]
        for row in rows
    ]


def _quality(rows: Sequence[Row]) -> Table:
    head = [
        "cache",
        "bits",
        "KLD mean",
        "",
        "median",
        "99%",
        "99.9%",
        "max",
        "ppl ratio",
        "same top",
        "RMS dp",
    ]
    return [head] + [
        [
            setting_name(row),
            number(row.get("bits_per_element"), ".2f"),
            number(row.get("kld_mean"), ".2e"),
            "+-" + number(row.get("kld_se"), ".0e"),
            number(row.get("kld_median"), ".2e"),
            *(number(row.get(key), ".1e") for key in ("kld_p99", "kld_p999", "kld_max")),
            number(row.get("ppl_ratio"), ".4f"),
            number(row.get("same_top1"), ".2%"),
            number(row.get("rms_p_change"), ".2%"),
        ]
        for row in rows
    ]


def _recall(rows: Sequence[Row]) -> Table:
    best = max(rows, key=lambda row: len(row.get("recall", ())))
    depths = [item["depth"] for item in best.get("recall", ())]
    head = [
        "cache",
        "bits",
        *(f"{depth} back" for depth in depths),
        "all",
        "95%",
        "with rivals",
        "greedy agrees",
    ]
    return [head] + [_recall_cells(row, len(depths)) for row in rows]


def _recall_cells(row: Row, n_depths: int) -> list[str]:
    from mixedkv.bench.harness.summary import wilson

    cells = [setting_name(row), number(row.get("bits_per_element"), ".2f")]
    items = row.get("recall", [])
    cells += [f"{item['correct']}/{item['n']}" + ("" if item["cold"] else " hot") for item in items]
    cells += [NONE] * (n_depths - len(items))
    if not items:
        return [*cells, NONE, NONE, NONE, NONE]
    n, correct = (sum(item[key] for item in items) for key in ("n", "correct"))
    low, high = wilson(correct, n)
    rivals = [f"{x['correct']}/{x['n']}" for x in row["recall_variants"] if x["variant"] == "rivals"]
    agreement = row.get("agreement")
    agrees = f"{agreement['mean']:.0f} of {agreement['tokens']} tokens" if agreement else NONE
    return [*cells, f"{correct}/{n}", f"{low:.0%} to {high:.0%}", *(rivals or [NONE]), agrees]


_TABLES = {
    "memory": _memory,
    "speed": _speed,
    "quality": _quality,
    "recall": _recall,
    "store": report_kept.store,
    "chat": report_kept.chat,
    "serve": report_kept.serve,
    "stall": report_kept.stall,
}
_TITLES = {
    "memory": "Memory",
    "speed": "Speed",
    "quality": "Quality against an F32 cache",
    "recall": "Recall",
    "store": "Kept KV",
    "chat": "Chat",
    "serve": "Server",
    "stall": "Time between tokens",
}
assert _TABLES.keys() == ROWS.keys()


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if "error" in row:
            yield f"  {setting_name(row)}: {' '.join(row['error'].split())}"


def _align(table: Table) -> Iterator[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield ("  " + first + _GAP + _GAP.join(others)).rstrip()


def _list(values: Sequence[int]) -> str:
    return "/".join(map(str, values))
