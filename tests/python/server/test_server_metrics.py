"""/metrics: whose business it is, and that asking for it costs others little."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mixedkv_server.app import SharedText
from mixedkv_service.keys import MetricsKey
from support.servers.server import key_file, running

pytestmark = pytest.mark.full

ANNA, BEN, METRICS = "anna-key-0123456789", "ben-key-01234567890", "metrics-key-0123456789"


def test_tenants_series_need_the_metrics_key(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    metrics_key = key_file(tmp_path / "m", METRICS)
    keys = key_file(tmp_path, f"anna:{ANNA}", f"ben:{BEN}")
    options = ("--n-ctx", "512", "--api-key-file", str(keys), "--metrics-key-file", str(metrics_key))
    with running(*options) as server:
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 5, "ignore_eos": True}, key=ANNA)
        server.wait_until_idle(ANNA)
        for key in ("", ANNA, METRICS + "0"):
            status, answer, _ = server.request("GET", "/metrics", key=key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        text = server.metrics(key=METRICS)
        assert 'mixedkv_tenant_generation_tokens_total{tenant="anna"} 5.0' in text
        assert "ben" not in text  # who has done nothing
        assert server.status("GET", "/v1/stats", key=METRICS) == 401


_BAD = [("short", 0o600), (METRICS, 0o644), (f"{METRICS}\nb", 0o600), ("", 0o600)]


@pytest.mark.parametrize(("text", "mode"), _BAD)
def test_a_bad_metrics_key_is_refused(tmp_path: Path, text: str, mode: int) -> None:
    path = key_file(tmp_path, text, mode=mode)
    with pytest.raises(ValueError, match="keys") as caught:
        MetricsKey.load(str(path))
    assert METRICS not in str(caught.value)


def test_many_who_ask_get_one_text() -> None:
    n_made = 0

    async def make() -> tuple[bytes, float]:
        nonlocal n_made
        n_made += 1
        await asyncio.sleep(0)
        return b"%d" % n_made, cost

    async def ask() -> None:
        assert set(await asyncio.gather(*(text.get() for _ in range(100)))) == {b"1"}
        assert await text.get() == b"1"  # it took an hour: it is good for ten
        now[0] += 9.9 * 3600
        assert await text.get() == b"1"
        now[0] += 0.2 * 3600
        assert await text.get() == b"2"

    cost, now = 3600.0, [0.0]
    text = SharedText(make, clock=lambda: now[0])
    asyncio.run(ask())


def test_a_text_that_could_not_be_made_is_made_again() -> None:
    results: list[Exception | tuple[bytes, float]] = [OSError("gone"), (b"x", 1.0)]

    async def make() -> tuple[bytes, float]:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def ask() -> None:
        with pytest.raises(OSError, match="gone"):
            await text.get()
        assert await text.get() == b"x"

    text = SharedText(make)
    asyncio.run(ask())
