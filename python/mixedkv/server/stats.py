"""What /v1/stats tells, and the gauges of /metrics: taken between two steps, on the engine's thread."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mixedkv.server.serving import Serving

_STARTED = time.time()


def snapshot(server: Serving) -> dict[str, Any]:
    """Everything, of all tenants; `sequences` and `recent` say whose each entry is."""
    engine = server.engine
    kv = engine.llm.kv.stats(by_layer=True)
    natives = {seq.seq_id: seq for seq in kv.sequences}
    held = engine.pool.held()
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
        "engine": {"steps": engine.n_steps, **server.metrics.rates()},
        "cache": {
            "kv": kv.kv,
            "n_ctx": engine.n_ctx,
            "cells_used": kv.tokens,
            "tokens_hot": kv.tokens_hot,
            "tokens_cold": kv.tokens_cold,
            # rows that sequences see, less the rows there are: what sharing saves
            "tokens_shared": sum(len(seq.tokens) for seq in held) - kv.tokens,
            "bytes_total": kv.bytes_total,
            "bytes_hot": kv.bytes_hot,
            "bytes_cold": kv.bytes_cold,
            "bits_per_element": kv.bits_per_element,
            "sequences_running": sum(seq.running for seq in held),
            "sequences_idle": sum(not seq.running for seq in held),
            "evictions": engine.pool.n_evicted,
            **server.metrics.cache(),
        },
        "sequences": [_sequence(seq, natives.get(seq.id)) for seq in held],
        "layers": [asdict(layer) for layer in kv.layers or ()],
        "store": server.keeper.stats() if server.keeper is not None else None,
        "recent": [dict(entry) for entry in reversed(server.metrics.recent)],
    }


def _sequence(seq: Any, native: Any) -> dict[str, Any]:
    return {
        "tenant": seq.tenant,
        "id": seq.id,
        "state": "running" if seq.running else "kept" if seq.keep else "idle",
        "tokens": len(seq.tokens),
        "hot": native.n_hot if native is not None else 0,
        "cold": native.n_cold if native is not None else 0,
        "exact": seq.exact,
    }
