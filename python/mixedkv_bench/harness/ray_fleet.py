"""Replicas on Ray Serve on this machine, for `mixedkv bench fleet`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mixedkv_bench.harness.contexts import CannotRunError
from mixedkv_bench.harness.servers import free_port

_OBJECTS = 80 << 20  # bytes of Ray's object store, which answers do not use
_SECONDS = 300.0
_TITLE = b"ray::ServeReplica:default:engine"
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class RayFleet:
    """A cluster of this machine alone, with one application at a time."""

    def __init__(self) -> None:
        import ray
        from ray import serve

        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_OBJECTS,
            _system_config={"worker_niceness": 0},  # 15 otherwise: replicas are slow where others are at work
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
        self._n = 0

    def deploy(self, options: dict[str, Any]) -> None:
        """Deploy an application in place of the last one, and wait until every replica has answered once.

        Raises:
            CannotRunError: it does not start.
        """
        from ray import serve

        from mixedkv.ray import build

        serve.delete("default")
        self._n = int(options["replicas"])
        try:
            serve.run(build({**options, "cpus": 0.01}))
        except RuntimeError as error:
            raise CannotRunError(f"the replicas did not start: {error}") from None
        self.warm()

    def warm(self) -> None:
        """Wait until all replicas are there, and let them answer."""
        _wait_for(lambda: len(replica_pids()) == self._n, "the replicas are not there in time")
        for i in range(4 * self._n):
            _wait_for(lambda i=i: self._answers(i), "the replicas do not answer in time")  # type: ignore[misc]

    def kill_one(self) -> None:
        """Kill a replica as if its machine went away; returns when another is in its place."""
        victim = replica_pids()[0]
        os.kill(victim, signal.SIGKILL)
        _wait_for(lambda: victim not in replica_pids(), "the replica does not die")
        self.warm()

    def _answers(self, number: int) -> bool:
        body = {"messages": [{"role": "user", "content": f"{number} {time.monotonic()}"}], "max_tokens": 1}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with _OPEN(request, timeout=60):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def replica_pids() -> list[int]:
    """Return the ids of the processes with an engine: children of a child of this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (process / "cmdline").read_bytes()
            if title.startswith(_TITLE) and _parent(_parent(process)).name == str(os.getpid()):
                found.append(int(process.name))
    return sorted(found)


def _parent(process: Path) -> Path:
    """Return the folder of its parent in /proc."""
    return process.parent / (process / "stat").read_text().rpartition(")")[2].split()[1]


def _wait_for(is_so: Callable[[], bool], message: str) -> None:
    until = time.monotonic() + _SECONDS
    while not is_so():
        if time.monotonic() > until:
            raise CannotRunError(message)
        time.sleep(0.1)
