"""How much memory a process may still take, by what the kernel tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv.native.memory import memory_room, memory_rooms

pytestmark = pytest.mark.full


def _proc(folder: Path, cgroup: str) -> Path:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    return folder / "proc"


def test_room_in_a_group_of_version_2(tmp_path: Path) -> None:
    proc, groups = _proc(tmp_path, "0::/a/b\n"), tmp_path / "groups"
    (groups / "a" / "b").mkdir(parents=True)
    assert memory_room(proc, groups) == 900 * 1024
    (groups / "a" / "memory.max").write_text("500000\n")
    (groups / "a" / "memory.current").write_text("300000\n")
    (groups / "a" / "memory.stat").write_text("anon 100\nactive_file 20000\ninactive_file 30000\n")
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    assert memory_room(proc, groups) == 250_000
    (groups / "a" / "b" / "memory.high").write_text("90000\n")
    (groups / "a" / "b" / "memory.current").write_text("20000\n")
    assert memory_room(proc, groups) == 70_000
    assert sorted((room.left, room.limit) for room in memory_rooms(proc, groups)) == [
        (70_000, 90_000), (250_000, 500_000), (900 * 1024, 1000 * 1024)
    ]  # fmt: skip


def test_room_in_a_group_of_version_1(tmp_path: Path) -> None:
    proc, groups = _proc(tmp_path, "9:name=systemd:/\n4:memory:/g\n0::/\n"), tmp_path / "groups"
    (groups / "memory" / "g").mkdir(parents=True)
    (groups / "memory" / "g" / "memory.limit_in_bytes").write_text("400000\n")
    (groups / "memory" / "g" / "memory.usage_in_bytes").write_text("390000\n")
    (groups / "memory" / "g" / "memory.stat").write_text("total_active_file 1\ntotal_inactive_file 2\n")
    assert memory_room(proc, groups) == 10_003
