"""Layers on another machine, by llama.cpp's RPC backend, which says that it can run any node: fused ones are
addresses of this process.

The backend is not part of the package: it is compiled here, from the source that a build in this tree has
unpacked. It also is an accelerator that every machine has, with memory that is not the CPU's.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mixedkv import _native
from support import REPOSITORY, TESTS
from support.patience import PATIENCE, wait_for

pytestmark = pytest.mark.nightly

GGML = REPOSITORY / "build" / "release" / "llama.cpp" / "ggml"
CHILD = TESTS / "support" / "children" / "rpc_child.py"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backend as a library that ggml can load."""
    compiler = shutil.which("g++")
    if not sys.platform.startswith("linux") or not GGML.is_dir() or not compiler:
        pytest.skip(f"needs Linux, g++ and {GGML}: build in this tree")
    path = tmp_path_factory.mktemp("rpc") / "libggml-rpc.so"
    folder = GGML / "src" / "ggml-rpc"
    defines = ["-DGGML_SHARED", "-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_DL"]
    includes = [f"-I{GGML / 'include'}", f"-I{GGML / 'src'}", f"-I{folder}"]
    sources = [
        folder / "ggml-rpc.cpp",
        folder / "transport.cpp",
        _native.library_folder() / "libggml-base.so",
    ]
    command = [compiler, "-std=c++17", "-shared", "-fPIC", *defines, *includes, *sources, "-o", path]
    subprocess.run(command, check=True, timeout=PATIENCE)
    return path


@pytest.fixture(scope="module")
def results(plugin: Path) -> list[dict[str, Any]]:
    output = plugin.with_name("output")
    with output.open("w") as log:  # no pipe: children of one that crashes would hold it open
        server = subprocess.Popen([sys.executable, CHILD, "server", plugin], stdout=log, stderr=log)
        try:
            accepted = "Accepted client connection"  # it is this server that listens there
            wait_for(lambda: accepted in output.read_text() or server.poll() is not None)
            assert accepted in output.read_text(), output.read_text()[-2000:]
            endpoint = re.search(r"endpoint *: (\S+)", output.read_text())
            assert endpoint
            command = [sys.executable, CHILD, "client", plugin, endpoint[1]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 0, f"{done.stderr[-2000:]}\nserver:\n{output.read_text()[-2000:]}"
            return json.loads(done.stdout.splitlines()[-1])
        finally:
            server.kill()
            server.wait(PATIENCE)


def test_fused_nodes_are_not_sent(results: list[dict[str, Any]]) -> None:
    """With the cache in this process attention is fused: the server would jump to addresses of ours."""
    here = [result for result in results if not result["offload_kqv"]]
    assert len(here) == 2
    for result in here:
        assert set(result["paths"]) == {"fused"}
        assert result["error"] < 1e-3


def test_rows_that_lie_there_are_merged(results: list[dict[str, Any]]) -> None:
    paths = {result["n_gpu_layers"]: result["paths"] for result in results if result["offload_kqv"]}
    assert set(paths[-1]) == {"merged"}
    assert set(paths[3]) == {"fused", "merged"}
    assert max(result["error"] for result in results) < 0.15


def test_rows_come_back_from_there(results: list[dict[str, Any]]) -> None:
    """States and exported blocks go on with the same bits."""
    assert all(result["same"] for result in results)
