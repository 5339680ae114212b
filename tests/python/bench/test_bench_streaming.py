"""A small run of `mixedkv bench streaming`, and the control group it makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mixedkv_bench.harness import memory_group as groups
from mixedkv_bench.harness.memory_group import MemoryGroup, memory_group
from mixedkv_bench.streaming import StreamingRow
from support.bench_support import run
from support.tools.random_model import RandomModel

pytestmark = pytest.mark.nightly


def test_streaming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All modes give the same logits; that the limit holds them is the system's to see to."""
    path = tmp_path / "m.gguf"
    RandomModel(n_layer=6, n_embd=256, n_head=4, n_head_kv=1, head_size=64, n_ff=512, kind="q4_0").write(path)
    small = ["-m", str(path), "--n-prompt", "16", "--n-gen", "2", "--clients", "1", "--memory", "1GiB"]
    rows = run(tmp_path / "s.json", "streaming", *small, "--stream-layers", "3")["rows"]
    assert [row["mode"] for row in rows] == ["resident", "direct", "prefetch", "mmap"]
    for row in rows:
        assert "error" not in row
        assert len(row["pass_samples"]) == 2
        assert row["lookup_tps"] > 0
        assert 1 < row["lookup_tokens"] <= 16
        assert row["n_streamed"] == (3 if row["mode"] in ("direct", "prefetch") else 0)
    for row in rows[1:]:
        assert row["same_logits"] is True
        assert row["memory_bytes"] == 1 << 30
        if row["limited_by"] != "none":
            assert 0 < row["peak_bytes"] <= 1 << 30
            assert row["killed"] == 0
    assert "Layers streamed, cache mixed" in capsys.readouterr().out


def test_a_picture_of_tokens_against_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from mixedkv_bench.output import plots, plots_streaming

    known: dict[str, Any] = {"kv": "f16", "flash_attn": False, "threads": 2, "limited_by": "cgroup v2"}
    rows = [
        StreamingRow.model_validate(
            {
                **known,
                "mode": mode,
                "memory_bytes": None if mode == "resident" else n << 30,
                "pass_seconds": 2 / n,
            }
        )
        for mode in ("resident", "direct", "mmap")
        for n in (1, 2)
    ]
    ((name, figure),) = plots_streaming.figures(rows, "a model", plots._figure)
    assert name == "streaming"
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert lines["direct"] == [[1.0, 0.5], [2.0, 1.0]]
    figure.savefig(tmp_path / "streaming.png")
    assert not list(plots_streaming.figures(rows[:1], "a model", plots._figure))


def test_a_group_holds_a_process_to_its_limit() -> None:
    with memory_group(64 << 20) as group:
        if group.folder is None:
            pytest.skip("no control group can be made here")
        code = "x = bytearray(200 << 20); print(len(x))"
        done = subprocess.run([sys.executable, "-c", code], check=False, preexec_fn=group.join)
        assert done.returncode < 0  # the system ended it
        used = group.used()
        assert used["killed"] == 1
        assert used["peak"] <= 64 << 20
    assert not group.folder.exists()


def test_what_a_group_of_version_2_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, planted: a machine whose groups are of version 1 has no others."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(groups, "_ROOT", tmp_path)
    monkeypatch.setattr(groups, "_own", lambda controller: "/own")
    assert groups._make_v2(1 << 30) is None  # memory is not handed down
    (own / "cgroup.subtree_control").write_text("cpu memory pids\n")
    group = groups._make_v2(1 << 30)
    assert group is not None
    assert group.kind == "cgroup v2"
    assert group.folder is not None
    assert (group.folder / "memory.max").read_text() == str(1 << 30)
    (group.folder / "memory.events").write_text(
        "low 0\nhigh 0\nmax 41\noom 2\noom_kill 1\noom_group_kill 0\n"
    )
    (group.folder / "memory.peak").write_text("1073741824\n")
    assert group.used() == {"peak": 1 << 30, "pushed": 41, "killed": 1}
    (group.folder / "memory.peak").unlink()  # before Linux 5.19
    assert group.used()["peak"] == 0


def test_what_a_group_of_version_1_says(tmp_path: Path) -> None:
    (tmp_path / "memory.max_usage_in_bytes").write_text("123\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert MemoryGroup("cgroup v1", tmp_path).used() == {"peak": 123, "killed": 3}
    assert MemoryGroup("none", None).used() == {}


def test_limits_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the command's status is not 0
        run(tmp_path / "s.json", "streaming")
