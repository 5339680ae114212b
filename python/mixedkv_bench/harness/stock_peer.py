"""The stock llama_cpp beside this package's library, for the speed table.

Two copies of llama.cpp cannot live in one process, so the stock one runs in a subprocess, which waits while
others are timed: its settings take their turns in the same rounds. `mixedkv bench speed --peer` asks for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.speed_run import RunFacts, SpeedWork

_CHILD = Path(__file__).with_name("stock_peer_child.py")
_VARIABLE = "LLAMA_CPP_LIB_PATH"


def stock_library() -> Path | None:
    """Return the folder of the libraries that an installed llama-cpp-python came with, or None."""
    try:
        folder = Path(str(importlib.metadata.distribution("llama-cpp-python").locate_file("llama_cpp/lib")))
    except importlib.metadata.PackageNotFoundError:
        return None
    return folder if any(folder.glob("*llama.*")) else None


def check_stock_library() -> None:
    """Check that there is a stock library; without one the peer would be this package's own.

    Raises:
        ValueError: llama-cpp-python is not installed, or was installed without its libraries.
    """
    if stock_library() is None:
        raise ValueError(
            "the stock llama-cpp-python to compare with is not installed: run pip install 'mixedkv[peer]', "
            "which compiles it"
        )


class Peer:
    """A process in which llama_cpp runs on the library it was installed with.

    Raises:
        ValueError: it is not installed, or does not start.
    """

    def __init__(self, model: ModelFile) -> None:
        check_stock_library()
        extra = "0" if would_crash(model) else "1"
        environment = {key: value for key, value in os.environ.items() if key != _VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, str(_CHILD), str(model.path), extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            self.facts = self._read()
        except CannotRunError as error:
            raise ValueError(f"--peer: the stock llama_cpp does not start: {error}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, setting: Setting, work: SpeedWork) -> PeerRunner:
        return PeerRunner(self, setting, work)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            CannotRunError: the peer could not do it, or has died of it.
        """
        try:
            assert self._process.stdin is not None
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            raise CannotRunError(self._why_dead()) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CannotRunError(self._why_dead())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CannotRunError(answer["error"])
        return answer

    def _why_dead(self) -> str:
        code = self._process.wait()
        return (
            f"the stock llama_cpp died of signal {-code}"
            if code < 0
            else f"the peer ended with status {code}"
        )

    def close(self) -> None:
        """Close the peer: the end of its input ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class PeerRunner:
    """A setting in the peer's process, timed there."""

    def __init__(self, peer: Peer, setting: Setting, work: SpeedWork) -> None:
        self._peer = peer
        answer = peer.ask(do="open", cache=_description(setting), work=asdict(work))
        self._id = answer["id"]
        self.facts: RunFacts = {
            "fill": answer["fill"],
            "attention": "llama.cpp",
            "peer_version": peer.facts["peer_version"],
            "peer_extra_buffers": peer.facts["peer_extra_buffers"],
        }

    def measure(self) -> tuple[float, float]:
        answer = self._peer.ask(do="measure", id=self._id)
        return answer["prompt"], answer["generated"]

    def close(self) -> None:
        with contextlib.suppress(CannotRunError):  # a dead peer has closed everything
            self._peer.ask(do="close", id=self._id)


def _description(setting: Setting) -> dict[str, Any]:
    """Return the fields of a `StockCache`."""
    return {
        "flash_attn": setting.flash_attn,
        "type_k": setting.type_k,
        "type_v": setting.type_v,
        "type_ids": setting.type_ids,
    }


def would_crash(model: ModelFile) -> bool:
    """Return whether the stock library would crash here: built by GCC before 13, it dies where AMX repacks
    quantised weights.
    """
    plain = (0, 1, 32)  # general.file_type: F32, F16, BF16
    cpu = Path("/proc/cpuinfo")
    has_amx = cpu.exists() and " amx_int8" in cpu.read_text()
    return has_amx and model.metadata.get("general.file_type") not in plain
