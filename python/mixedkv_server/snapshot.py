"""Collects the numbers of /v1/stats and the gauges of /metrics, on the engine's thread between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from mixedkv.engine import Engine
from mixedkv.kv.stats import KVStats
from mixedkv_service.metrics import WINDOW

if TYPE_CHECKING:
    from mixedkv_server.state import ServerState

_STARTED = time.time()
_SHOWN = 50  # number of latest requests to list
_SESSION_SECONDS = 1.0  # seconds that the metrics wait for the database of sessions
_NO_CACHE = KVStats.without_rows(0, 0, by_layer=True)


def snapshot(server: ServerState) -> dict[str, Any]:
    """Return a model's numbers for all tenants; `sequences` and `recent` have the tenant of each entry."""
    engine = server.engine
    return {
        "object": "stats",
        "model": server.model_name,
        "parent": server.parent,
        "loaded": True,
        "uptime_seconds": time.time() - _STARTED,
        "requests": {
            "running": engine.n_running,
            "waiting": engine.n_queued,
            "parallel": engine.parallel,
            "max_queue": server.settings.max_queue,
        },
        "engine": {
            "steps": engine.n_steps,
            **server.metrics.rates(),
            "speculation": engine.speculation.stats(),
        },
        **_held(server, engine),
        "store": engine.connector_stats(),
        "recent": list(reversed(server.metrics.recent)),
    }


def _held(server: ServerState, engine: Engine) -> dict[str, Any]:
    """Return what the context holds: in total, by sequence and by layer."""
    kv = _cache(server, engine)
    natives = {seq.seq_id: seq for seq in kv.sequences}
    held, points = engine.pool.held(), engine.pool.checkpoints
    return {
        "cache": {
            "kv": kv.kv,
            "n_ctx": engine.n_ctx,
            "cells_used": kv.tokens,
            "tokens_hot": kv.tokens_hot,
            "tokens_cold": kv.tokens_cold,
            "quantization_threshold": kv.quantization_threshold,
            "hot_budget": kv.hot_budget,
            "hot_shared": kv.hot_shared,
            "hot_evicted": kv.hot_evicted,
            "pages_read": kv.pages_read,
            # rows that sequences see, minus the rows there are: the saving by sharing
            "tokens_shared": max(0, sum(len(seq.tokens) for seq in held) - kv.tokens),
            "bytes_total": kv.bytes_total,
            "bytes_hot": kv.bytes_hot,
            "bytes_given_back": kv.bytes_given_back,
            "bytes_cold": kv.bytes_cold,
            "checkpoints": len(points),
            "bytes_checkpoints": sum(point.nbytes for point in points),
            "bits_per_element": kv.bits_per_element,
            "bits_problem": kv.bits_problem,
            "tokens_running": sum(len(seq.tokens) for seq in held if seq.running),
            "sequences_running": sum(seq.running for seq in held),
            "sequences_idle": sum(not seq.running for seq in held),
            "evictions": engine.pool.n_evicted,
            **server.metrics.cache(),
        },
        "sequences": [_sequence(engine, seq, natives.get(seq.id)) for seq in held],
        "layers": [asdict(layer) for layer in kv.layers or ()],
    }


def _cache(server: ServerState, engine: Engine) -> KVStats:
    """Return the cache's stats; `_NO_CACHE` if the model only embeds or has no rows."""
    if server.generates:
        with contextlib.suppress(LookupError):
            return engine.llm.kv.stats(by_layer=True)
    return _NO_CACHE


async def metrics_text(server: ServerState) -> tuple[bytes, float]:
    """Return the metrics with what the cache holds now, and the seconds of work in the engine and the event
    loop. Time taken by other processes is not counted, as it would only keep an old text longer.
    """
    seconds = 0.0
    if alive := [each for each in server.all if each.engine.alive]:
        work = (asyncio.wrap_future(each.engine.call(partial(_timed_snapshot, each))) for each in alive)
        taken = await asyncio.wait_for(asyncio.gather(*work), 30)
        seconds = sum(took for _, took in taken)
        server.metrics.set_gauges([now for now, _ in taken])
    with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError):  # the last known ones stay
        held = await asyncio.wait_for(server.contexts.held(), _SESSION_SECONDS)
        server.metrics.sessions.set(held.sessions)
        server.metrics.session_bytes.set(held.nbytes)
    began = time.thread_time()
    text = server.metrics.expose()
    return text, seconds + time.thread_time() - began


def _timed_snapshot(server: ServerState) -> tuple[dict[str, Any], float]:
    began = time.thread_time()
    return snapshot(server), time.thread_time() - began


def of_tenant(now: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the part of a snapshot that one tenant may see, which has only sums over the other tenants."""
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


def _sequence(engine: Any, seq: Any, native: Any) -> dict[str, Any]:
    return {
        "tenant": seq.tenant,
        "id": seq.id,
        "state": "running" if seq.running else "kept" if seq.keep else "idle",
        "tokens": len(seq.tokens),
        "hot": native.n_hot if native is not None else 0,
        "cold": native.n_cold if native is not None else 0,
        "exact": engine.pool.is_exact(seq),
        "checkpoints": len(seq.checkpoints),
    }
