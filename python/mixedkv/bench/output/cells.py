"""What the tables put into their cells."""

from __future__ import annotations

from typing import Any

from mixedkv.kv.stats import format_bytes

Row = dict[str, Any]
Table = list[list[str]]

NONE = "-"


def setting_name(row: Row) -> str:
    """The setting, with what the spec leaves open."""
    name = row["kv"]
    if "engine" in row and row["engine"] != "mixedkv":
        name = f"{row['engine']}: {name}"
    if row["kv"].partition("/")[2] in ("", "f16", "bf16", "f32") and row["kv"].partition("/")[0] in (
        "f16",
        "bf16",
        "f32",
    ):
        name += " flash" if row["flash_attn"] else " no flash"
    return name + (" (reference)" if row.get("control") else "")


def number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def as_bytes(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)
