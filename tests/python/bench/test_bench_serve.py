"""Small runs of `mixedkv bench serve`, its client against servers that misbehave, and what is refused."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from mixedkv.bundled import model_path
from mixedkv.cli import main
from mixedkv.model.gguf_file import read_model_file
from mixedkv_bench.catalog import Document
from mixedkv_bench.harness import servers
from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.chat_client import ChatAnswer, ClientSampling, ask
from mixedkv_bench.harness.contexts import CannotRunError, LoadedModel
from mixedkv_bench.harness.http_connection import connect
from mixedkv_bench.harness.replay import Replay, make_conversation, replay
from mixedkv_bench.harness.stock_peer import stock_library
from mixedkv_bench.serve import Script, ServerContender, ServeWork, _of_replays, _stall
from support.bench_support import run
from support.patience import PATIENCE

pytestmark = pytest.mark.nightly

N_GEN, TURNS = 8, 3

needs_server = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client")),
    reason="mixedkv serve needs pip install 'mixedkv[server]'",
)
needs_stock = pytest.mark.skipif(
    stock_library() is None or any(importlib.util.find_spec(name) is None for name in servers._STOCK_NEEDS),
    reason="compares with llama-cpp-python[server], which is not installed: the extra `peer`",
)


def serve(path: Path, *arguments: str) -> dict[str, Any]:
    small = ["--n-prompt", "120", "--n-gen", str(N_GEN), "--turns", str(TURNS), "--repeats", "1"]
    return run(path, "serve", *small, *arguments)


def check_row(row: dict[str, Any]) -> None:
    assert row["n_gen"] == N_GEN
    assert 0 < row["tps_low"] <= row["tps"] <= row["tps_high"]
    assert [part["turn"] for part in row["by_turn"]] == list(range(1, TURNS + 1))
    for part in row["by_turn"]:
        assert part["n"] == row["conversations"]
        assert 0 < part["low"] <= part["ttft"] <= part["high"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "s.json"
    return serve(path, "--kv", "q8_0", "--clients", "1,3", "--no-peer")


@needs_server
def test_our_server(data: dict[str, Any]) -> None:
    rows = [row for row in data["rows"] if row["test"] == "serve"]
    assert [(row["engine"], row["kv"], row["clients"]) for row in rows] == [
        ("mixedkv", "q8_0", 1),
        ("mixedkv", "q8_0", 3),
    ]
    for row in rows:
        check_row(row)
        assert row["conversations"] == 3
        assert "vs_stock" not in row
        first, *later = row["by_turn"]
        assert 100 < first["prompt_tokens"] < 150
        for before, part in zip(row["by_turn"], later, strict=False):
            assert part["prompt_tokens"] > before["prompt_tokens"] + N_GEN
        assert 0 <= row["hit_ratio"] < 1
    assert rows[0]["vs_serial"] == 1


@needs_server
def test_a_chat_is_not_evaluated_again(data: dict[str, Any]) -> None:
    """One conversation after another: each turn finds the one before, and the first turn finds no other."""
    (row,) = (row for row in data["rows"] if row["test"] == "serve" and row["clients"] == 1)
    first, *later = row["by_turn"]
    assert first["cached_tokens"] < 16
    for before, part in zip(row["by_turn"], later, strict=False):
        assert part["cached_tokens"] >= before["prompt_tokens"]


@needs_server
def test_a_long_prompt_beside_streams(data: dict[str, Any]) -> None:
    (row,) = (row for row in data["rows"] if row["test"] == "stall")
    assert row["streams"] == 2
    assert row["n_prompt"] > 300
    assert 0 < row["idle"] <= row["idle_max"]
    assert 0 < row["busy"] <= row["busy_max"] < row["ttft"]
    assert row["vs_idle"] == pytest.approx(row["busy"] / row["idle"])


@needs_server
def test_the_tables_and_plots(data: dict[str, Any], tmp_path: Path) -> None:
    from mixedkv_bench.output.report import render

    text = render(Document.model_validate(data))
    assert re.search(r"Server with 3 at a time\n.*\n  q8_0 +[\d.]+ +[\d.]+ +- +\d+ ms", text)
    assert "Time between tokens of 2 answers" in text
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots

    (path,) = plots.draw(Document.model_validate(data), tmp_path)
    assert path.name == "serve.png"
    assert path.read_bytes().startswith(b"\x89PNG")


@needs_server
@needs_stock
@pytest.mark.slow
def test_the_stock_server_beside_ours(tmp_path: Path) -> None:
    rows = serve(tmp_path / "s.json", "--kv", "f16", "--clients", "2")["rows"]
    rows = [row for row in rows if row["test"] == "serve"]
    assert [row["engine"] for row in rows] == ["mixedkv", servers.STOCK, servers.STOCK_CACHE]
    for row in rows:
        check_row(row)
        assert row["vs_stock"] > 0
        assert "vs_serial" not in row
    for row in rows[1:]:
        assert row["vs_stock"] <= 1  # the faster of the two
        assert row["peer_version"] == llama_cpp.__version__
        assert "hit_ratio" not in row


# --- conversations ---


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    opened = LoadedModel(model_path())
    yield opened
    opened.close()


def test_conversations_share_nothing(model: LoadedModel) -> None:
    def count(text: str) -> int:
        return len(model.tokenize(text))

    one, other = (make_conversation(seed, 300, 10, count) for seed in (1, 2))
    assert one == make_conversation(1, 300, 10, count)
    assert len(one.messages) == 10
    assert 200 < count(one.messages[0]) <= 300
    first = [message.split()[:8] for message in (one.messages[0], other.messages[0])]
    assert first[0] != first[1]


def test_ratios_are_taken_within_a_round() -> None:
    (setting,) = make_settings(["f16"], "off")
    slowing = [1.0, 2.0, 4.0]

    def contender(engine: str, factor: float) -> ServerContender:
        answer = ChatAnswer(times=[0.1], texts=["a"], end="length")
        replays = [Replay(factor * t, [[answer]]) for t in slowing]
        return ServerContender(
            engine,
            setting,
            lambda port: [],
            replays={1: [Replay(t, [[answer]]) for t in slowing], 2: replays},
        )

    work = ServeWork(n_prompt=8, n_gen=5, turns=1, clients=(1, 2), threads=1, repeats=3, peer=True)
    contenders = [
        contender("mixedkv", 0.5),
        contender(servers.STOCK, 2.0),
        contender(servers.STOCK_CACHE, 1.5),
    ]
    row = _of_replays(contenders[0], contenders, 2, contenders[0].replays[2], work)
    assert row["vs_serial"] == 2
    assert row["vs_stock"] == 3  # the faster of the stock server's
    assert row["tps_samples"] == [10.0, 5.0, 2.5]  # n_gen tokens, since the answer ended at its limit


# --- the client ---


@contextmanager
def answering(*chunks: bytes, status: int = 200, cut: bool = False) -> Iterator[str]:
    """A server that answers everything with these chunks; `cut` leaves out the end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            if cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that has seen enough goes away."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask_once(url: str, n: int = 1) -> ChatAnswer:
    async def go() -> ChatAnswer:
        async with connect(url) as connection:
            for _ in range(n):
                answer = await ask(
                    connection, ClientSampling(2, (7,)).body([{"role": "user", "content": "a"}])
                )
        return answer

    return asyncio.run(go())


