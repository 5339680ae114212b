"""The servers that `serve` compares, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.stock_peer import check_stock_library, would_crash

STOCK, STOCK_CACHE = "llama_cpp", "llama_cpp, RAM cache"

_STOCK_CHILD = Path(__file__).with_name("stock_server.py")
_STOCK_NEEDS = ("uvicorn", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings")
_DROPPED = ("LLAMA_CPP_LIB_PATH", "HOST", "PORT", "CONFIG_FILE")  # the stock server obeys these first
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_START_SECONDS = 300.0
_STOP_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """Settings that every server gets: `n_ctx` tokens for each of `clients`, and CPU threads."""

    file: ModelFile
    n_ctx: int
    clients: int
    threads: int


def mixedkv_command(spec: ServerSpec, setting: Setting, port: int) -> list[str]:
    """Return the command of our server, with one pool of rows for all clients: each has as many as the stock
    server's only one.
    """
    command = [sys.executable, "-m", "mixedkv", "serve", "-m", str(spec.file.path), "--kv", setting.spec]
    command += ["--n-ctx", str(spec.n_ctx * spec.clients), "--parallel", str(spec.clients)]
    return [*command, "--threads", str(spec.threads), "--host", "127.0.0.1", "--port", str(port)]


def stock_command(spec: ServerSpec, engine: str, port: int) -> list[str]:
    """Return the command of the stock server at its best: it writes no logits of prompts, and lets an answer
    end before the next request begins, which by default would cut it off. Without flash attention, which
    slows down its decoding.
    """
    options = {
        "model": spec.file.path,
        "n_ctx": spec.n_ctx,
        "n_threads": spec.threads,
        "n_threads_batch": spec.threads,
        "logits_all": "false",
        "interrupt_requests": "false",
        "verbose": "false",
        "host": "127.0.0.1",
        "port": port,
    }
    if engine == STOCK_CACHE:
        options |= {"cache": "true", "cache_type": "ram"}
    crashes = would_crash(spec.file)
    server = [str(_STOCK_CHILD)] if crashes else ["-m", "llama_cpp.server"]
    return [sys.executable, *server, *(text for key in options for text in (f"--{key}", str(options[key])))]


def llama_server_command(spec: ServerSpec, setting: Setting, program: Path, port: int) -> list[str]:
    """Return the command of a llama-server with a slot for each client, in a cache that all share; with flash
    attention where the cache needs it.
    """
    command = [str(program), "-m", str(spec.file.path), "-c", str(spec.n_ctx * spec.clients)]
    command += [
        "-np",
        str(spec.clients),
        "--kv-unified",
        "-ctk",
        setting.kv.type_k,
        "-ctv",
        setting.kv.type_v,
    ]
    command += ["-fa", "on" if setting.flash_attn else "off", "-t", str(spec.threads), "-ngl", "0"]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def stock_extra_buffers(file: ModelFile) -> bool:
    """Return whether the stock server runs on repacked weights: not where they would crash it."""
    return not would_crash(file)


def check_stock() -> None:
    """Raises ValueError if the stock library, or a package that its server needs, is missing."""
    try:
        check_stock_library()
    except ValueError as error:
        raise ValueError(f"{error}; or use --no-peer") from None
    for name in _STOCK_NEEDS:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"the stock server needs {name}: run pip install 'mixedkv[peer]', or use --no-peer"
            )


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Server:
    """A server in a process of its own, ready when made.

    Raises:
        CannotRunError: it did not start.
    """

    def __init__(self, command: Sequence[str], port: int, seconds: float = _START_SECONDS) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (until close)
        environment = {key: value for key, value in os.environ.items() if key not in _DROPPED}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment
        )
        try:
            self._wait(time.monotonic() + seconds)
        except BaseException:
            self.close(seconds=1.0)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def cpu_seconds(self) -> float | None:
        """The CPU seconds that the process has used, None where the system does not tell."""
        try:  # fields 14 and 15 of proc(5)
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _wait(self, until: float) -> None:
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise CannotRunError(f"the server did not start: {self.last_words()}")
            with (
                contextlib.suppress(OSError),
                _OPEN(self.url + "/v1/models", timeout=5),
            ):
                return
            time.sleep(0.1)
        raise CannotRunError("the server was not ready in time")

    def last_words(self) -> str:
        """Return the end of what it printed, and how it ended if it has."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        text = " ".join([line.strip() for line in lines if line.strip()][-2:])
        code = self._process.poll()
        died = f"died of signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
        return text if code is None else f"{died}. {text}"

    def close(self, seconds: float = _STOP_SECONDS) -> None:
        """End it, by force if it has not ended after some seconds."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()
