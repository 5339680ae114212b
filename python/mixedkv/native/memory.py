"""Finds how much memory this process may still take: of the machine's, of its control groups', and of its
GPUs'.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
from llama_cpp import _ggml

_Names = tuple[tuple[str, ...], str, tuple[str, ...]]

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
# limits, usage, and what of it gives way
_V1: _Names = (
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2: _Names = ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are left below a limit: the machine's memory, or that of a control group."""

    left: int
    limit: int


def memory_room(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return the bytes that are left: the least of MemAvailable and of each control group above the process.
    None on systems other than Linux.
    """
    rooms = memory_rooms(proc, groups)
    return max(0, min(room.left for room in rooms)) if rooms else None


def memory_rooms(proc: Path = _PROC, groups: Path = _GROUPS) -> list[Room]:
    """Return the room below the machine's memory, and below the limit of each control group above the
    process.
    """
    machine = _fields(proc / "meminfo")
    if "MemAvailable:" not in machine:
        return []
    left, limit = (machine.get(name, 0) * 1024 for name in ("MemAvailable:", "MemTotal:"))
    return [Room(left, limit), *_group_rooms(proc, groups)]


def own_memory(proc: Path = _PROC) -> int:
    """Return the number of bytes that this process has of its own: all but pages of files."""
    return _fields(proc / "self" / "status").get("RssAnon:", 0) * 1024


def _group_rooms(proc: Path, groups: Path) -> Iterator[Room]:
    for root, names, folder in _own_groups(proc, groups):
        yield from _room(folder, *names)
        for parent in folder.parents if folder != root else ():
            yield from _room(parent, *names)
            if parent == root:
                break


def _own_groups(proc: Path, groups: Path) -> Iterator[tuple[Path, _Names, Path]]:
    """Yield the control groups of the process that count memory: the root folder, the names of their files,
    their folder.
    """
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield groups, _V2, groups / path.lstrip("/")
        elif "memory" in controllers.split(","):
            yield groups / "memory", _V1, groups / "memory" / path.lstrip("/")


def _room(folder: Path, limits: tuple[str, ...], usage: str, cache: tuple[str, ...]) -> Iterator[Room]:
    """Return what is left below its limits; the page cache gives way."""
    for name in limits:
        try:
            most = (folder / name).read_text().strip()
            if most != "max":
                stat = _fields(folder / "memory.stat")
                used = int((folder / usage).read_text()) - sum(stat.get(name, 0) for name in cache)
                yield Room(int(most) - used, int(most))
        except (OSError, ValueError):  # the root has none, or a container does not show it
            continue


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of lines such as "MemAvailable: 123 kB"."""
    parts = (line.split() for line in _lines(path))
    return {line[0]: int(line[1]) for line in parts if len(line) > 1 and line[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


def gpu_room() -> int | None:
    """Return the bytes that are free on all GPUs together; None without one, or in a build that has none."""
    rooms = []
    for device in _gpus():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _ggml.libggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        rooms.append(free.value)
    return sum(rooms) if rooms else None


def gpu_kinds() -> set[str]:
    """Return the backends that GPUs belong to, e.g. {"CUDA"}."""
    ggml = _ggml.libggml
    ggml.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_name.restype = ctypes.c_char_p
    backends = [ctypes.c_void_p(ggml.ggml_backend_dev_backend_reg(device)) for device in _gpus()]
    return {ggml.ggml_backend_reg_name(backend).decode() for backend in backends}


def _gpus() -> list[ctypes.c_void_p]:
    if not llama_cpp.llama_supports_gpu_offload():
        return []
    ggml = _ggml.libggml
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    devices = [
        ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(i)))
        for i in range(ggml.ggml_backend_dev_count())
    ]
    return [device for device in devices if ggml.ggml_backend_dev_type(device) == _GPU]
