"""A large answer is packed a piece at a time, and is never whole in the server's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.servers.server import running

pytestmark = pytest.mark.full


def peak_mib(pid: int) -> float:
    """The most memory that the process had since its counter was reset."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


def test_a_large_answer_is_not_held_in_memory() -> None:
    """38 MB of it took seven times as much.

    The server is the test's own: one that still tokenizes for others grows meanwhile, whatever it answers.
    """
    prompts = [[65 + (i + j) % 100 for j in range(1500)] for i in range(18)]
    with running("--n-ctx", "2048", "--parallel", "2") as server:
        server.post("/v1/completions", {"prompt": prompts[:1], "max_tokens": 1})
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
        before = server.own_resident_mib
        answer = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20})
        assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [1500] * 18
        assert peak_mib(server.process.pid) - before < 100
