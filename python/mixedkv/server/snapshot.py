"""What /v1/stats tells, and the gauges of /metrics: taken between two steps, on the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from mixedkv.kv.stats import KVStats
from mixedkv.server.metrics import WINDOW

if TYPE_CHECKING:
    from mixedkv.server.state import ServerState

_STARTED = time.time()
_SHOWN = 50  # latest requests
_SESSION_SECONDS = 1.0  # that the metrics wait for where sessions are written down
_NO_CACHE = KVStats(
    kv="none", mixed=False, n_ctx=0, n_seq_max=0, n_layer=0, quantization_threshold=0, threshold_capacity=0,
    group_size=0, sink_tokens=0, tokens_hot=0, tokens_cold=0, hot_budget=0, hot_shared=False, hot_evicted=0,
    bytes_total=0, bytes_cold=0, bytes_hot=0, bytes_view=0, bytes_compute=0, n_elements=0,
    sequences=(), layers=(),
)  # fmt: skip


def snapshot(server: ServerState) -> dict[str, Any]:
    """Everything, of all tenants; `sequences` and `recent` say whose each entry is."""
    engine = server.engine
    kv = _cache(server)
    natives = {seq.seq_id: seq for seq in kv.sequences}
    held, points = engine.pool.held(), engine.pool.checkpoints
    return {
        "object": "stats",
        "model": server.model_name,
        "uptime_seconds": time.time() - _STARTED,
        "requests": {
            "running": engine.n_running,
            "waiting": engine.n_queued,
            "parallel": engine.parallel,
            "max_queue": engine.max_queue,
        },
        "engine": {
            "steps": engine.n_steps,
            **server.metrics.rates(),
            "speculation": engine.speculation.stats(),
        },
        "cache": {
            "kv": kv.kv,
            "n_ctx": engine.n_ctx,
            "cells_used": kv.tokens,
            "tokens_hot": kv.tokens_hot,
            "tokens_cold": kv.tokens_cold,
            "hot_budget": kv.hot_budget,
            "hot_shared": kv.hot_shared,
            "hot_evicted": kv.hot_evicted,
            # rows that sequences see, less the rows there are: what sharing saves
            "tokens_shared": sum(len(seq.tokens) for seq in held) - kv.tokens,
            "bytes_total": kv.bytes_total,
            "bytes_hot": kv.bytes_hot,
            "bytes_cold": kv.bytes_cold,
            "checkpoints": len(points),
            "bytes_checkpoints": sum(point.nbytes for point in points),
            "bits_per_element": kv.bits_per_element,
            "sequences_running": sum(seq.running for seq in held),
            "sequences_idle": sum(not seq.running for seq in held),
            "evictions": engine.pool.n_evicted,
            **server.metrics.cache(),
        },
        "sequences": [_sequence(seq, natives.get(seq.id)) for seq in held],
        "layers": [asdict(layer) for layer in kv.layers or ()],
        "store": engine.connector_stats(),
        "recent": list(reversed(server.metrics.recent)),
    }


def _cache(server: ServerState) -> KVStats:
    """`_NO_CACHE` of a model that only embeds, or whose layers all keep a state."""
    if server.generates:
        with contextlib.suppress(LookupError):
            return server.engine.llm.kv.stats(by_layer=True)
    return _NO_CACHE


async def metrics_text(server: ServerState) -> tuple[bytes, float]:
    """The metrics with what the cache holds now, and the seconds they took the engine and the event loop."""
    seconds = 0.0
    if server.engine.alive:
        future = server.engine.call(partial(_timed_snapshot, server))
        now, seconds = await asyncio.wait_for(asyncio.wrap_future(future), 30)
        server.metrics.set_gauges(now)
    with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):  # the last known ones stay
        held = await asyncio.wait_for(server.contexts.held(), _SESSION_SECONDS)
        server.metrics.sessions.set(held.sessions)
        server.metrics.session_bytes.set(held.nbytes)
    began = time.perf_counter()
    text = server.metrics.expose()
    return text, seconds + time.perf_counter() - began


def _timed_snapshot(server: ServerState) -> tuple[dict[str, Any], float]:
    began = time.perf_counter()
    return snapshot(server), time.perf_counter() - began


def of_tenant(now: dict[str, Any], owner: str) -> dict[str, Any]:
    """What a snapshot tells one tenant: of others nothing but sums."""
    recent = [entry for entry in now["recent"] if entry["tenant"] == owner]
    return {
        **now,
        "sequences": [_without_tenant(entry) for entry in now["sequences"] if entry["tenant"] == owner],
        "latency": {
            "of_latest_requests": WINDOW,
            "ttft": _summary([entry["ttft_seconds"] for entry in recent]),
            "itl": _summary([entry["itl_seconds"] for entry in recent]),
        },
        "recent": [_without_tenant(entry) for entry in recent[:_SHOWN]],
    }


def _without_tenant(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "tenant"}


def _summary(values: list[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"count": 0, "median_seconds": None, "p95_seconds": None}
    nearest = known[-(-95 * len(known) // 100) - 1]
    return {"count": len(known), "median_seconds": median(known), "p95_seconds": nearest}


def _sequence(seq: Any, native: Any) -> dict[str, Any]:
    return {
        "tenant": seq.tenant,
        "id": seq.id,
        "state": "running" if seq.running else "kept" if seq.keep else "idle",
        "tokens": len(seq.tokens),
        "hot": native.n_hot if native is not None else 0,
        "cold": native.n_cold if native is not None else 0,
        "exact": seq.exact,
        "checkpoints": len(seq.checkpoints),
    }
