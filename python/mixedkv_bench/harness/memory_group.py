"""A control group of a process's own, with less memory than the machine has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_ROOT = Path("/sys/fs/cgroup")
Kind = Literal["cgroup v2", "cgroup v1", "none"]


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """`folder` is the group's, None where none can be made: then nothing is limited."""

    kind: Kind
    folder: Path | None

    def join(self) -> None:
        """Put this process into it; for `preexec_fn`."""
        if self.folder is not None:
            (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def used(self) -> dict[str, int]:
        """Return `peak`: the most bytes; `pushed`: how often pages had to go (version 2); `killed`:
        processes.
        """
        if self.folder is None:
            return {}
        if self.kind == "cgroup v2":
            events = _fields(self.folder / "memory.events")
            return {
                "peak": _number(self.folder / "memory.peak"),
                "pushed": events.get("max", 0),
                "killed": events.get("oom_kill", 0),
            }
        return {  # failcnt stays 0 on kernels of today
            "peak": _number(self.folder / "memory.max_usage_in_bytes"),
            "killed": _fields(self.folder / "memory.oom_control").get("oom_kill", 0),
        }


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Make a control group of `limit` bytes below this process's own, without swap, for as long as the block
    runs.
    """
    group = next(
        (made for make in (_make_v2, _make_v1) if (made := _try(make, limit))), MemoryGroup("none", None)
    )
    try:
        yield group
    finally:
        if group.folder is not None:
            with contextlib.suppress(OSError):
                group.folder.rmdir()


def _try(make: Callable[[int], MemoryGroup | None], limit: int) -> MemoryGroup | None:
    try:
        return make(limit)
    except OSError:
        return None


def _make_v2(limit: int) -> MemoryGroup | None:
    for base in (_ROOT, _ROOT / "unified"):
        folder = base / _own("").lstrip("/") / f"mixedkv-{os.getpid()}"
        if "memory" not in _text(folder.parent / "cgroup.subtree_control").split():
            continue
        return _make("cgroup v2", folder, {"memory.max": limit, "memory.swap.max": 0})
    return None


def _make_v1(limit: int) -> MemoryGroup | None:
    folder = _ROOT / "memory" / _own("memory").lstrip("/") / f"mixedkv-{os.getpid()}"
    if not (folder.parent / "memory.limit_in_bytes").exists():
        return None
    return _make("cgroup v1", folder, {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit})


def _make(kind: Kind, folder: Path, settings: dict[str, int]) -> MemoryGroup:
    folder.mkdir()
    try:
        for i, (name, value) in enumerate(settings.items()):
            if i == 0 or (folder / name).exists():  # the second is about swap, which not every kernel counts
                (folder / name).write_text(str(value))
    except OSError:
        folder.rmdir()
        raise
    return MemoryGroup(kind, folder)


def _own(controller: str) -> str:
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    raise FileNotFoundError(f"this process is in no group of {controller or 'version 2'}")


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in _text(path).splitlines())}


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
