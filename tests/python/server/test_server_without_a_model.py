"""Parts of the server that need no model: refused requests, statistics, settings, keys."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from mixedkv.chunks.passages import parse_chunks
from mixedkv.engine.jobs.job import Delta, Done, Job
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ClosedError, ContextLengthError, QueueFullError
from mixedkv.work.turns import TenantLimits
from mixedkv_server.api.usage import usage
from mixedkv_server.api_error import ApiError
from mixedkv_server.pending import PendingRequest
from mixedkv_server.settings import ServerSettings
from mixedkv_server.snapshot import of_tenant
from mixedkv_server.warming import read_warm_file
from mixedkv_service.keys import Keys
from mixedkv_split.split_settings import SplitSettings
from support.patience import PATIENCE
from support.servers.server import key_file

pytestmark = pytest.mark.core

# --- requests ---


class FullEngine:
    """Takes no job."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def submit_jobs(self, jobs: list[Job]) -> None:
        raise self.error("no")


@pytest.mark.parametrize(
    ("error", "status"), [(QueueFullError, 429), (ClosedError, 503), (ContextLengthError, 400)]
)
def test_a_refused_request_leaves_nothing_in_memory(error: type[Exception], status: int) -> None:
    """Not even until its time would have been over: thousands may be refused in that time."""

    async def refuse() -> None:
        job = Job(Request(prompt=[1, 2, 3], max_tokens=0))
        left = weakref.ref(job)
        pending = PendingRequest(FullEngine(error), [job], 600)  # type: ignore[arg-type]
        with pytest.raises(ApiError) as caught:
            pending.__enter__()
        assert caught.value.status == status
        del job, pending, caught
        gc.collect()
        assert left() is None

    asyncio.run(refuse())


def test_a_request_that_waits_says_so_now_and_then() -> None:
    class Engine:
        def submit_jobs(self, jobs: Any) -> None:
            self.jobs = jobs

        def cancel(self, job: Any) -> None:
            pass

    async def wait() -> list[Any]:
        engine, job = Engine(), Job(Request(prompt=[1], max_tokens=0, stream=True))
        with PendingRequest(engine, [job], 60) as pending:  # type: ignore[arg-type]
            pending.tick_every(0.02)
            got: list[Any] = [await pending.next(), await pending.next()]
            job.deliver(Delta("a"))
            got.append(await pending.next())
            job.deliver(Done("stop", "b"))
            return [*got, await pending.next()]

    assert asyncio.run(wait()) == [None, None, (0, Delta("a")), (0, Done("stop", "b"))]


# --- statistics ---


def test_a_tenants_latency_is_that_of_its_own_requests() -> None:
    recent = [
        {"tenant": tenant, "ttft_seconds": seconds, "itl_seconds": None}
        for tenant, seconds in [("ben", 9.0), *(("anna", float(i)) for i in range(1, 101)), ("anna", None)]
    ]
    now = of_tenant({"sequences": [{"tenant": "ben", "id": 1}], "recent": recent}, "anna")
    assert now["sequences"] == []
    assert now["latency"]["ttft"] == {"count": 100, "median_seconds": 50.5, "p95_seconds": 95.0}
    assert now["latency"]["itl"] == {"count": 0, "median_seconds": None, "p95_seconds": None}
    assert len(now["recent"]) == 50
    assert "tenant" not in now["recent"][0]


# --- settings and keys ---