def event(text: str, **more: Any) -> bytes:
    chunk = {"choices": [{"delta": {"content": text}, "finish_reason": None}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def test_events_that_chunks_cut_and_join() -> None:
    usage = {"completion_tokens": 2, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    data = (
        b": ping\n\n" + event("") + event("Hé") + event("llo") + event("", usage=usage) + b"data: [DONE]\n\n"
    )
    cut = [data[i : i + 7] for i in range(0, len(data), 7)]
    with answering(*cut) as url:
        answer = ask_once(url, n=2)  # over one connection
    assert answer.text == "Héllo"
    assert len(answer.times) == 2
    assert (answer.n_tokens(5), answer.n_prompt, answer.n_cached) == (2, 9, 4)
    assert 0 < answer.ttft <= answer.times[1]


def test_tokens_of_a_server_that_does_not_tell() -> None:
    assert ChatAnswer(times=[0.1, 0.2], end="length").n_tokens(5) == 5  # three had no text
    assert ChatAnswer(times=[0.1, 0.2], end="stop").n_tokens(5) == 2
    assert ChatAnswer().n_cached is None


@pytest.mark.parametrize(
    ("chunks", "options", "message"),
    [
        ([b'{"error": "busy"}'], {"status": 503}, "answered 503"),
        ([b"data: [DONE]\n\n"], {}, "without any text"),
        ([event("a")], {"cut": True}, "the connection broke"),
        ([b"data: {no json\n\n"], {}, "not JSON"),
        ([b'data: {"error": {"message": "gone"}}\n\n'], {}, "the server failed.*gone"),
    ],
)
def test_servers_that_fail(chunks: list[bytes], options: dict[str, Any], message: str) -> None:
    with answering(*chunks, **options) as url, pytest.raises(CannotRunError, match=message):
        ask_once(url)


def test_nobody_listens() -> None:
    with pytest.raises(CannotRunError, match="cannot be reached"):
        ask_once(f"http://127.0.0.1:{servers.free_port()}")


def test_the_first_failure_ends_a_replay(model: LoadedModel) -> None:
    conversation = make_conversation(1, 50, 2, lambda text: len(model.tokenize(text)))
    with answering(b"no", status=500) as url, pytest.raises(CannotRunError, match="answered 500"):
        replay(url, [conversation] * 4, 2, ClientSampling(2, ()))


# --- the servers ---


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("import sys; sys.exit('no such option')", PATIENCE, "ended with status 1. no such option"),
        ("import os; os.kill(os.getpid(), 9)", PATIENCE, "died of signal 9"),
        ("import time; time.sleep(9999)", 1.0, "not ready in time"),
    ],
)
def test_a_server_that_does_not_start(code: str, seconds: float, message: str) -> None:
    with pytest.raises(CannotRunError, match=message):
        servers.Server([sys.executable, "-c", code], servers.free_port(), seconds=seconds)


@needs_server
def test_a_server_that_dies_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        servers, "mixedkv_command", lambda *_: [sys.executable, "-c", "raise SystemExit('ouch')"]
    )
    (row,) = serve(tmp_path / "s.json", "--kv", "f16", "--clients", "1", "--no-peer")["rows"]
    assert "ouch" in row["error"]
    assert "tps" not in row


