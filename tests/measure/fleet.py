"""Replay conversations against replicas on Ray Serve: what routing by prefixes and a shared store save.

    python tests/measure/fleet.py --replicas 2 --clients 4 --turns 6 --n-gen 16 [--remote redis://127.0.0.1/0]

Needs `pip install 'mixedkv[ray]'`. The conversations are those of `serve.py`, new ones in each round.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from typing import Any

import ray
from ray import serve as ray_serve
from serve import Rates, Talk, free_port, replay_all, show

from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_ray.application import build

_TOKENS = 3000  # of a conversation, at most
_ROUTINGS = ("random", "ray", "prefix")


def warm(url: str, n: int) -> None:
    """Let every replica answer: requests of their own are spread over all."""
    for i in range(4 * n):
        body = {"messages": [{"role": "user", "content": f"{i} {time.monotonic()}"}], "max_tokens": 1}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://{url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv", default="mixed")
    parser.add_argument("--remote", help="a server that the replicas share, beside runs without one")
    for name, default in (("replicas", 2), ("clients", 4), ("turns", 6), ("repeats", 2), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--n-prompt", type=int, default=1024)
    parser.add_argument("--n-gen", type=int, default=16)
    args = parser.parse_args()
    path, port = find_measured_model(args.model), free_port()
    talk = Talk(LoadedModel(path), args.n_prompt, args.n_gen, args.turns)
    own = {"worker_niceness": 0}  # 15 otherwise: replicas are slow where others are at work
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, _system_config=own)
    ray_serve.start(http_options={"host": "127.0.0.1", "port": port})
    options: dict[str, Any] = {"model": path, "kv": args.kv, "n_ctx": _TOKENS * args.clients, "cpus": 0.01}
    options["metadata_url"] = "sqlite:"  # nobody asks for sessions here
    options |= {"threads": args.threads, "parallel": args.clients, "replicas": args.replicas}
    for remote in (None, args.remote) if args.remote else (None,):
        for routing in _ROUTINGS:
            shared = {"store_remote": remote} if remote else {}
            ray_serve.run(build({**options, "idle_prefixes": args.clients, "routing": routing, **shared}))
            warm(f"127.0.0.1:{port}", args.replicas)
            rates = Rates()
            for _ in range(args.repeats):
                seed = time.time_ns() % 10**9  # that no store has seen
                conversations = [talk.conversation(seed + i) for i in range(args.clients)]
                done = replay_all(talk, f"127.0.0.1:{port}", conversations, args.clients, time.process_time)
                rates.tokens += done.tokens
                rates.cpu += done.cpu
                rates.conversations += done.conversations
            show(
                f"{args.replicas} replicas, {routing}, {'shared' if remote else 'no'} store",
                args.clients,
                rates,
            )
            ray_serve.delete("default")
    ray_serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
