"""A server starts, and notices a changed model file, on systems without POSIX modules or leases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mixedkv import system
from mixedkv_server import engines
from mixedkv_server.settings import ServerSettings

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

    monkeypatch.setattr(system, "HAS_LEASES", False)
    monkeypatch.setattr(system, "fcntl", None)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    with engines.ModelWatch([model]) as watch:
        assert not watch._changes()
        model.write_bytes(b"GGUF and more")
        assert watch._changes()


def test_keys_in_files_are_refused_without_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "HAS_OWNERS", False)
    with pytest.raises(ValueError, match=r"store_key_file.*leave it out"):
        ServerSettings(store="kv-cache", store_key_file="key")


_MODULES = """
import importlib, json, pkgutil, sys
ours = ("mixedkv", "mixedkv_bench", "mixedkv_server", "mixedkv_service")
ended = ("__main__", "model_child", "program")  # programs, which are run and not imported
found = []
for name in ours:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if module.name.rpartition(".")[2] not in ended and "._llama_cpp_python" not in module.name:
            importlib.import_module(module.name)
            found.append(module.name)
others = [name for name in sys.modules if name.partition(".")[0] not in (*ours, "llama_cpp", "__main__")]
print(json.dumps([found, others]))
"""

# What others wrote is imported before, since it is made for each system; so are the compiled parts.
_AS_WINDOWS = """
import asyncio, importlib, json, os, signal, socket, sys
ours, others = json.load(sys.stdin)
import mixedkv
for name in others:
    importlib.import_module(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "mixedkv"]:
    if name not in ("mixedkv._core", "mixedkv._chat"):
        del sys.modules[name]
for name in ("fcntl", "grp", "pwd", "resource", "termios", "tty"):
    sys.modules[name] = None
for module, names in (
    (asyncio, "open_unix_connection start_unix_server"),
    (os, "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK fchmod fork geteuid getloadavg getuid killpg nice"),
    (os, "pread sched_getaffinity setsid statvfs sysconf sysconf_names"),
    (signal, "ITIMER_PROF SIGHUP SIGIO SIGKILL SIGUSR1 SIGUSR2 pthread_sigmask setitimer"),
    (socket, "AF_UNIX"),
):
    for name in names.split():
        delattr(module, name)
sys.platform = "win32"
for name in ours:
    importlib.import_module(name)
from mixedkv_bench.output import system
from mixedkv_server.settings import ServerSettings
assert system.usable_cpus() > 0
ServerSettings(model=["a.gguf"])
for fields in ({"host": "/tmp/socket"}, {"model": ["a.gguf", "b.gguf"]}, {"keep_alive": "5m"}):
    try:
        ServerSettings(**{"model": ["a.gguf"]} | fields)
    except ValueError as error:
        print(error)
"""


@pytest.mark.full
def test_all_modules_are_imported_without_posix() -> None:
    """And servers that need Unix sockets are refused."""
    found = _python(_MODULES)
    assert len(json.loads(found)[0]) > 100
    refused = _python(_AS_WINDOWS, found)
    assert refused.count("needs Unix sockets, which this system lacks") == 3


def _python(program: str, given: str = "") -> str:
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout
