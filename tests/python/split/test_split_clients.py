"""Many clients at a time; clients, servers and networks that fail."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.cli.main import main
from mixedkv.errors import ContextLengthError
from mixedkv_split.client import SplitClient, SplitServerError
from mixedkv_split.export import Exported
from mixedkv_split.head import Head
from support.patience import PATIENCE, wait_for
from support.servers import split_servers
from support.servers.split_servers import Running

pytestmark = pytest.mark.full

_GO_ON = ((2, -100.0),)  # the token that ends an answer
_RECALLS = [make_recall(seed, 20) for seed in range(8)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return split_servers.split(model_path(), tmp_path_factory.mktemp("split"))


def _used(server: Running) -> int:
    """Cells that hold a token, asked between two steps."""
    return server.engine.call(lambda: server.engine.pool.used).result(PATIENCE)


def _answer(client: SplitClient, i: int) -> str:
    return "".join(client.generate(_RECALLS[i].messages, max_tokens=24, temperature=0))


@pytest.mark.parametrize("precision", ["f16", "f32"])
def test_eight_clients_are_answered_right_at_a_time(parts: Exported, head: Head, precision: str) -> None:
    with (
        split_servers.running(parts.body, kv="mixed", n_ctx=8192) as server,
        SplitClient(head, server.address, precision=precision) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda i: _answer(client, i), range(8)))
        n_together = server.engine.n_steps
        alone = [_answer(client, i) for i in range(8)]
        assert server.engine.n_steps - n_together > n_together  # those at a time shared their steps
    assert answers == alone
    right = [recall.fact.answer in answer for recall, answer in zip(_RECALLS, answers, strict=True)]
    assert sum(right) >= 7


def test_a_session_goes_on_with_what_is_new_only(parts: Exported, head: Head) -> None:
    question = {"role": "user", "content": "What is the code of the mill?"}
    with split_servers.linked(parts, head, kv="mixed", n_ctx=4096) as client, client.session() as session:
        messages: list[Any] = [*_RECALLS[0].messages]
        first = "".join(session.generate(messages, max_tokens=16, temperature=0))
        n, sent = len(session.tokens), session.n_sent_bytes
        assert sent == 2 * head.width * n
        messages += [{"role": "assistant", "content": first}, question]
        assert "".join(session.generate(messages, max_tokens=16, temperature=0))
        assert session.n_resends == 0
        assert session.n_sent_bytes == 2 * head.width * len(session.tokens)


@pytest.mark.parametrize("kv", ["f16", "mixed:threshold=32,group=8"])
def test_drafts_give_the_same_answer_in_fewer_steps(parts: Exported, head: Head, kv: str) -> None:
    """The bundled model repeats a fact word for word, so that lookup finds most of its answer."""
    with (
        split_servers.running(parts.body, kv=kv, n_ctx=2048) as server,
        SplitClient(head, server.address, precision="f32") as client,
    ):
        tokens = [head.tokenizer.encode(recall.messages)[0] for recall in _RECALLS]
        answers, steps = [], []
        for draft in (0, 8):
            before = server.engine.n_steps
            answers.append([_tokens(client, prompt, draft) for prompt in tokens])
            steps.append(server.engine.n_steps - before)
        assert answers[0] == answers[1]
        assert steps[1] < 0.8 * steps[0]


def _tokens(client: SplitClient, prompt: list[int], draft: int) -> list[int]:
    with client.session() as session:
        answer = list(session.generate_tokens(prompt, max_tokens=24, temperature=0, draft=draft))
        assert session.n_resends == 0
        return answer


def test_a_question_asked_again_goes_back(parts: Exported, head: Head) -> None:
    with split_servers.linked(parts, head, kv="f16", n_ctx=2048) as client, client.session() as session:
        prompt = head.tokenizer.encode(_RECALLS[0].messages)[0]
        first = list(session.generate_tokens(prompt, max_tokens=16, temperature=0))
        sent = session.n_sent_bytes
        assert list(session.generate_tokens(prompt, max_tokens=16, temperature=0)) == first
        assert len(first) < 16  # so the token that ended it was asked for, too
        assert session.n_sent_bytes - sent == 2 * head.width * (1 + len(first))
        assert session.n_resends == 0


def test_an_answer_that_was_lost_on_the_way_is_asked_for_again(parts: Exported, head: Head) -> None:
    """The server stands a token further than the client knows."""
    with split_servers.linked(parts, head, kv="mixed", n_ctx=2048) as client:
        expected = _tokens(client, list(range(5, 50)), 0)
        with client.session() as session:
            answer = []
            for token in session.generate_tokens(list(range(5, 50)), max_tokens=24, temperature=0):
                answer.append(token)
                if len(answer) == 3:  # as if the reply to the last message had not come
                    del session.tokens[-1:], session._hashes[-1:]
                    session._stream = None
        assert answer == expected
        assert session.n_resends == 0


def test_a_session_outlives_a_stream_that_was_silent(parts: Exported, head: Head) -> None:
    with split_servers.linked(parts, head, kv="mixed", n_ctx=2048, idle_timeout=0.2) as client:
        expected = _tokens(client, list(range(5, 50)), 0)
        with client.session() as session:
            stream = session.generate_tokens(list(range(5, 50)), max_tokens=24, temperature=0)
            answer = [next(stream)]
            time.sleep(0.6)
            assert [*answer, *stream] == expected
            assert session.n_resends == 0


def test_sessions_that_begin_alike_share_rows(parts: Exported, head: Head) -> None:
    with (
        split_servers.running(parts.body, kv="f16", n_ctx=4096) as server,
        SplitClient(head, server.address) as client,
        client.session() as first,
    ):
        list(first.generate(_RECALLS[0].messages, max_tokens=4, temperature=0))
        used = _used(server)
        with client.session() as second:
            list(second.generate(_RECALLS[0].messages, max_tokens=4, temperature=0))
            assert _used(server) < 1.2 * used


def test_a_prompt_beyond_the_context_goes_on_with_sinks_and_window(parts: Exported, head: Head) -> None:
    """A fact at the very start and one near the end are known, the context stays as it is."""
    recall = make_recall(3, 12, where=0.0)
    tokenizer = head.tokenizer
    start = tokenizer.tokenize(recall.fact.statement)
    middle = tokenizer.tokenize(" ".join(r.fact.statement for r in _RECALLS * 20), start=False)
    near = _RECALLS[1].fact
    for fact in (recall.fact, near):
        end = tokenizer.tokenize(
            f" {near.statement} Question: {fact.question} Answer:", start=False, special=True
        )
        prompt = [*start, *middle, *end]
        with (
            split_servers.running(parts.body, kv="mixed", n_ctx=512) as server,
            SplitClient(head, server.address) as client,
        ):
            assert len(prompt) > 2.5 * client.n_ctx
            with pytest.raises(ContextLengthError, match="shorten it, or give a window"):
                list(client.generate(prompt))
            answer = "".join(
                client.generate(prompt, max_tokens=24, temperature=0, sinks=len(start), window=200)
            )
            assert fact.answer in answer
            assert _used(server) <= client.n_ctx


def test_the_command_line_has_a_window(parts: Exported, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "the rain in the night and the lamp in the mill " * 60
    with split_servers.running(parts.body, n_ctx=256) as server:
        command = ["split", "run", str(parts.head), server.address, "-p", prompt, "-n", "4"]
        assert main(command) == 2
        assert "give a window" in capsys.readouterr().err
        assert main([*command, "--window", "100", "--sinks", "8"]) == 0
        assert capsys.readouterr().out.strip()


def test_an_answer_longer_than_the_context_goes_on(parts: Exported, head: Head) -> None:
    with split_servers.linked(parts, head, kv="mixed", n_ctx=512) as client, client.session() as session:
        ends = head.tokenizer.tokenize("The rain", start=False)
        answer = list(
            session.generate_tokens(
                ends, max_tokens=700, temperature=1.0, seed=3, window=200, logit_bias=_GO_ON
            )
        )
        assert len(answer) == 700
        assert session.n_sent_bytes == 2 * head.width * (len(ends) + len(answer) - 1)  # each once


def test_rows_that_had_to_go_are_sent_again(parts: Exported, head: Head) -> None:
    """More sessions than the context has room for: all get on, by turns, to the same answers."""
    with split_servers.linked(parts, head, n_ctx=1024, parallel=1, idle_sessions=1) as client:
        expected = [_answer(client, i) for i in range(3)]
        sessions = [client.session() for _ in range(3)]
        streams = [
            session.generate(_RECALLS[i].messages, max_tokens=24, temperature=0)
            for i, session in enumerate(sessions)
        ]
        texts = ["", "", ""]
        for _ in range(40):
            for i, stream in enumerate(streams):
                texts[i] += next(stream, "")
        assert texts == expected
        assert sum(session.n_resends for session in sessions) > 0
        for session in sessions:
            session.close()


def test_a_client_that_goes_away_frees_its_place(parts: Exported, head: Head) -> None:
    """parallel=1: whoever comes next would wait for ever."""
    with (
        split_servers.running(parts.body, kv="mixed", n_ctx=4096, parallel=1) as server,
        SplitClient(head, server.address) as client,
    ):
        expected = _answer(client, 0)
        gone = SplitClient(head, server.address)
        session = gone.session()
        options: dict[str, Any] = {"max_tokens": 3000, "temperature": 0, "logit_bias": _GO_ON}
        stream = session.generate_tokens(list(range(5, 800)), **options)

        def ask() -> None:
            with suppress(Exception):
                list(stream)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: server.engine.n_running == 1)
        gone.close()  # in the middle of its work
        assert _answer(client, 0) == expected
        wait_for(lambda: server.engine.n_running == server.engine.n_queued == 0)
        asking.join(PATIENCE)


@contextmanager
def _process(parts: Exported, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`mixedkv split serve`, and its port."""
    command = [sys.executable, "-m", "mixedkv", "split", "serve", str(parts.body), "--threads", "1"]
    command += ["--port", str(port), "--n-ctx", "4096"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving .* on 127\.0\.0\.1:(\d+)$", line.rstrip()):
                yield process, int(found[1])
                return
        raise AssertionError("the server did not start")
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(PATIENCE)
        process.stderr.close()


def test_a_server_that_is_killed_and_comes_back_costs_no_token(parts: Exported, head: Head) -> None:
    with (
        _process(parts) as (process, port),
        SplitClient(head, f"127.0.0.1:{port}", patience=PATIENCE) as client,
    ):
        expected = list(client.generate(_RECALLS[1].messages, max_tokens=24, temperature=0))
        with client.session() as session:
            stream = session.generate(_RECALLS[1].messages, max_tokens=24, temperature=0)
            answer = [next(stream)]
            process.kill()
            process.wait(PATIENCE)
            with _process(parts, port):
                answer += list(stream)
                assert session.n_resends == 1
        assert "".join(answer) == "".join(expected)


@pytest.mark.nightly
def test_a_server_that_is_told_to_stop_does(parts: Exported) -> None:
    with _process(parts) as (process, port):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


class _Proxy:
    """Passes bytes on, until it is told to stall."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.flows = threading.Event()
        self.flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while True:
            try:
                data = source.recv(1 << 16)
                self.flows.wait()
                target.sendall(data)
            except OSError:
                return
            if not data:
                target.close()
                return

    def close(self) -> None:
        self.flows.set()
        self._listener.close()


def test_a_network_that_stalls_is_given_up_and_tried_again(parts: Exported, head: Head) -> None:
    with split_servers.running(parts.body, kv="mixed", n_ctx=4096) as server:
        proxy = _Proxy(server.port)
        with SplitClient(head, f"127.0.0.1:{proxy.port}", keepalive=1.0) as client:
            expected = "".join(client.generate(_RECALLS[2].messages, max_tokens=24, temperature=0))
            with client.session() as session:
                stream = session.generate(_RECALLS[2].messages, max_tokens=24, temperature=0)
                answer = next(stream)
                proxy.flows.clear()
                threading.Timer(4.0, proxy.flows.set).start()
                answer += "".join(stream)
            assert answer == expected
        proxy.close()


def test_patience_ends(parts: Exported, head: Head) -> None:
    with (
        _process(parts) as (process, port),
        SplitClient(head, f"127.0.0.1:{port}", patience=0.5) as client,
        client.session() as session,
    ):
        stream = session.generate(_RECALLS[1].messages, max_tokens=24, temperature=0)
        next(stream)
        process.kill()
        with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port}: UNAVAILABLE: .*: start") as failed:
            list(stream)
        assert isinstance(failed.value, SplitServerError)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(SplitServerError, match=f"{port}: UNAVAILABLE"):
        SplitClient(head, f"127.0.0.1:{port}")


@pytest.mark.nightly
def test_the_command_line(parts: Exported, tmp_path: Path) -> None:
    def mixedkv(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mixedkv", "split", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    head, body = str(tmp_path / "head.gguf"), str(tmp_path / "body.gguf")
    assert mixedkv("export", str(model_path()), head, body).returncode == 0
    assert mixedkv("export", str(model_path()), head, body).returncode == 2
    with _process(Exported(Path(head), Path(body), 0, 0)) as (_, port):
        done = mixedkv("run", head, f"127.0.0.1:{port}", "-p", "The code of the", "-n", "8")
        assert done.returncode == 0
        assert done.stdout.strip()
        assert "bytes a token sent" in done.stderr
    failed = mixedkv("run", head, f"127.0.0.1:{port}", "-p", "The code of the")
    assert failed.returncode == 2
    assert f"127.0.0.1:{port}: UNAVAILABLE" in failed.stderr
    assert "start `mixedkv split serve` there" in failed.stderr
