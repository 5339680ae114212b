"""Models that are loaded by the first request that names them, and unloaded when nobody asks for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.model.gguf_file import read_model_file
from support.adapters import write_adapter
from support.image_support import data_url, png
from support.patience import PATIENCE, wait_for
from support.server_support import MODEL, Server, key_file, running
from support.zoo.projector import write_projector

ollama = pytest.importorskip("ollama", reason="needs the Python package ollama")

TEXT = "/v1/completions"
RECALL = make_recall(seed=71_000, n_sentences=12)
SMALL = ("--n-ctx", "1024", "--parallel", "2", "--idle-prefixes", "2")
USER = {"role": "user", "content": "Where is the lamp?"}


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
    """Models stay until a request says otherwise."""
    with running(*options, "--keep-alive", "-1") as server:
        yield server


def client(server: Server, **headers: str) -> Any:
    return ollama.Client(host=server.url, headers=headers)


def loaded(server: Server, key: str = "") -> set[str]:
    models = server.request("GET", "/api/ps", key=key)[1]["models"]
    return {each["name"] for each in models}


def unload(server: Server, *names: str) -> None:
    for name in names:
        body = {"model": name, "keep_alive": 0, "stream": False}
        assert server.post("/api/generate", body)["done_reason"] == "unload"
    wait_for(lambda: not loaded(server) & set(names))


def ask(server: Server, model: str = "one", **body: Any) -> Any:
    return server.post(
        TEXT, {"prompt": RECALL.prompt, "max_tokens": 8, "temperature": 0, "model": model, **body}
    )


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def count(server: Server, name: str, model: str) -> float:
    line = next(
        (each for each in server.metrics().splitlines() if each.startswith(f'{name}{{model="{model}"}}')), "0"
    )
    return float(line.split()[-1])


def is_mapped(server: Server, path: Path) -> bool:
    return str(path) in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_the_first_request_loads_a_model(server: Server, files: dict[str, Path]) -> None:
    """Before it nothing is loaded, and all is listed as it is afterwards."""
    unload(server, "one", "two")
    before = server.request("GET", "/v1/models")[1]["data"]
    assert [each["id"] for each in before] == ["one", "odd", "two"]
    assert [each["meta"].pop("loaded") for each in before] == [False] * 3
    tags = client(server).list().models
    assert {server.status("GET", path) for path in ("/ready", "/health", "/stats")} == {200}
    shown = client(server).show("one")
    wait_for(lambda: not is_mapped(server, files["one"]))
    answer = ask(server)
    assert (answer["model"], loaded(server)) == ("one", {"one", "odd"})
    after = server.request("GET", "/v1/models")[1]["data"]
    assert [each["meta"].pop("loaded") for each in after] == [True, True, False]
    assert after == before
    assert client(server).list().models == tags
    assert client(server).show("one").capabilities == shown.capabilities
    assert is_mapped(server, files["one"])
    assert not is_mapped(server, files["two"])
    server.wait_for_log("the model one was loaded")
    assert server.status("GET", "/v1/models/third") == 404
    unload(server, "one")
    wait_for(lambda: not is_mapped(server, files["one"]))


def test_a_stats_page_of_a_model_that_is_not_loaded(server: Server) -> None:
    ask(server, "one")
    unload(server, "two")
    known, away = (server.request("GET", f"/v1/stats?model={name}")[1] for name in ("one", "two"))
    assert (known["loaded"], away["loaded"]) == (True, False)
    assert known.keys() == away.keys()
    assert known["cache"].keys() == away["cache"].keys()
    assert (away["sequences"], away["layers"], away["cache"]["cells_used"]) == ([], [], 0)
    assert away["requests"] == {"running": 0, "waiting": 0, "parallel": 2, "max_queue": 64}
    assert away["store"].keys() == known["store"].keys()
    unload(server, "one")
    wait_for(lambda: "mixedkv:models_loaded 0.0" in server.metrics())
    assert "mixedkv:kv_cache_usage_perc 0.0" in server.metrics()


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_its_kv_is_kept(options: list[str], tmp_path: Path, tier: str) -> None:
    store = ["--store", str(tmp_path), "--max-ram-gb", "0"] if tier == "disk" else []
    with running(*options, *store, "--keep-alive", "-1") as server:
        first = {name: ask(server, name, logprobs=1) for name in ("one", "odd")}
        unload(server, "one")
        for name, answer in first.items():
            again = ask(server, name, logprobs=1)
            assert cached(again) >= answer["usage"]["prompt_tokens"] - 1 > 100
            assert again["usage"]["prompt_tokens_details"]["cached_tier"] == tier
            assert again["choices"][0]["text"] == answer["choices"][0]["text"]
            assert again["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]
        assert first["one"]["choices"] != first["odd"]["choices"], "the adapter came back as well"
        assert (count(server, "mixedkv:model_loads_total", "one"), server.stop()) == (2, 0)


def test_keep_alive_and_ps(options: list[str]) -> None:
    with running(*options, "--keep-alive", "200s") as server:  # no test takes so long between two lines
        ollamas = client(server)

        def expires_in() -> float:
            expires = {each.model: each.expires_at for each in ollamas.ps().models}["two"]
            return float((expires - datetime.now(timezone.utc)).total_seconds())

        answer = ollamas.generate("two", "a", options={"num_predict": 1})
        assert 0 < answer.load_duration <= answer.total_duration
        assert 0 < expires_in() <= 200
        again = [ollamas.generate("two", "a", options={"num_predict": 1}).load_duration for _ in range(3)]
        assert min(again) < answer.load_duration
        ollamas.generate("two", "a", options={"num_predict": 1}, keep_alive="1s")
        wait_for(lambda: not ollamas.ps().models)
        assert ollamas.generate("two", keep_alive="10m").done_reason == "load"
        assert 500 < expires_in() <= 600
        ollamas.chat("two", [USER], options={"num_predict": 1}, keep_alive=-1)
        assert expires_in() > 1e9
        ollamas.chat("two", [USER], options={"num_predict": 1}, keep_alive=1000)
        assert 900 < expires_in() <= 1000
        ask(server, "two", max_tokens=1)
        assert expires_in() <= 200, "another request has the default"
        with pytest.raises(ollama.ResponseError, match="keep_alive: 'soon' is not a time"):
            ollamas.chat("two", [USER], keep_alive="soon")
        ollamas.chat("two", [USER], options={"num_predict": 1}, keep_alive=0)
        wait_for(lambda: not ollamas.ps().models)
        assert ollamas.chat("two", [], keep_alive=0).done_reason == "unload"
        assert ollamas.chat("two", [], keep_alive="1s").done_reason == "load"
        wait_for(lambda: not ollamas.ps().models)
        # It is counted when all is freed, a moment after it is gone from the list.
        wait_for(lambda: count(server, "mixedkv:model_unloads_total", "two") == 3)


def test_an_answer_at_work_is_not_cut_off(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, server, max_tokens=400, ignore_eos=True)
        wait_for(lambda: server.stats()["requests"]["running"] == 1 or answer.done())
        assert client(server).generate("one", keep_alive=0).done_reason == "unload"
        assert answer.result()["usage"]["completion_tokens"] == 400
    wait_for(lambda: "one" not in loaded(server))


def test_a_client_that_goes_leaves_nothing_behind(server: Server) -> None:
    ask(server)
    pieces = client(server).generate("one", "The lamp", stream=True, options={"num_predict": 900})
    next(pieces)
    pieces.close()
    unload(server, "one")


def test_many_at_once_load_it_once(server: Server) -> None:
    unload(server, "one", "two")
    n = {name: count(server, "mixedkv:model_loads_total", name) for name in ("one", "two")}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: ask(server, ("one", "two")[i % 2], max_tokens=2), range(8)))
    assert {each["model"] for each in answers} == {"one", "two"}
    assert {name: count(server, "mixedkv:model_loads_total", name) - n[name] for name in n} == {
        "one": 1,
        "two": 1,
    }


def test_one_at_a_time(options: list[str], files: dict[str, Path]) -> None:
    with running(*options, "--max-loaded", "1") as server:
        with ThreadPoolExecutor(6) as pool:
            names = ["one", "two", "odd"] * 4
            answers = list(pool.map(lambda name: ask(server, name, max_tokens=4), names))
        assert [each["model"] for each in answers] == names
        assert not (is_mapped(server, files["one"]) and is_mapped(server, files["two"]))
        assert len(loaded(server) & {"one", "two"}) == 1
        assert "mixedkv:models_loaded 1.0" in server.metrics()
        assert server.stop() == 0


@pytest.mark.nightly
def test_sessions_and_messages_are_found_meanwhile(options: list[str], tmp_path: Path) -> None:
    with running(*options, "--store", str(tmp_path), "--keep-alive", "-1") as server:
        for name in ("kept", "gone"):
            context = {
                "model": "one",
                "session_id": name,
                "prompt": f"Of {name}: {RECALL.prompt}",
                "ttl": 600,
            }
            assert server.post("/v1/context", context)["session_id"] == name
        said = {"role": "user", "content": RECALL.prompt}
        body = {"model": "one", "messages": [said], "max_tokens": 8, "use_kv_cache": True}
        message = server.post("/v1/chat/completions", body)["choices"][0]["message"]["message_id"]
        unload(server, "one")
        assert server.request("GET", "/v1/context/kept")[1]["model"] == "one"
        assert server.status("DELETE", "/v1/context/gone") == 200
        assert message in json.dumps(server.request("GET", "/v1/cache/messages")[1])
        assert server.status("DELETE", f"/v1/cache/messages/{message}") == 200
        assert loaded(server) == set()
        answer = ask(server, prompt=" And", session_id="kept")
        assert cached(answer) > 100
        assert cached(ask(server, prompt=f"Of gone: {RECALL.prompt}", max_tokens=1)) < 10


@pytest.mark.nightly
def test_warm_prompts_come_back(options: list[str], tmp_path: Path) -> None:
    """Also where no store keeps them; the models that have some are loaded at the start."""
    warm = tmp_path / "warm"
    warm.write_text(json.dumps({"model": "odd", "prompt": RECALL.prompt}) + "\n")
    with running(*options, "--max-ram-gb", "0", "--warm", str(warm), "--keep-alive", "-1") as server:
        assert loaded(server) == {"one", "odd"}
        for _ in range(2):
            answer = ask(server, "odd", prompt=RECALL.prompt + " And then", max_tokens=1)
            assert cached(answer) > 100
            assert answer["usage"]["prompt_tokens_details"]["cached_tier"] == "context"
            unload(server, "one")


@pytest.mark.nightly
def test_models_leave_after_the_default_time_and_warm_ones_as_well(options: list[str]) -> None:
    with running(*options, "--warm-text", RECALL.prompt, "--keep-alive", "1s") as server:
        wait_for(lambda: not loaded(server))
        ask(server, "two", max_tokens=1)
        wait_for(lambda: not loaded(server))
        assert server.stop() == 0


@pytest.mark.nightly
def test_a_model_that_cannot_be_loaded(files: dict[str, Path], tmp_path: Path) -> None:
    """It says why, the server goes on, and loads it when its file is right."""
    path = Path(shutil.copy(files["one"], tmp_path / "some.gguf"))
    with running("-m", str(files["two"]), "-m", str(path), *SMALL, "--keep-alive", "-1") as server:
        for spoil, says in ((path.unlink, "not there"), (lambda: path.write_bytes(b"GGUF"), "some.gguf")):
            spoil()
            status, answer, _ = server.request("POST", TEXT, {"model": "some", "prompt": "a"})
            assert (status, answer["error"]["code"]) == (503, "model_not_loaded")
            assert "'some' could not be loaded" in answer["error"]["message"]
            assert says in answer["error"]["message"]
            assert str(tmp_path) not in answer["error"]["message"]
            with pytest.raises(ollama.ResponseError, match="could not be loaded") as error:
                client(server).chat("some", [USER])
            assert error.value.status_code == 503
            assert server.status("GET", "/health") == server.status("GET", "/ready") == 200
            assert ask(server, "two", max_tokens=1)["model"] == "two"
            assert server.status("GET", "/api/tags") == server.status("GET", "/v1/models") == 200
            assert server.status("POST", "/api/show", {"model": "some"}) == 503
        assert count(server, "mixedkv:model_load_failures_total", "some") == 4
        shutil.copy(files["one"], path)
        assert ask(server, "some", max_tokens=1)["model"] == "some"
        assert server.stop() == 0


@pytest.mark.nightly
def test_a_file_that_is_changed_is_loaded_anew(files: dict[str, Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(files["one"], tmp_path / "some.gguf"))
    with running("-m", str(path), *SMALL, "--keep-alive", "-1") as server:
        ask(server, "some", max_tokens=1)
        code = "import os, sys; os.truncate(sys.argv[1], 100)"
        assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=PATIENCE).returncode == 0
        wait_for(lambda: not loaded(server))
        assert server.status("GET", "/health") == 200
        assert server.status("POST", TEXT, {"prompt": "a"}) == 503
        shutil.copy(files["one"], path)
        assert ask(server, "some", max_tokens=1)["model"] == "some"
        assert server.stop() == 0


@pytest.mark.nightly
def test_what_is_wrong_at_the_start_is_told_then(files: dict[str, Path]) -> None:
    for given, says in (
        (["-m", "nothing.gguf"], "nothing.gguf"),
        (["--lora", "odd=nothing.gguf"], "lora=odd=nothing.gguf: there is no such file"),
    ):
        with pytest.raises(RuntimeError, match=says), running(*given, *SMALL, "--keep-alive", "5m"):
            pass


@pytest.mark.nightly
def test_an_image_encoder_comes_back(tmp_path: Path) -> None:
    width = int(read_model_file(model_path()).get("embedding_length"))
    mmproj = write_projector("mlp", width, tmp_path)
    with running(*SMALL, "--mmproj", str(mmproj), "--keep-alive", "-1") as server:
        assert "vision" in client(server).show(MODEL).capabilities
        image = {"type": "image_url", "image_url": {"url": data_url(png())}}
        parts = [{"type": "text", "text": "What is it?"}, image]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0}
        answers = []
        for _ in range(2):
            answers.append(server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])
            unload(server, MODEL)
        assert answers[0] == answers[1]


@pytest.mark.nightly
def test_embeddings(zoo_path: Callable[[str], Path], files: dict[str, Path]) -> None:
    bert = ["-m", f"vectors={zoo_path('bert')}"]
    with running("-m", str(files["one"]), *bert, *SMALL, "--keep-alive", "-1") as server:
        wanted = server.post("/v1/embeddings", {"input": "a", "model": "vectors"})
        assert loaded(server) == {"vectors"}
        assert client(server).embed("vectors", "a", keep_alive=0).embeddings[0] == pytest.approx(
            wanted["data"][0]["embedding"], abs=1e-6
        )
        wait_for(lambda: not loaded(server))
        assert server.post("/v1/embeddings", {"input": "a", "model": "vectors"}) == wanted
        assert ask(server, "one")["model"] == "one"


@pytest.mark.nightly
def test_tenants_do_not_unload_each_others_models(options: list[str], tmp_path: Path) -> None:
    anna, bob = "anna-key-0123456789", "bob-key-01234567890"
    keys = str(key_file(tmp_path, f"anna:{anna}", f"bob:{bob}"))
    with running(*options, "--api-key-file", keys, "--keep-alive", "10m") as server:
        ollamas = {key: client(server, authorization=f"Bearer {key}") for key in (anna, bob)}
        ollamas[anna].generate("one")
        ollamas[bob].generate("one", keep_alive=0)
        time.sleep(0.5)
        assert loaded(server, anna) == {"one", "odd"}
        ollamas[anna].generate("one", keep_alive=0)
        wait_for(lambda: not loaded(server, anna))


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
@pytest.mark.nightly
def test_a_shutdown_during_a_load(options: list[str], seconds: float) -> None:
    with running(*options, "--keep-alive", "5m") as server:
        statuses: list[int] = []

        def go() -> None:
            statuses.append(server.status("POST", TEXT, {"prompt": "a", "max_tokens": 2}))

        asking = threading.Thread(target=go)
        asking.start()
        time.sleep(seconds)
        assert server.stop() == 0
        asking.join(PATIENCE)
        assert statuses[0] in (0, 200, 503)
        assert "Traceback" not in server.log


@pytest.mark.nightly
def test_without_the_option_models_stay(files: dict[str, Path]) -> None:
    with running("-m", str(files["one"]), *SMALL) as server:
        client(server).generate("one", "a", keep_alive=0, options={"num_predict": 1})
        client(server).generate("one", keep_alive=0)
        (listed,) = client(server).ps().models
        assert listed.expires_at.year == 2999
        wait_for(lambda: "keep_alive is ignored: models stay loaded; serve with --keep-alive" in server.log)


@pytest.mark.nightly
def test_memory_does_not_grow(options: list[str]) -> None:
    """Nor do threads and open files."""

    def now(server: Server) -> tuple[int, int, int]:
        process = Path(f"/proc/{server.process.pid}")
        pages = int((process / "statm").read_text().split()[1])
        return (
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(list((process / "task").iterdir())),
            len(list((process / "fd").iterdir())),
        )

    with running(*options, "--max-ram-gb", "0", "--keep-alive", "-1") as server:
        seen = []
        for _ in range(6):
            ask(server, "odd", max_tokens=1)
            unload(server, "one")
            n_unloads = len(seen) + 1
            wait_for(lambda n=n_unloads: count(server, "mixedkv:model_unloads_total", "one") == n)
            seen.append(now(server))
        memory, threads, _ = zip(*seen, strict=True)
        assert memory[-1] - memory[1] < 40e6
        assert threads[-1] < threads[1] + 8, "those of two engines are more, each time"
        wait_for(lambda: now(server)[2] <= seen[1][2] + 1)  # a connection closes a moment later
