"""Sessions of tenants: how many and how large, the list of them, where they are after a restart."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from support.patience import wait_for
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full

ANNA, BEN = "anna-key-0123456789", "ben-key-01234567890"
TEXT = "Once upon a time in a wood there was a very small house. " * 4


def create(server: Server, key: str = "", **body: Any) -> tuple[int, Any]:
    status, answer, _ = server.request("POST", "/v1/context", {"model": "m", "prompt": TEXT, **body}, key)
    return status, answer


@pytest.mark.nightly
def test_a_tenant_has_so_many_sessions_and_sees_its_own(tmp_path: Path) -> None:
    keys = key_file(tmp_path, f"anna:{ANNA} sessions=2", f"ben:{BEN} session_mb=0")
    metrics_key = tmp_path / "metrics"
    metrics_key.write_text("metrics-key-0123456789")
    metrics_key.chmod(0o600)
    options = ("--api-key-file", str(keys), "--metrics-key-file", str(metrics_key), "--n-ctx", "1024")
    with running(*options, "--model-name", "m") as server:
        assert [create(server, ANNA, session_id=f"s{i}")[0] for i in range(2)] == [201, 201]
        for key in (ANNA, BEN):
            status, answer = create(server, key)
            assert (status, answer["error"]["code"]) == (429, "session_quota")
            assert "delete some" in answer["error"]["message"]
            limit = "sessions=2 and session_mb=100" if key == ANNA else "sessions=1000 and session_mb=0"
            assert f"the limit is {limit}" in answer["error"]["message"]
        mine = server.request("GET", "/v1/context?limit=1", key=ANNA)[1]
        assert [item["session_id"] for item in mine["data"]] == ["s0"]
        assert (mine["has_more"], mine["sessions"], mine["max_sessions"]) == (True, 2, 2)
        rest = server.request("GET", "/v1/context?limit=1&after=s0", key=ANNA)[1]
        assert [item["session_id"] for item in rest["data"]] == ["s1"]
        assert not rest["has_more"]
        theirs = server.request("GET", "/v1/context", key=BEN)[1]
        assert (theirs["data"], theirs["sessions"], theirs["max_bytes"]) == ([], 0, 0)
        assert server.status("GET", "/v1/context?limit=0", key=ANNA) == 400
        assert server.status("GET", "/v1/context") == 401
        wait_for(lambda: "mixedkv_sessions 2.0" in server.metrics(key="metrics-key-0123456789"))
        assert server.status("DELETE", "/v1/context/s0", key=ANNA) == 200
        assert create(server, ANNA)[0] == 201


def test_with_a_store_sessions_outlive_a_kill(tmp_path: Path) -> None:
    """And so does their KV; what the store's key encrypts is not beside it in plain text."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    options = ("--store", str(tmp_path / "kv"), "--store-key-file", str(key), "--model-name", "m")
    options += ("--n-ctx", "1024")
    with running(*options) as server:
        assert create(server, session_id="s")[0] == 201
        server.wait_until_idle()
        server.stop(signal.SIGKILL)
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert tmp_path / "kv" / "sessions.sqlite3" in files
    assert not any(b"very small house" in path.read_bytes() for path in files)
    with running(*options) as server:
        body = {"session_id": "s", "prompt": " And", "max_tokens": 4, "temperature": 0}
        details = server.post("/v1/completions", body)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > 30
        assert details["cached_tier"] == "disk"
        assert server.status("DELETE", "/v1/context/s") == 200
        assert server.stop() == 0
    with sqlite3.connect(tmp_path / "kv" / "v1" / "index.sqlite3") as db:
        assert db.execute("SELECT COUNT(*) FROM sessions").fetchone() == (0,)
    db.close()


@pytest.mark.parametrize("kv", ["f16", "mixed"])
def test_a_context_of_a_few_words_is_reused(tmp_path: Path, kv: str) -> None:
    """Of no more than a few tokens, in the context and after a restart: its owner asked for it to be kept."""
    options = ("--store", str(tmp_path / "kv"), "--model-name", "m", "--n-ctx", "1024", "--kv", kv)
    body = {"session_id": "s", "prompt": " And then?", "max_tokens": 4, "temperature": 0}

    def answer(server: Server, **changes: Any) -> tuple[str, dict[str, Any]]:
        found = server.post("/v1/completions", {**body, **changes})
        return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]

    with running(*options) as server:
        status, made = create(server, session_id="s", prompt="Once.")
        assert status == 201
        assert 1 < (n := made["n_tokens"]) < 16
        text, details = answer(server)
        assert (details["cached_tokens"], details["cached_tier"]) == (n, "context")
        assert text == answer(server, use_kv_cache=False)[0]
        server.wait_until_idle()
        assert server.stop() == 0
    with running(*options) as server:
        again, details = answer(server, prompt="\nBut why?")  # all of the other turn is there too
        assert (details["cached_tokens"], details["cached_tier"]) == (n, "disk")
        assert again == answer(server, prompt="\nBut why?", use_kv_cache=False)[0]
