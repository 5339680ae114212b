"""Replicas on Ray Serve: conversations stay where their rows are, and go on elsewhere when that is killed."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from support.patience import PATIENCE, wait_for
from support.servers.ray_replicas import replica_pids
from support.servers.remote import free_port, redis_server
from support.servers.server import MODEL

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mixedkv[ray]'")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """Two replicas that share a remote: their URL, and a client of the remote."""
    import ray
    import redis
    from ray import serve

    from mixedkv_ray.application import build

    with redis_server(tmp_path_factory.mktemp("redis")) as (_, redis_port):
        port = free_port()
        own = {"worker_niceness": 0}  # others may be at work on this machine
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config=own)
        try:
            serve.start(http_options={"port": port})
            metadata = f"redis://127.0.0.1:{redis_port}/0"
            shared = {"store_remote": f"{metadata}?timeout=20", "metadata_url": metadata}
            serve.run(build({"replicas": 2, "cpus": 0.1, "threads": 1, **shared}))
            yield f"http://127.0.0.1:{port}", redis.Redis(port=redis_port)
        finally:
            serve.shutdown()
            ray.shutdown()


def post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return bytes(answer.read())


def say(url: str, messages: list[dict[str, str]], number: int) -> dict[str, Any]:
    """One more turn; its usage."""
    recall = make_recall(number, 8)
    messages.append({"role": "user", "content": f"{' '.join(recall.journal)} {recall.fact.question}"})
    body = {"messages": messages, "temperature": 0, "max_tokens": 16}
    answers: list[Any] = []

    def ask() -> bool:
        try:
            answers.append(json.loads(post(f"{url}/v1/chat/completions", body)))
        except (OSError, http.client.HTTPException):  # of the one that was killed just now
            return False
        return True

    wait_for(ask, pause=0.5)
    messages.append({"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]})
    usage: dict[str, Any] = answers[-1]["usage"]
    return usage


@pytest.mark.needs("redis")
def test_conversations_outlive_a_replica(fleet: tuple[str, Any]) -> None:
    url, redis = fleet
    talks: list[list[dict[str, str]]] = [[] for _ in range(4)]
    totals = [0] * len(talks)
    for turn in range(3):
        for i, messages in enumerate(talks):
            usage = say(url, messages, 100 * i + turn)
            assert usage["prompt_tokens_details"]["cached_tokens"] == totals[i]  # all but the new message
            totals[i] = usage["total_tokens"]
    wait_for(lambda: len(redis.keys("mixedkv:v1/entry/*")) >= 3 * len(talks))
    pids = replica_pids()
    assert len(pids) == 2
    os.kill(pids[0], 9)
    tiers = set()
    for i, messages in enumerate(talks):
        details = say(url, messages, 100 * i + 50)["prompt_tokens_details"]
        assert (details["cached_tokens"], details["cached_exact"]) == (totals[i], True)
        tiers.add(details["cached_tier"])
    assert tiers == {"context", "remote"}  # both had conversations, and one lost its own


@pytest.mark.needs("redis")
def test_a_session_is_found_by_the_next_request(fleet: tuple[str, Any]) -> None:
    url, _ = fleet
    for i in range(10):
        prompt = f"The number of house {i} is {i * 7919}."
        made = json.loads(post(f"{url}/v1/context", {"model": MODEL, "prompt": prompt}))
        body = {"session_id": made["session_id"], "prompt": " It", "max_tokens": 1}
        assert json.loads(post(f"{url}/v1/completions", body))["choices"], i


@pytest.mark.needs("redis")
def test_streams_and_errors_come_through(fleet: tuple[str, Any]) -> None:
    url, _ = fleet
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True}
    events = post(f"{url}/v1/chat/completions", body).split(b"\n\n")
    assert events[-2] == b"data: [DONE]"
    assert len(events) > 3
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{url}/v1/chat/completions", {"messages": 7})
    assert caught.value.code == 400
    assert json.loads(caught.value.read())["error"]["param"]


@pytest.mark.needs("redis")
def test_replicas_come_with_the_load_and_hand_over_when_they_go(
    fleet: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    from mixedkv_ray import application

    scaling = application._scaling

    def soon(replicas: str, parallel: int) -> dict[str, Any]:
        config = scaling(replicas, parallel)["autoscaling_config"]
        config |= {"upscale_delay_s": 0.5, "downscale_delay_s": 5, "look_back_period_s": 1}
        return {"autoscaling_config": {**config, "metrics_interval_s": 0.5}}

    monkeypatch.setattr(application, "_scaling", soon)
    url, redis = fleet
    redis.flushall()
    options = {"replicas": "1-2", "cpus": 0.1, "threads": 1, "parallel": 2, "drain_timeout": PATIENCE}
    remote = f"redis://127.0.0.1:{redis.connection_pool.connection_kwargs['port']}/0"
    shared = {"store_remote": f"{remote}?timeout=20", "metadata_url": remote}
    serve.run(application.build({**options, **shared}))
    wait_for(lambda: len(replica_pids()) == 1, pause=0.5)  # the other one of before stores what it holds
    talks: list[list[dict[str, str]]] = [[] for _ in range(4)]
    totals = [say(url, messages, 100 * i)["total_tokens"] for i, messages in enumerate(talks)]

    def talk(i: int) -> None:
        for turn in count(1):
            if turn > 1 and len(replica_pids()) == 2:
                totals[i] = say(url, talks[i], 100 * i + turn)["total_tokens"]  # on either of them
                return
            messages = [{"role": "user", "content": "Tell me all."}]
            post(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": 200, "ignore_eos": True})

    with ThreadPoolExecutor(len(talks)) as pool:
        list(pool.map(talk, range(len(talks))))
    wait_for(lambda: len(replica_pids()) == 1, pause=0.5)
    for i, messages in enumerate(talks):
        details = say(url, messages, 100 * i + 50)["prompt_tokens_details"]
        assert (details["cached_tokens"], details["cached_exact"]) == (totals[i], True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "red"}, "colour: no option of mixedkv serve"),
        ({"replicas": "many"}, "replicas='many': use a number"),
        ({"replicas": "4-2"}, "replicas='4-2': use a number"),
        ({"replicas": 2}, "replicas=2: a session.*metadata_url=redis://"),
        ({"replicas": "1-2"}, "replicas=1-2: a session.*metadata_url=sqlite: to go without"),
        ({"routing": "best"}, "routing='best': use prefix, ray"),
        ({"kv_events": "tcp://*:1"}, "replicas cannot share an address"),
        ({"n_ctx": "-1"}, "MIXEDKV_N_CTX"),
        ({"store_remote": "ftp://x"}, "'ftp' is not the URL of a remote: use redis://"),
    ],
)
def test_bad_options(options: dict[str, str], message: str) -> None:
    from mixedkv_ray.application import build

    with pytest.raises(ValueError, match=message):
        build(options)


@pytest.mark.needs("redis")
def test_a_remote_that_refuses_us_ends_the_start(tmp_path: Path) -> None:
    from mixedkv_ray.application import build

    with redis_server(tmp_path, "--requirepass", "secret") as (_, port):
        with pytest.raises(ValueError, match="remote: the server refuses"):
            build({"store_remote": f"redis://:wrong@127.0.0.1:{port}/0"})
        build({"store_remote": f"redis://:secret@127.0.0.1:{port}/0"})


def test_a_remote_that_is_not_there_does_not(caplog: pytest.LogCaptureFixture) -> None:
    from mixedkv_ray.application import build

    build({"store_remote": f"redis://127.0.0.1:{free_port()}/0"})
    assert "does not answer: the store goes without it" in caplog.text
