"""Several models behind a router: each in a process that the first request starts, and that leaves the others
alone.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mixedkv import __version__
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from support.models.adapters import write_adapter
from support.patience import PATIENCE, wait_for
from support.servers.server import Server, children, key_file, running

pytestmark = pytest.mark.full

TEXT = "/v1/completions"
RECALL = make_recall(seed=71_000, n_sentences=12)
SMALL = ("--n-ctx", "1024", "--parallel", "2", "--idle-prefixes", "2")
LONG = {"prompt": "The lamp", "max_tokens": 900, "ignore_eos": True, "stream": True}
ENDLESS = {**LONG, "max_tokens": 100_000, "overflow": "slide"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "one": Path(shutil.copy(model_path(), folder / "one.gguf")),
        "two": Path(shutil.copy(model_path(), folder / "two.gguf")),
        "odd": write_adapter(folder / "odd.gguf", model_path(), 1, size=0.2),
    }


@pytest.fixture(scope="module")
def options(files: dict[str, Path]) -> list[str]:
    return [*("-m", str(files["one"]), "-m", str(files["two"]), "--lora", f"odd={files['odd']}"), *SMALL]


@pytest.fixture(scope="module")
def server(options: list[str]) -> Iterator[Server]:
    with running(*options) as server:
        yield server


def loaded(server: Server, key: str = "") -> set[str]:
    return {each["name"] for each in server.request("GET", "/api/ps", key=key)[1]["models"]}


def unload(server: Server, *names: str, key: str = "") -> None:
    for name in names:
        body = {"model": name, "keep_alive": 0, "stream": False}
        assert server.post("/api/generate", body, key=key)["done_reason"] == "unload"


def ask(server: Server, model: str | None = "one", key: str = "", **body: Any) -> Any:
    fields = {"prompt": RECALL.prompt, "max_tokens": 8, "temperature": 0, **body}
    return server.post(TEXT, fields if model is None else {**fields, "model": model}, key=key)


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def count(server: Server, name: str, model: str) -> float:
    text = server.request("GET", "/metrics")[1]
    line = next((each for each in text.splitlines() if each.startswith(f'{name}{{model="{model}"}}')), "0")
    return float(line.split()[-1])


def process_of(server: Server, name: str) -> int:
    """The process of a model, by its command line."""
    (found,) = (
        pid
        for pid in children(server.process.pid)
        if Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").endswith(b"\0" + name.encode())
    )
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stream:
    """A streamed answer of a model, read line by line."""

    def __init__(self, server: Server, model: str, expected: dict[str, Any] = ENDLESS) -> None:
        body = json.dumps({**expected, "model": model}).encode()
        request = urllib.request.Request(
            server.url + TEXT, body, {"Content-Type": "application/json"}, method="POST"
        )
        self.response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=PATIENCE)

    def next(self) -> str:
        while not (line := self.response.readline()).strip():
            assert line, "the stream ended"
        return line.decode()

    def rest(self) -> str:
        return self.response.read().decode()

    def close(self) -> None:
        self.response.close()


# --- one server; the tests leave models loaded or not ---


@pytest.mark.core
def test_the_first_request_starts_a_process(server: Server) -> None:
    unload(server, "one", "two")
    wait_for(lambda: not loaded(server))
    before = server.request("GET", "/v1/models")[1]["data"]
    assert [each["id"] for each in before] == ["one", "odd", "two"]
    assert [each["meta"].pop("loaded") for each in before] == [False] * 3
    assert {server.status("GET", path) for path in ("/ready", "/health", "/stats", "/", "/api/tags")} == {200}
    assert server.status("GET", "/v1/models/third") == 404
    assert server.status("GET", "/v1/nothing") == 404
    status, answer, headers = server.request("GET", "/v1/stats?model=two")
    assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
    assert int(headers["retry-after"]) >= 1
    assert server.request("GET", "/health")[1]["version"] == __version__
    assert children(server.process.pid) == []
    answers = {name: ask(server, name, logprobs=1) for name in ("one", "odd", "two")}
    assert {name: answer["model"] for name, answer in answers.items()} == {name: name for name in answers}
    assert answers["one"]["choices"] == answers["two"]["choices"] != answers["odd"]["choices"]
    assert ask(server, None)["model"] == "one"
    assert len(children(server.process.pid)) == 2
    after = server.request("GET", "/v1/models")[1]["data"]
    assert [each["meta"].pop("loaded") for each in after] == [True] * 3
    assert after == before
    assert server.request("GET", "/v1/stats?model=two")[1]["model"] == "two"
    status, answer, _ = server.request("POST", TEXT, {"model": "third", "prompt": "a"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert all(repr(name) in answer["error"]["message"] for name in ("one", "odd", "two"))
    assert server.request("POST", TEXT, raw=b"{")[1]["error"]["code"] == "invalid_json"


@pytest.mark.core
def test_a_stream_comes_as_it_is_made_and_ends_with_its_client(server: Server) -> None:
    stream = Stream(server, "two")
    first = stream.next()
    assert "[DONE]" not in first
    running_now = server.request("GET", "/v1/stats?model=two")[1]["requests"]["running"]
    assert running_now == 1, "the first token came before the last one was made"
    stream.close()
    wait_for(lambda: server.request("GET", "/v1/stats?model=two")[1]["requests"]["running"] == 0)
    body = {"model": "two", "prompt": "The lamp", "max_tokens": 4, "stream": True}
    _, text, headers = server.request("POST", TEXT, body)
    assert text.count("data: ") == 6, "the role's, four tokens' and the end's, as of one process"
    assert headers["content-type"].startswith("text/event-stream")


@pytest.mark.core
def test_a_process_that_is_killed_leaves_the_others(server: Server) -> None:
    ask(server, "one", max_tokens=1)
    going, cut = Stream(server, "two", LONG), Stream(server, "one")
    assert going.next()
    assert cut.next()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.request, "POST", TEXT, {**ENDLESS, "model": "one", "stream": False})
        wait_for(lambda: server.request("GET", "/v1/stats?model=one")[1]["requests"]["running"] == 2)
        os.kill(process_of(server, "one"), signal.SIGKILL)
        status, answer, _ = whole.result()
    assert (status, answer["error"]["code"]) == (503, "model_ended")
    assert "'one' ended" in cut.rest()
    assert "[DONE]" in going.rest()
    assert ask(server, "one")["model"] == "one", "it is started again"
    server.wait_for_log("the process of the model one ended with -9")
    assert server.status("GET", "/health") == 200


def test_a_process_that_hangs_leaves_the_others(server: Server) -> None:
    for name in ("one", "two"):
        ask(server, name, max_tokens=1)
    hung = process_of(server, "one")
    os.kill(hung, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(ask, server, "one", max_tokens=1)
            assert ask(server, "two", max_tokens=1)["model"] == "two"
            assert server.status("GET", "/health") == server.status("GET", "/ready") == 200
            text = server.request("GET", "/metrics")[1]
            os.kill(hung, signal.SIGCONT)
            assert waits.result()["model"] == "one"
    finally:
        os.kill(hung, signal.SIGCONT)
    assert 'mixedkv_generation_tokens_total{model="two"}' in text
    assert 'mixedkv_generation_tokens_total{model="one"}' not in text


@pytest.mark.core
def test_the_metrics_are_of_all(server: Server) -> None:
    for name in ("one", "two"):
        ask(server, name, max_tokens=2)
    text = server.request("GET", "/metrics")[1]
    assert "mixedkv_models_loaded 2.0" in text
    for name in ("one", "two"):
        assert f'mixedkv_generation_tokens_total{{model="{name}"}} ' in text
        assert count(server, "mixedkv_model_loads_total", name) >= 1
    assert 'mixedkv_http_requests_total{path="/v1/completions",status="200"}' in text
    assert text.count("# TYPE mixedkv_http_requests_total ") == 1


def test_sessions_are_found_behind_any_process(server: Server) -> None:
    body = {"model": "two", "session_id": "kept", "prompt": RECALL.prompt, "ttl": 600}
    assert server.post("/v1/context", body)["session_id"] == "kept"
    assert cached(ask(server, "two", prompt=" And?", session_id="kept")) > 100
    unload(server, "two")
    assert server.request("GET", "/v1/context/kept")[1]["model"] == "two"
    assert server.status("DELETE", "/v1/context/kept") == 200
    assert server.status("GET", "/v1/context/kept") == 404


def test_many_at_once_start_it_once(server: Server) -> None:
    unload(server, "one", "two")
    wait_for(lambda: not loaded(server))
    n = {name: count(server, "mixedkv_model_loads_total", name) for name in ("one", "two")}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(server, ("one", "two")[i % 2], max_tokens=2), range(8)))
    assert {each["model"] for each in answers} == {"one", "two"}
    for name, before in n.items():
        assert count(server, "mixedkv_model_loads_total", name) - before == 1


def test_an_answer_under_way_is_not_cut_off(server: Server) -> None:
    stream = Stream(server, "two", LONG)
    stream.next()
    unload(server, "two")
    assert "[DONE]" in stream.rest()
    wait_for(lambda: "two" not in loaded(server))


def test_the_pages_of_strangers_start_nothing(server: Server) -> None:
    unload(server, "one", "two")
    wait_for(lambda: not children(server.process.pid))
    for path in ("/", "/stats", "/page/chat.js", "/openapi.json", "/health", "/metrics"):
        assert server.status("GET", path) == 200
    assert not children(server.process.pid)


# --- servers of their own ---


def test_idle_ones_leave(options: list[str]) -> None:
    with running(*options, "--keep-alive", "1s") as server:
        ask(server, "two", max_tokens=1)
        pid = process_of(server, "two")
        body = {"model": "one:latest", "prompt": "a", "keep_alive": "10m", "options": {"num_predict": 1}}
        server.post("/api/generate", {**body, "stream": False})
        wait_for(lambda: loaded(server) == {"one", "odd"})
        wait_for(lambda: not lives(pid))
        (shown, _) = server.request("GET", "/api/ps")[1]["models"]
        at = datetime.fromisoformat(shown["expires_at"].replace("Z", "+00:00"))
        assert 500 < at.timestamp() - time.time() <= 600
        assert ask(server, "two", max_tokens=1)["model"] == "two"
        assert server.stop() == 0


@pytest.mark.nightly
def test_the_least_recently_used_one_leaves(options: list[str]) -> None:
    with running(*options, "--max-loaded", "1") as server:
        with ThreadPoolExecutor(6) as pool:
            names = ["one", "two", "odd", "two"]
            answers = list(pool.map(lambda name: ask(server, name, max_tokens=4), names))
        assert [each["model"] for each in answers] == names
        assert len(children(server.process.pid)) == 1
        assert "mixedkv_models_loaded 1.0" in server.request("GET", "/metrics")[1]
        assert server.stop() == 0


@pytest.mark.nightly
def test_kv_is_kept_on_disk_and_tenants_are_apart(options: list[str], tmp_path: Path) -> None:
    anna, bob = "anna-key-0123456789", "bob-key-01234567890"
    keys = str(key_file(tmp_path, f"anna:{anna}", f"bob:{bob}"))
    store = ("--store", str(tmp_path / "store"), "--keep-alive", "10m")
    with running(*options, *store, "--api-key-file", keys) as server:
        for path in (TEXT, "/v1/stats", "/v1/models"):
            assert server.status("POST" if path == TEXT else "GET", path) == 401
        assert not children(server.process.pid), "a stranger starts nothing"
        first = ask(server, "two", key=anna)
        ask(server, "two", key=bob, prompt="a", max_tokens=1)
        unload(server, "two", key=bob)
        time.sleep(0.5)
        assert loaded(server, anna) == {"two"}, "anna wants it to stay"
        unload(server, "two", key=anna)
        wait_for(lambda: not loaded(server, anna))
        again = ask(server, "two", key=anna)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tier"] == "disk"
        assert cached(ask(server, "two", key=bob)) == 0
        cleo = "cleo-key-0123456789"
        key_file(tmp_path, f"anna:{anna}", f"bob:{bob}", f"cleo:{cleo}")
        server.process.send_signal(signal.SIGHUP)
        body = {"model": "two", "prompt": "a", "max_tokens": 1}
        wait_for(lambda: server.status("POST", TEXT, body, key=cleo) == 200)


@pytest.mark.core
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL])
def test_no_process_outlives_the_router(options: list[str], number: int) -> None:
    with TemporaryDirectory() as folder, running(*options, environ={"TMPDIR": folder}) as server:
        for name in ("one", "two"):
            ask(server, name, max_tokens=1)
        pids = children(server.process.pid)
        assert len(pids) == 2
        assert server.stop(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        wait_for(lambda: not any(map(lives, pids)))
        assert not list(Path(folder).glob("mixedkv-*")), "nor does a folder with sessions"
        assert "Traceback" not in server.log


@pytest.mark.nightly
def test_a_model_that_cannot_be_loaded_says_why_and_rests(files: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(files["one"], tmp_path / "some.gguf"))
    with running("-m", str(files["two"]), "-m", str(path), *SMALL) as server:
        path.write_bytes(b"GGUF")
        for _ in range(3):
            status, answer, headers = server.request("POST", TEXT, {"model": "some", "prompt": "a"})
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
            assert 1 <= int(headers["retry-after"]) <= 60
            assert "'some' could not be loaded" in answer["error"]["message"]
            assert "some.gguf" in answer["error"]["message"]
            assert str(tmp_path) not in answer["error"]["message"]
        assert "the next try is in" in answer["error"]["message"]
        assert ask(server, "two", max_tokens=1)["model"] == "two"
        assert server.status("GET", "/health") == 200
        shutil.copy(files["one"], path)
        wait_for(
            lambda: server.status("POST", TEXT, {"model": "some", "prompt": "a", "max_tokens": 1}) == 200
        )


@pytest.mark.nightly
def test_a_file_that_is_changed_is_loaded_anew(files: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(files["one"], tmp_path / "some.gguf"))
    with running("-m", str(path), *SMALL, "--keep-alive", "-1") as server:
        ask(server, "some", max_tokens=1)
        code = "import os, sys; os.truncate(sys.argv[1], 100)"
        assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=PATIENCE).returncode == 0
        wait_for(lambda: not children(server.process.pid))
        shutil.copy(files["one"], path)
        assert ask(server, "some", max_tokens=1)["model"] == "some"


def test_what_is_wrong_at_the_start_is_told_then(files: dict[str, Path]) -> None:
    for given, says in (
        (["-m", "nothing.gguf"], "nothing.gguf"),
        (["--lora", "odd=nothing.gguf"], "lora=nothing.gguf: there is no such file"),
    ):
        with (
            pytest.raises(RuntimeError, match=says),
            running("-m", str(files["one"]), *given, *SMALL, "--keep-alive", "5m"),
        ):
            pass


@pytest.mark.nightly
def test_warm_prompts_come_back(options: list[str], tmp_path: Path) -> None:
    """The models that have some are loaded at the start."""
    warm = tmp_path / "warm"
    warm.write_text(json.dumps({"model": "odd", "prompt": RECALL.prompt}) + "\n")
    with running(*options, "--warm", str(warm)) as server:
        wait_for(lambda: loaded(server) == {"one", "odd"})
        assert cached(ask(server, "odd", prompt=RECALL.prompt + " And then", max_tokens=1)) > 100
        os.kill(process_of(server, "one"), signal.SIGKILL)
        wait_for(lambda: not loaded(server))
        assert cached(ask(server, "odd", prompt=RECALL.prompt + " And then", max_tokens=1)) > 100


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_shutdown_during_a_start(options: list[str], seconds: float) -> None:
    with running(*options) as server:
        statuses: list[int] = []

        def go() -> None:
            statuses.append(server.status("POST", TEXT, {"prompt": "a", "max_tokens": 2}))

        asking = threading.Thread(target=go)
        asking.start()
        time.sleep(seconds)
        pids = children(server.process.pid)
        assert server.stop() == 0
        asking.join(PATIENCE)
        assert statuses[0] in (0, 200, 503)
        assert "Traceback" not in server.log
        wait_for(lambda: not any(map(lives, pids)))
