"""Prometheus metrics, named as those of vLLM (`vllm:`) and llama.cpp's server (`llamacpp:`), but with an
underscore: Prometheus keeps colons for recording rules.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from mixedkv.engine import Observer, Progress
from mixedkv.errors import NotFiniteError

_FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 300, 600)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_RATE_WINDOW = 10.0  # seconds over which tokens per second are averaged
WINDOW = 1000  # number of latest requests to remember
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which says when the process began


class Metrics(Observer):
    """All metrics of a server, and the latest requests without their text.

    Args:
        by_tenant: count each tenant's tokens too.
    """

    def __init__(self, by_tenant: bool = False) -> None:
        self.registry = CollectorRegistry()

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mixedkv_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mixedkv_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"mixedkv_{name}", text, buckets=buckets, registry=self.registry)

        self.running = gauge("num_requests_running", "Answers that are being generated.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a place.")
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens, including those found in the cache.")
        self.evaluated = count("prompt_tokens_evaluated", "Prompt tokens that were evaluated.")
        self.generated = count("generation_tokens", "Tokens generated.")
        self.drafted = count("spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = count("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self.ttft = seconds(
            "time_to_first_token_seconds", "Seconds from the request to the first token.", _FIRST
        )
        self.itl = seconds("inter_token_latency_seconds", "Seconds between tokens.", _BETWEEN)
        self.e2e = seconds(
            "e2e_request_latency_seconds", "Seconds from the request to the end of the answer.", SECONDS
        )
        self.queue = seconds("request_queue_time_seconds", "Seconds that a request waited.", _FIRST)
        self.steps = seconds("iteration_seconds", "Seconds of a step of the engine.", _STEP)
        self.success = count("request_success", "Answers by how they ended.", "finished_reason")
        self.errors = count("request_failure", "Answers that failed.", "reason")
        self.queries = count("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self.hits = count("prefix_cache_hits", "Prompt tokens found in the cache, by tier.", "tier")
        self.approximate = count(
            "approximate_cache_hits", "Prompt tokens with rows that were computed elsewhere."
        )
        self.rows = gauge("kv_cache_rows", "Rows in the cache by state: hot, cold.", "state")
        self.bytes = gauge("kv_cache_bytes", "Bytes of KV: hot, cold, checkpoints, store.", "tier")
        self.dropped = count(
            "dropped_tokens", "Tokens dropped from prompts and answers that did not fit the context."
        )
        self.chunk_checks = count(
            "chunk_checks", "Answers from reused passages that were evaluated exactly as well."
        )
        self.chunk_kld = count("chunk_check_kld_nats", "Sum of the divergence of checked answers, in nats.")
        self.chunks_off = gauge("chunk_reuse_off", "1 when checks have switched the reuse of passages off.")
        self.usage = gauge("kv_cache_usage_perc", "Share of the context's cells in use, 0 to 1.")
        self.in_use = gauge("kv_cache_running_perc", "Share of the cells that running answers hold, 0 to 1.")
        self.lora = gauge(
            "lora_requests_info",
            "Adapters with running and waiting requests; the value is the time of the count.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        )
        self.sequences = gauge("kv_cache_sequences", "Sequences by state: running, idle.", "state")
        self.evictions = count("kv_cache_evictions", "Cached prefixes that were evicted, by tier.", "tier")
        self.preemptions = count("num_preemptions", "Answers that had to give their rows back.")
        self.pauses = count("num_pauses", "Answers that had to let another tenant's go first.")
        self.restores = count("kv_restores", "Prompts whose KV came from the store.")
        self.restore_failures = count("kv_restore_failures", "Failures to restore KV, by reason.", "reason")
        self.stored_tokens = count("kv_stored_tokens", "Tokens whose KV went to the store.")
        self.store_failures = count("kv_store_failures", "Failures to store KV, by reason.", "reason")
        self.rechecks = count(
            "kv_rechecks", "Stored sequences that were checked by evaluating them again.", "rows"
        )
        for rows in ("right", "wrong"):
            self.rechecks.labels(rows)
        self.remote_up = gauge("kv_remote_up", "1 when the store's remote answers.")
        self.sessions = gauge("sessions", "Living sessions of all tenants.")
        self.session_bytes = gauge("session_bytes", "Bytes of the records of sessions.")
        self.embedding_running = gauge("num_embedding_requests", "Requests for vectors at work or waiting.")
        self.embedding_outcomes = count(
            "embedding_requests", "Requests for vectors by how they ended.", "finished_reason"
        )
        self.embedding_inputs = count("embedding_inputs", "Inputs that were embedded.")
        self.embedding_tokens = count("embedding_tokens", "Tokens evaluated for vectors.")
        self.embedding_seconds = seconds(
            "embedding_request_latency_seconds", "Seconds of a request for vectors.", SECONDS
        )
        self.embedding_slices = seconds(
            "embedding_slice_seconds",
            "Seconds that running answers wait for a slice of embedding work.",
            _STEP,
        )
        self.by_tenant = by_tenant
        self.tenant_prompts = count("tenant_prompt_tokens", "Prompt tokens, by tenant.", "tenant")
        self.tenant_evaluated = count(
            "tenant_prompt_tokens_evaluated", "Prompt tokens that were evaluated, by tenant.", "tenant"
        )
        self.tenant_generated = count("tenant_generation_tokens", "Tokens generated, by tenant.", "tenant")
        self.http = http_counter(self.registry)
        self.recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._tokens: deque[tuple[float, int, int]] = deque()  # time, generated, evaluated
        self._hits = {"context": 0, "ram": 0, "disk": 0, "remote": 0}
        self._n_queries = 0
        for tier in self._hits:
            self.hits.labels(tier)

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    # --- Observer, on the engine's thread ---

    def started(self, job: Progress) -> None:
        assert job.work.t_start is not None
        self.queue.observe(job.work.t_start - job.work.t_submit)
        self.prompt_tokens.inc(job.n_prompt)
        if self.by_tenant:
            self.tenant_prompts.labels(job.tenant).inc(job.n_prompt)

    def prompt_done(self, job: Progress) -> None:
        n_cached = job.work.n_cached or 0
        self.evaluated.inc(job.n_prompt - n_cached)
        if self.by_tenant:
            self.tenant_evaluated.labels(job.tenant).inc(job.n_prompt - n_cached)
        if job.prefix.reuse:
            self.queries.inc(job.n_prompt)
            self._n_queries += job.n_prompt
            self.approximate.inc(job.work.n_approximate)
            if n_exact := job.work.n_cached_exact:
                self.hits.labels(job.work.cached_tier).inc(n_exact)
                self._hits[job.work.cached_tier] += n_exact

    def token(self, job: Progress, now: float) -> None:
        self.generated.inc()
        if self.by_tenant:
            self.tenant_generated.labels(job.tenant).inc()
        if job.work.t_last is None:
            self.ttft.observe(now - job.work.t_submit)
        else:
            self.itl.observe(now - job.work.t_last)

    def step(self, n_streams: int, n_prompt: int, seconds: float) -> None:
        self.steps.observe(seconds)
        now = time.monotonic()
        self._tokens.append((now, n_streams, n_prompt))
        while self._tokens and self._tokens[0][0] < now - _RATE_WINDOW:
            self._tokens.popleft()

    def speculated(self, n_drafted: int, n_accepted: int) -> None:
        self.drafted.inc(n_drafted)
        self.accepted.inc(n_accepted)
        self._tokens.append((time.monotonic(), n_accepted, 0))

    def finished(self, job: Progress, reason: str) -> None:
        self.success.labels(reason).inc()
        self._record(job, reason)

    def cancelled(self, job: Progress) -> None:
        self.success.labels("abort").inc()
        self._record(job, "abort")

    def failed(self, job: Progress, error: Exception) -> None:
        self.errors.labels("not_finite" if isinstance(error, NotFiniteError) else "engine").inc()
        self._record(job, "error")

    def evicted(self) -> None:
        self.evictions.labels("context").inc()

    def paused(self) -> None:
        self.pauses.inc()

    def preempted(self) -> None:
        self.preemptions.inc()

    def restore_failed(self, reason: str) -> None:
        self.restore_failures.labels(reason).inc()

    def restored(self, job: Progress) -> None:
        self.restores.inc()

    def stored(self, n_tokens: int) -> None:
        self.stored_tokens.inc(n_tokens)

    def store_failed(self, reason: str) -> None:
        self.store_failures.labels(reason).inc()

    def rechecked(self, problem: str) -> None:
        self.rechecks.labels("wrong" if problem else "right").inc()

    def checked(self, kld: float, is_off: bool) -> None:
        self.chunk_checks.inc()
        self.chunk_kld.inc(kld)
        self.chunks_off.set(is_off)

    def embedding_requests(self, n: int) -> None:
        self.embedding_running.inc(n)

    def embedded(self, outcome: str, seconds: float) -> None:
        self.embedding_outcomes.labels(outcome).inc()
        self.embedding_seconds.observe(seconds)

    def embedded_span(self, n_tokens: int, ends: bool) -> None:
        self.embedding_tokens.inc(n_tokens)
        if ends:
            self.embedding_inputs.inc()

    def embedding_slice(self, seconds: float) -> None:
        self.embedding_slices.observe(seconds)

    def _record(self, job: Progress, reason: str) -> None:
        now = time.perf_counter()
        self.e2e.observe(now - job.work.t_submit)
        self.dropped.inc(job.n_dropped)
        self.recent.append(
            {
                "time": time.time(),
                "tenant": job.tenant,
                "prompt_tokens": job.n_given,
                "cached_tokens": job.work.n_cached_exact,
                "approximate_cached_tokens": job.work.n_approximate,
                "dropped_tokens": job.n_dropped,
                "cached_tier": job.work.cached_tier,
                "exact": job.work.exact,
                "completion_tokens": job.n_answer,
                "ttft_seconds": None if job.work.t_first is None else job.work.t_first - job.work.t_submit,
                "itl_seconds": _between_tokens(job, reason),
                "seconds": now - job.work.t_submit,
                "finish_reason": reason,
            }
        )

    # --- gauges ---

    def set_gauges(self, snapshots: Sequence[dict[str, Any]]) -> None:
        """Set the gauges from snapshots of all models: sums, but for the store's folder, which all share."""
        caches, requests = ([now[part] for now in snapshots] for part in ("cache", "requests"))
        self.running.set(_sum(requests, "running"))
        self.waiting.set(_sum(requests, "waiting"))
        self.rows.labels("hot").set(_sum(caches, "tokens_hot"))
        self.rows.labels("cold").set(_sum(caches, "tokens_cold"))
        for tier in ("hot", "cold", "checkpoints"):
            self.bytes.labels(tier).set(_sum(caches, f"bytes_{tier}"))
        n_ctx = _sum(caches, "n_ctx")
        n_ctx = n_ctx or 1.0  # models that only embed have none
        self.usage.set(_sum(caches, "cells_used") / n_ctx)
        self.in_use.set(min(1.0, _sum(caches, "tokens_running") / n_ctx))
        for state in ("running", "idle"):
            self.sequences.labels(state).set(_sum(caches, f"sequences_{state}"))
        adapters = [now for now in snapshots if now["parent"]]
        busy = (
            ",".join(now["model"] for now in adapters if now["requests"][state])
            for state in ("running", "waiting")
        )
        self.lora.clear()
        self.lora.labels(str(len(adapters)), *busy).set_to_current_time()
        if stores := [now["store"] for now in snapshots if now["store"] is not None]:
            self.bytes.labels("ram").set(_sum(stores, "bytes_ram"))
            self.bytes.labels("disk").set(max(store["bytes_disk"] for store in stores))
            self.remote_up.set(all(store["remote"] and store["remote"]["up"] for store in stores))

    # --- for /v1/stats ---

    def rates(self) -> dict[str, float]:
        """Return the tokens per second over the last ten seconds."""
        now = time.monotonic()
        steps = [step for step in list(self._tokens) if step[0] >= now - _RATE_WINDOW]
        return {
            "generation_tokens_per_second": sum(step[1] for step in steps) / _RATE_WINDOW,
            "prompt_tokens_per_second": sum(step[2] for step in steps) / _RATE_WINDOW,
        }

    def cache(self) -> dict[str, Any]:
        hits = dict(self._hits)
        n = self._n_queries
        return {"queries_tokens": n, "hits_tokens": hits, "hit_rate": sum(hits.values()) / n if n else 0.0}


def http_counter(registry: CollectorRegistry) -> Counter:
    """Return the counter of answers."""
    labels = ["path", "status"]
    return Counter("mixedkv_http_requests", "HTTP requests by path and status.", labels, registry=registry)


def _sum(parts: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(part[name] for part in parts))


def _between_tokens(job: Progress, reason: str) -> float | None:
    """Return the seconds from one token to the next, on average; the model's end of its answer is a token
    too.
    """
    n = job.work.n_chosen - 1
    if job.work.t_first is None or job.work.t_last is None or n < 1:
        return None
    return (job.work.t_last - job.work.t_first) / n
