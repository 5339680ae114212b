"""How long a request waits for stored rows of another process to be compared with the model.

PYTHONPATH=tests/python python tests/measure/recheck_wait.py MODEL
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from mixedkv_bench.harness.real_text import read_real_text
from support.servers.server import Server


def _cpu_ms(server: Server) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ask(server: Server, prompt: str) -> tuple[float, float]:
    """Return milliseconds to the first token, and of CPU time."""
    cpu, began = _cpu_ms(server), time.perf_counter()
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    took = 1000 * (time.perf_counter() - began)
    assert answer["usage"]["prompt_tokens_details"]["cached_tier"] == "disk", answer["usage"]
    return took, _cpu_ms(server) - cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kv", default="mixed")
    parser.add_argument("--n", type=int, default=20, help="prompts")
    parser.add_argument("--chars", type=int, default=2000, help="characters of each")
    args = parser.parse_args()
    text = read_real_text("prose").text
    prompts = [text[9000 * i : 9000 * i + args.chars] for i in range(1, args.n + 1)]
    with tempfile.TemporaryDirectory() as folder:
        options = ("--model", args.model, "--kv", args.kv, "--n-ctx", "4096", "--store", f"{folder}/store")
        first = Server(*options).wait_until_ready()
        for prompt in prompts:
            first.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        first.wait_until_idle()
        first.stop()
        servers = [Server(*options).wait_until_ready(), Server(*options, "--no-recheck").wait_until_ready()]
        for server in servers:
            server.post("/v1/completions", {"prompt": "Warm", "max_tokens": 1, "use_kv_cache": False})
        pairs = []
        for i, prompt in enumerate(prompts):  # they take turns, and in who is first
            took = {server: _ask(server, prompt) for server in servers[:: 1 - 2 * (i % 2)]}
            pairs.append([took[server] for server in servers])
        for i, what in enumerate(("to the first token", "of CPU time")):
            checked, believed = zip(*([one[i] for one in pair] for pair in pairs), strict=True)
            added = statistics.median(a - b for a, b in zip(checked, believed, strict=True))
            print(
                f"ms {what}: compared {statistics.median(checked):.0f}, believed "
                f"{statistics.median(believed):.0f}, median of the differences {added:.0f}"
            )
        print("entries compared:", *(server.stats()["store"]["n_rechecked"] for server in servers))
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
