"""The replicas of an application on Ray Serve that this process has started."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TITLE = b"ray::ServeReplica:default:engine"


def replica_pids() -> list[int]:
    """The ids of the processes with an engine: children of a child of this one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (process / "cmdline").read_bytes()
            if title.startswith(_TITLE) and _parent(_parent(process)).name == str(os.getpid()):
                found.append(int(process.name))
    return sorted(found)


def _parent(process: Path) -> Path:
    """The folder of its parent in /proc."""
    return process.parent / (process / "stat").read_text().rpartition(")")[2].split()[1]
