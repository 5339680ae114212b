"""The fields of the JSON object, which docs/bench-schema.md explains. A test holds the two together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCHEMA = "mixedkv.bench/1"  # a field that changes its meaning, or goes, makes it /2; a new one does not

_NUMBER = (int, float)
_TEXT_OR_NONE = (str, type(None))

OBJECT: dict[str, Any] = {
    "schema": str,
    "created": str,
    "command": str,
    "interrupted": bool,
    "machine": dict,
    "versions": dict,
    "model": dict,
    "rows": list,
}
MACHINE = {"cpu": str, "cores": int, "memory_bytes": int, "system": str, "load_average": list}
VERSIONS = {
    "mixedkv": str,
    "llama_commit": str,
    "isa": str,
    "llama_cpp_python": str,
    "python": str,
    "numpy": str,
}
MODEL = {
    "file": str,
    "name": str,
    "architecture": str,
    "bytes": int,
    "n_layer": int,
    "n_head": list,
    "n_head_kv": list,
    "head_size_k": list,
    "head_size_v": list,
    "n_ctx_train": int,
}

# of every row
_COMMON = {"test": str, "kv": str, "flash_attn": bool, "threads": int}
_OPTIONAL = {"error": str, "attention": str}
_CACHE = {"kv_bytes": int, "bits_per_element": (int, float, type(None)), "n_ctx": int}

_SPEED = {
    "engine": str,
    "depth": int,
    "n_prompt": int,
    "n_gen": int,
    "fill": str,
    **{
        f"{test}_{key}": _NUMBER
        for test in ("pp", "tg")
        for key in ("tps", "low", "high", "vs_f16", "vs_uniform")
    },
    "pp_samples": list,
    "tg_samples": list,
    "peer_version": str,
    "peer_extra_buffers": bool,
}
_MEMORY = {**_CACHE, "peak_rss_bytes": int, "budget_bytes": int, "longest_n_ctx": int}
_QUALITY = {
    **_CACHE,
    "mode": str,
    "control": bool,
    "n_positions": int,
    "kld_mean": _NUMBER,
    "kld_se": _NUMBER,
    "kld_median": _NUMBER,
    "kld_p99": _NUMBER,
    "kld_p999": _NUMBER,
    "kld_max": _NUMBER,
    "ppl": _NUMBER,
    "ppl_ratio": _NUMBER,
    "same_top1": _NUMBER,
    "rms_p_change": _NUMBER,
    "by_position": list,
}
_RECALL = {**_CACHE, "control": bool, "recall": list, "recall_variants": list, "agreement": dict}
_STORE = {
    "tier": str,
    "n_prompt": int,
    "n_new": int,
    **dict.fromkeys(("ttft", "ttft_low", "ttft_high", "vs_cold", "vs_disk", "bytes_vs_f16"), _NUMBER),
    "ttft_samples": list,
    "saved_bytes": int,
    "restore": _NUMBER,
    "save": _NUMBER,
    "start": _NUMBER,
}
_CHAT = {"n_gen": int, "turns": list}
_SERVER = {"engine": str, "n_ctx": int, "peer_version": str, "peer_extra_buffers": bool}
_SERVE = {
    **_SERVER,
    "clients": int,
    "conversations": int,
    "n_turns": int,
    "n_prompt": int,
    "n_gen": int,
    **dict.fromkeys(("tps", "tps_low", "tps_high", "vs_serial", "vs_stock", "hit_ratio"), _NUMBER),
    "tps_samples": list,
    "by_turn": list,
}
_STALL = {
    **_SERVER,
    "streams": int,
    "n_prompt": int,
    **dict.fromkeys(
        ("idle", "idle_p95", "idle_max", "busy", "busy_p95", "busy_max", "vs_idle", "ttft"), _NUMBER
    ),
}

ROWS: dict[str, dict[str, Any]] = {
    test: {**_COMMON, **_OPTIONAL, **fields}
    for test, fields in (
        ("speed", _SPEED),
        ("memory", _MEMORY),
        ("quality", _QUALITY),
        ("recall", _RECALL),
        ("store", _STORE),
        ("chat", _CHAT),
        ("serve", _SERVE),
        ("stall", _STALL),
    )
}
ITEMS: dict[str, dict[str, Any]] = {
    "by_position": {
        "from": int,
        "to": int,
        "n_positions": int,
        "kld_mean": _NUMBER,
        "kld_median": _NUMBER,
        "ppl_ratio": _NUMBER,
        "same_top1": _NUMBER,
    },
    "recall": {"depth": int, "cold": bool, "n": int, "correct": int, "low": _NUMBER, "high": _NUMBER},
    "recall_variants": {"variant": str, "n": int, "correct": int, "low": _NUMBER, "high": _NUMBER},
    "turns": {
        "turn": int,
        "n_prompt": int,
        "n_message": int,
        "n_evaluated": int,
        "ttft": _NUMBER,
        "ttft_cold": _NUMBER,
    },
    "by_turn": {
        "turn": int,
        "n": int,
        "ttft": _NUMBER,
        "low": _NUMBER,
        "high": _NUMBER,
        "prompt_tokens": (int, float, type(None)),
        "cached_tokens": (int, float, type(None)),
    },
}
AGREEMENT = {"n": int, "tokens": int, "mean": _NUMBER, "median": _NUMBER, "whole": _NUMBER}


def problems(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with an object of this schema; empty if it is right."""
    found = _wrong(data, OBJECT, "the object", exact=True)
    if found:
        return found
    if data["schema"] != SCHEMA:
        found.append(f"schema is {data['schema']!r} instead of {SCHEMA!r}")
    for name, fields in (("machine", MACHINE), ("versions", VERSIONS), ("model", MODEL)):
        found += _wrong(data[name], fields, name, exact=True)
    for i, row in enumerate(data["rows"]):
        found += _wrong_row(row, f"row {i}")
    return found


def _wrong_row(row: Any, where: str) -> list[str]:
    if not isinstance(row, dict) or row.get("test") not in ROWS:
        return [f"{where} is of no known test"]
    found = _wrong(row, ROWS[row["test"]], where)
    found += [f"{where} lacks {key}" for key in _COMMON if key not in row]
    for key, fields in ITEMS.items():
        for item in row.get(key, ()):
            found += _wrong(item, fields, f"{where}, {key}", exact=True)
    if "agreement" in row:
        found += _wrong(row["agreement"], AGREEMENT, f"{where}, agreement", exact=True)
    return found


def _wrong(data: Mapping[str, Any], fields: Mapping[str, Any], where: str, exact: bool = False) -> list[str]:
    found = [f"{where} has the unknown field {key}" for key in data if key not in fields]
    if exact:
        found += [f"{where} lacks {key}" for key in fields if key not in data]
    for key, kind in fields.items():
        if key in data and not isinstance(data[key], kind):
            found.append(f"{where}: {key}={data[key]!r} has the wrong type")
    return found
