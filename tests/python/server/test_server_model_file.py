"""A model's file that is changed in place while it is served: mapped pages would end the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest

from mixedkv.bundled import model_path
from mixedkv_server.engines import ModelWatch
from support.patience import PATIENCE, wait_for
from support.servers.server import running

pytestmark = pytest.mark.full

TRUNCATE = "import os, sys; os.truncate(sys.argv[1], 100)"


def truncated(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRUNCATE, str(path)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.write_bytes(b"x" * 1000)
    return path


def test_who_cuts_the_file_waits_until_it_is_not_read(file: Path) -> None:
    sizes: list[int] = []

    def stop() -> None:
        time.sleep(0.5)  # a step
        sizes.append(file.stat().st_size)

    with ModelWatch([file]) as watch:
        if not watch._leased:
            pytest.skip("no leases on this file system")
        watch.begin(stop)
        other = truncated(file)
        assert other.wait(PATIENCE) == 0
    assert sizes == [1000]
    assert file.stat().st_size == 100


@pytest.mark.parametrize("how", ["longer", "same size", "appended by who had it open"])
def test_a_change_is_told_once(file: Path, how: str) -> None:
    stopped = threading.Event()
    first: IO[bytes] | None = file.open("ab") if how.startswith("appended") else None  # so there is no lease
    with ModelWatch([file]) as watch:
        assert (first is not None) == (not watch._leased)
        watch.begin(stopped.set)
        time.sleep(0.5)
        assert not stopped.is_set()
        if first is not None:
            first.write(b"y")
            first.close()
        elif how == "longer":
            file.write_bytes(b"x" * 2000)
        else:
            with file.open("r+b") as changed:
                changed.write(b"y")
        assert stopped.wait(PATIENCE)


def test_another_file_of_its_name_is_no_change(file: Path) -> None:
    stopped = threading.Event()
    with ModelWatch([file]) as watch:
        watch.begin(stopped.set)
        other = file.with_name("new")
        other.write_bytes(b"new")
        other.rename(file)
        assert file.read_bytes() == b"new"
        assert not stopped.wait(1)


def test_the_lease_ends_with_the_watch(file: Path) -> None:
    with ModelWatch([file]):
        pass
    fd = os.open(file, os.O_RDONLY)
    assert fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(fd)
    began = time.monotonic()
    file.write_bytes(b"")
    assert time.monotonic() - began < 20


@pytest.mark.nightly
def test_a_draft_model_that_is_cut_off_is_told_too(tmp_path: Path) -> None:
    path = tmp_path / "draft.gguf"
    shutil.copy(model_path(), path)
    with running("--n-ctx", "1024", "--speculation", str(path)) as server:
        assert server.status("POST", "/v1/completions", {"prompt": "a", "max_tokens": 20}) == 200
        assert truncated(path).wait(PATIENCE) == 0
        wait_for(lambda: server.status("GET", "/ready") == 503)
        status, answer, _ = server.request("POST", "/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["code"]) == (503, "model_changed")
        assert server.stop() == 0


def test_a_server_whose_model_is_cut_off_says_so_and_lives(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(model_path(), path)
    endless: dict[str, Any] = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True}
    with running("-m", str(path), "--n-ctx", "131072", "--embeddings") as server:
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(server.status("POST", "/v1/completions", endless))

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for thread in asking:
            thread.start()
        wait_for(lambda: server.stats()["requests"]["running"] == 3)
        assert truncated(path).wait(PATIENCE) == 0
        for thread in asking:
            thread.join(PATIENCE)
        assert statuses == [503] * 3
        for where, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/embeddings", {"input": "a", "model": "model"}),
            ("/v1/context", {"prompt": "a", "model": "model"}),
        ):
            status, answer, _ = server.request("POST", where, body)
            assert (status, answer["error"]["code"]) == (503, "model_changed")
            assert "restart the server" in answer["error"]["message"]
        for where in ("/health", "/ready"):
            assert server.status("GET", where) == 503
        assert server.status("GET", "/metrics") == 200
        assert server.stop() == 0
    assert server.log.count("no more requests are taken") == 1