def test_a_server_is_stopped() -> None:
    """Also one that ignores SIGTERM."""
    code = (
        "import signal, sys, http.server as h; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.send_header('Content-Length', '0'); self.end_headers()\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()"
    )
    port = servers.free_port()
    server = servers.Server([sys.executable, "-c", code, str(port)], port)
    os.kill(server.pid, signal.SIGTERM)
    server.close(seconds=0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clients", "0"], "argument --clients"),
        (["--clients", "1,x"], "'x' is not a whole number of 1 or more"),
        (["--flash-attn", "on"], "unrecognized arguments: --flash-attn on"),
        (["-m", "no-model.gguf"], "no-model.gguf: No such file"),
        (["--kv", "mixed:best"], "known keys"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    try:
        code = main(["bench", "serve", *arguments])
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(stock_library() is None, reason="needs the extra peer")
def test_a_stock_server_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_STOCK_NEEDS", ("no_such_package",))
    assert main(["bench", "serve"]) == 2
    assert "needs no_such_package: run pip install" in capsys.readouterr().err


def test_every_server_gets_the_same() -> None:
    spec = servers.ServerSpec(file=read_model_file(model_path()), n_ctx=1024, clients=8, threads=3)
    (setting,) = make_settings(["mixed"], "off")
    ours = servers.mixedkv_command(spec, setting, 1)
    assert ours[ours.index("--n-ctx") + 1] == str(8 * 1024)
    assert ours[ours.index("--parallel") + 1] == "8"
    assert ours[ours.index("--threads") + 1] == "3"
    stock = servers.stock_command(spec, servers.STOCK, 1)
    assert stock[stock.index("--n_ctx") + 1] == "1024"
    assert stock[stock.index("--n_threads") + 1] == stock[stock.index("--n_threads_batch") + 1] == "3"
    assert "--cache" not in stock
    assert "--cache" in servers.stock_command(spec, servers.STOCK_CACHE, 1)


def test_a_context_too_small_for_a_stall_is_an_error_with_a_remedy(model: LoadedModel) -> None:
    file = read_model_file(model_path())
    work = ServeWork(n_prompt=8, n_gen=5, turns=1, clients=(2,), threads=1, repeats=1, peer=False)
    spec = servers.ServerSpec(file=file, n_ctx=256, clients=2, threads=1)
    with pytest.raises(CannotRunError, match="use a larger --n-ctx"):
        _stall(None, 0, Script(model, file, work), work, spec)  # type: ignore[arg-type]


@needs_server
@needs_stock
@pytest.mark.bench
@pytest.mark.slow
def test_throughput_of_eight_clients(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    small = ["--n-prompt", "512", "--n-gen", "64", "--turns", "4", "--repeats", "3"]
    rows = run(path, "serve", "--kv", "mixed", "--clients", "1,8", *small)["rows"]
    (eight,) = (r for r in rows if r["test"] == "serve" and r["engine"] == "mixedkv" and r["clients"] == 8)
    (stall,) = (r for r in rows if r["test"] == "stall")
    assert eight["vs_serial"] > 1.8
    assert eight["vs_stock"] > 2
    assert stall["vs_idle"] < 3
