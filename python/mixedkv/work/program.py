"""Runs tasks in a process that can be ended.

`processes.py` runs this file by its path. It imports nothing of this package, so that it starts quickly. Its
first line is "ready". A request is a line of JSON and the bytes after it; so is its answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import sys
import threading
from functools import lru_cache
from typing import Any, BinaryIO

try:
    import resource
    import signal
except ImportError:  # Windows, where only the time on the clock is bounded
    resource = signal = None  # type: ignore[assignment]

_STACK = 64 << 20  # as where constraints are compiled in earnest
_IDLE_SECONDS = 120.0  # after which it ends
_NICE = 10  # the engine's threads come first where there are few processors
_LARGE = 256 << 20  # bytes of memory: it ends after a task that leaves more, and the next one starts anew


@lru_cache
def _function(file: str, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"mixedkv_task_{abs(hash(file))}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return getattr(module, name)


def _memory(field: int) -> int:
    """Return the bytes of address space (0) or memory (1) of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def _limit(seconds: float, n_bytes: int) -> None:
    """End the process where it takes more from here on; 0 seconds: no longer."""
    if resource is None:
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = resource.RLIM_INFINITY
    if n_bytes and os.path.exists("/proc/self/statm"):
        most = _memory(0) + n_bytes
    elif n_bytes and sys.platform != "darwin":  # which counts what no process ever used
        most = n_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )


def _answer(request: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        function = _function(request["file"], request["function"])
        _limit(request["seconds"], request["n_bytes"])
        fields, out = function(request["fields"], data)
        return fields, out
    except MemoryError:
        return {"memory": True}, b""
    except ValueError as error:
        return {"error": str(error)[:2000]}, b""
    except Exception as error:
        return {"bug": f"{type(error).__name__}: {error}"[:500]}, b""
    finally:
        _limit(0, 0)


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    answers.write(b"ready\n")
    answers.flush()
    while True:
        if resource is not None and not select.select([requests], [], [], _IDLE_SECONDS)[0]:
            return
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        fields, out = _answer(request, requests.read(request["size"]))
        answers.write(json.dumps({**fields, "size": len(out)}).encode() + b"\n")
        answers.write(out)
        answers.flush()
        del request, fields, out
        if os.path.exists("/proc/self/statm") and _memory(1) > _LARGE:
            return


def _give_way() -> None:
    """Lower the priority of this process, and of its session where Linux shares out processors by session."""
    os.nice(_NICE)
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(_NICE))


def main() -> None:
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _give_way()
    sys.path.pop(0)  # this file's folder
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, answers), daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
