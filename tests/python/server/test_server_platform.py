"""A server starts, and notices a changed model file, on systems without POSIX modules or leases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mixedkv_server import engines

pytestmark = pytest.mark.core

_WITHOUT = """
import sys
sys.modules.update(fcntl=None, resource=None)  # as on Windows
from mixedkv_server import http_server
from mixedkv_server.engines import ModelWatch
print(http_server._allow_connections(100_000))
with ModelWatch([sys.argv[1]]) as watch:
    print(watch._changes())
    with open(sys.argv[1], "ab") as file:
        file.write(b"more")
    print(watch._changes())
"""


def test_without_posix_modules(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    command = [sys.executable, "-c", _WITHOUT, str(model)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["100000", "False", "True"]


def test_without_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has fcntl, but no leases: the file's size and time tell."""

    monkeypatch.setattr(engines, "_HAS_LEASES", False)
    monkeypatch.setattr(engines, "fcntl", None)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with engines.ModelWatch([model]) as watch:
        assert not watch._changes()
        model.write_bytes(b"GGUF and more")
        assert watch._changes()