def test_the_command_line_comes_before_the_environment_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('n-ctx = 100\nparallel = 3\ndrain_timeout = 3\nkv = "q8_0"\n')
    environ = {"MIXEDKV_PARALLEL": "5", "MIXEDKV_KV": "f16", "MIXEDKV_OTHER": "x"}
    settings = ServerSettings.load({"kv": "q4_0"}, str(path), environ)
    assert (settings.n_ctx, settings.parallel, settings.drain_timeout, settings.kv) == (100, 5, 3.0, "q4_0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "colour"),
        ("_env_file = 1", "unknown option '_env_file'"),
        ("port = 70000", "port"),
        ('port = "x"', "port"),
        ("a = [", "serve.toml"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_option(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ServerSettings.load({}, str(path), {})


def test_a_bad_value_is_one_line_that_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("n-ctx = -1\nport = 70000\n")
    environ = {"MIXEDKV_PORT": "many", "MIXEDKV_EMBEDDINGS": "maybe"}
    with pytest.raises(ValueError, match="n_ctx") as caught:
        ServerSettings.load({"kv": "q3"}, str(path), environ)
    parts = str(caught.value).split("; ")
    assert parts[0].startswith("--kv='q3' names no cache")
    assert parts[1:] == [
        f"{path}: n_ctx=-1: use at least 0",
        "MIXEDKV_PORT='many': use a valid integer",
        "MIXEDKV_EMBEDDINGS='maybe': use a valid boolean",
    ]


def test_every_option_stands_in_one_group() -> None:
    for kind in (ServerSettings, SplitSettings):
        names = [name for group in kind.GROUPS.values() for name in group.split()]
        assert sorted(names) == sorted(kind.model_fields.keys() - {"body"})


def test_an_option_of_a_file_that_is_no_option(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("treads = 4\n")
    with pytest.raises(ValueError, match=r"unknown option 'treads' \(did you mean 'threads'\?\)"):
        ServerSettings.load({}, str(path), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("size=64", "'size' is no setting of chunks: use repair"),
        ("repair=all", "repair='all': use one of"),
        ("chunk_size=2", "chunk_size=2: use a whole number from 32"),
        ("chunk_size=many", "chunk_size='many': use a number"),
        ("check=2", "check=2.0: use a share from 0 to 1"),
        ("ratio=nan", "ratio=nan: use a number from 0 to 1"),
    ],
)
def test_settings_of_chunks(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerSettings.load({"reuse": f"chunks:{text}"}, None, {})
    assert parse_chunks("chunk_size=32, repair=seam") == {
        "chunk_size": 32,
        "repair": "seam",
        "boundary_window": 16,
    }


def test_the_environment_has_text_for_every_kind(tmp_path: Path) -> None:
    environ = {"MIXEDKV_DRAIN_TIMEOUT": "3", "MIXEDKV_EMBEDDINGS": "on", "MIXEDKV_MODEL_NAME": "7"}
    settings = ServerSettings.load({}, None, environ)
    assert (settings.drain_timeout, settings.embeddings, settings.model_name) == (3.0, True, "7")
    assert not ServerSettings.load(
        {}, None, {"MIXEDKV_EMBEDDINGS": ""}
    ).embeddings  # as compose files leave them
    assert ServerSettings.load({}, None, {"mixedkv_port": "77"}).port == 8000


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"},
        {"host": "example.org"},
        {"parallel": 200, "idle_prefixes": 200},
        {"kv": "nonsense"},
        {"n_batch": 31},
        {"reuse": "some"},
        {"request_timeout": float("nan")},
        {"store_key_file": "k"},
        {"eviction": "newest"},
        {"max_age": "1 month"},
    ],
)
def test_settings_that_cannot_stand_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ServerSettings(**options)


def test_a_public_address_needs_keys_or_a_word() -> None:
    assert ServerSettings(host="0.0.0.0", allow_no_keys=True).host
    assert ServerSettings(host="0.0.0.0", api_key_file="keys").host
    for host in ("127.0.0.1", "localhost", "::1"):
        assert ServerSettings(host=host).host == host


def test_keys_name_tenants(tmp_path: Path) -> None:
    keys = Keys.load(str(key_file(tmp_path, "# ours", "anna:0123456789abcdef", "", "ben:fedcba9876543210")))
    assert keys.tenant("Bearer 0123456789abcdef") == "anna"
    assert keys.tenant("bearer fedcba9876543210") == "ben"
    for header in (None, "", "Bearer", "Bearer x", "Basic 0123456789abcdef", "Bearer 0123456789abcde\xe9"):
        assert keys.tenant(header) is None
    assert Keys().tenant(None) == ""


def test_keys_say_what_a_tenant_may_have(tmp_path: Path) -> None:
    first = "anna:0123456789abcdef weight=3 running=2 queued=0"
    keys = Keys.load(str(key_file(tmp_path, first, "anna:another-0123456789", "ben:fedcba9876543210")))
    assert keys.tenant("Bearer another-0123456789") == "anna"
    assert keys.limits("anna") == TenantLimits(weight=3, running=2, queued=0)
    assert keys.limits("ben") == keys.limits("nobody") == TenantLimits()


def test_keys_are_read_again(tmp_path: Path) -> None:
    keys = Keys.load(str(key_file(tmp_path, "anna:0123456789abcdef")))
    key_file(tmp_path, "anna:0123456789abcdef weight=2", "ben:fedcba9876543210")
    keys.reload()
    assert keys.limits("anna").weight == 2
    assert keys.tenant("Bearer fedcba9876543210") == "ben"
    key_file(tmp_path, "ben:short")
    with pytest.raises(ValueError, match="line 1"):
        keys.reload()
    assert keys.tenant("Bearer 0123456789abcdef") == "anna"  # as it was


@pytest.mark.parametrize(
    ("keys", "line", "message"),
    [
        ("anna:0123456789abcdef", {"prompt": "x"}, "line 1.*tenant"),
        ("anna:0123456789abcdef", {"prompt": "x", "tenant": "ben"}, "line 1.*tenant"),
        ("anna:0123456789abcdef", {"prompt": "x", "tenant": ["anna"]}, "line 1.*tenant"),
        ("", {"prompt": "x", "tenant": "anna"}, "line 1.*tenant"),
        ("", {"odd": "x"}, "line 1.*odd"),
        ("", ["x"], "line 1"),
    ],
)
def test_a_bad_line_of_a_warm_file_is_refused(tmp_path: Path, keys: str, line: object, message: str) -> None:
    path = tmp_path / "warm.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(ValueError, match=message):
        read_warm_file(str(path), Keys.load(str(key_file(tmp_path, keys))) if keys else Keys())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("anna:0123456789abcdef weight=0", "weight.*1 to 1000"),
        ("anna:0123456789abcdef weight=1.5", "weight"),
        ("anna:0123456789abcdef running=-1", "running"),
        ("anna:0123456789abcdef queued=x", "queued"),
        ("anna:0123456789abcdef odd=1", "weight, running, queued"),
        ("anna:0123456789abcdef weight=1 weight=2", "weight is there already"),
        ("anna:0123456789abcdef weight=1\nanna:fedcba9876543210 weight=2", "line 2.*weight is there already"),
    ],
)
def test_a_bad_limit_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Keys.load(str(key_file(tmp_path, line)))
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("anna:0123456789abcdef", 0o644),
        ("anna", 0o600),
        ("anna:short", 0o600),
        ("a b:0123456789abcdef", 0o600),
        ("a..b:0123456789abcdef", 0o600),
        ("an\u00e9:0123456789abcdef", 0o600),
        ("anna:0123456789 abcdef", 0o600),
        ("anna:0123456789abcdef\nben:0123456789abcdef", 0o600),
        ("", 0o600),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, line: str, mode: int) -> None:
    with pytest.raises(ValueError, match="keys") as caught:
        Keys.load(str(key_file(tmp_path, line, mode=mode)))
    assert "0123456789abcdef" not in str(caught.value)


# --- the end ---

_HANGS = """
import logging, sys, threading, time
from mixedkv_server.http_server import end_within
logging.basicConfig(level=logging.INFO)
threading.Thread(target=time.sleep, args=(10_000,), name="a database").start()
end_within(0.5)
"""


def test_a_shutdown_that_hangs_is_given_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert "0.5 seconds and is given up; at work: " in done.stderr
    assert "a database" in done.stderr


def test_usage_is_exact_only_if_all_answers_are() -> None:
    """One of them may have made do with fewer F16 rows."""
    jobs = [Job(Request(prompt=[1, 2, 3], max_tokens=1)) for _ in range(2)]
    assert usage(jobs, 2)["prompt_tokens_details"]["cached_exact"]
    jobs[1].work.exact = False
    assert not usage(jobs, 2)["prompt_tokens_details"]["cached_exact"]
