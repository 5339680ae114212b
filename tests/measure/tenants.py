"""Measures how long a quiet tenant waits beside honest tenants, and beside hostile ones that flood the
server.

    python tests/measure/tenants.py --minutes 10

A server of the bundled model has a context of 4,096 tokens and 18 tenants. One is quiet: a short request
every second. The others are honest in one phase (one request at a time, with pauses) and in the next
nine of them are, while eight are hostile: prompts that fill the context, long answers, schemas that take
long to compile, clients that leave, and a flood of 32 connections. The phases take turns, so that other
load on the machine meets both. Prints how the requests ended and the quiet tenant's times; fails if a
request hangs, or if its 99th percentile beside hostile tenants is more than twice that beside honest
ones.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from support.servers.server import Server, key_file, running

N_HONEST, N_HOSTILE = 17, 8
CONNECTIONS, FLOOD = 4, 32  # of a hostile tenant, and of the one that floods
HANGS = 300.0  # seconds without an end
WORDS = [
    "lamp",
    "key",
    "harbour",
    "coin",
    "market",
    "walnut",
    "compass",
    "river",
    "in",
    "under",
    "the",
    "sold",
]


def key(name: str) -> str:
    return f"{name}-key-0123456789abcdef"


def words(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


def chat(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True, **more}


class Ended:
    """How requests ended, by phase and kind of tenant, and the quiet tenant's seconds."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.first: dict[str, list[float]] = defaultdict(list)
        self.whole: dict[str, list[float]] = defaultdict(list)
        self.lock = threading.Lock()

    def note(self, who: str, how: str, first: float = 0.0, whole: float = 0.0) -> None:
        with self.lock:
            self.counts[who][how] += 1
            if how == "200":
                self.first[who].append(first)
                self.whole[who].append(whole)


def ask(server: Server, ended: Ended, who: str, name: str, body: dict[str, Any], leave: float = 0.0) -> str:
    """Send a chat and read its answer, or `leave` after so many seconds without a byte. Return how it
    ended.
    """
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=leave or HANGS)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key(name)}"}
    first = 0.0
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        how, data = str(answer.status), b""
        while piece := answer.read1(65536):
            first = first or time.monotonic() - began
            data = data[-200:] + piece
        if how == "200" and b"[DONE]" not in data:
            how = "200, then an error"
    except TimeoutError:
        how = "left" if leave else "hangs"
    except (OSError, http.client.HTTPException) as error:
        how = type(error).__name__
    finally:
        connection.close()
    ended.note(who, how, first, time.monotonic() - began)
    return how


def quiet(server: Server, ended: Ended, phase: str, rng: random.Random) -> None:
    ask(server, ended, f"quiet beside {phase}", "quiet", chat(words(rng, 20), 8))
    time.sleep(1)


def honest(server: Server, ended: Ended, phase: str, rng: random.Random, name: str) -> None:
    body = chat(words(rng, rng.randint(50, 300)), rng.randint(8, 64))
    ask(server, ended, f"honest beside {phase}", name, body)
    time.sleep(rng.uniform(0.2, 2))


def bomb(rng: random.Random) -> dict[str, Any]:
    """Return a schema that takes long to compile, another one each time."""
    name = f"p{rng.randrange(10**9)}"
    if rng.random() < 0.5:
        return {"type": "object", "patternProperties": {f"^{name}{i}[a-z]*$": {} for i in range(900)}}
    text = {"type": "string", "pattern": "^[a-z]{1,50}$"}
    return {"type": "object", "properties": {f"{name}_{i}": text for i in range(500)}}


def hostile(server: Server, ended: Ended, phase: str, rng: random.Random, name: str) -> None:
    schema = {"type": "json_object", "schema": bomb(rng)}
    ways: list[tuple[dict[str, Any], float]] = [
        (chat(words(rng, 1500), 200, ignore_eos=True), 0),
        (chat(words(rng, 20), 600, ignore_eos=True), 0),
        (chat(words(rng, 1500), 50, ignore_eos=True), rng.uniform(0.05, 2)),
        (chat(words(rng, 300), 60, n=8, temperature=1.0), 0),
        (chat(words(rng, 5), 4, response_format=schema), 0),
        (chat(words(rng, 20_000), 4), 0),
        (chat(words(rng, 20), 20, grammar='root ::= ("a" | "a" root)* "b"'), 0),
    ]
    body, leave = rng.choice(ways)
    how = ask(server, ended, "hostile", name, body, leave)
    time.sleep(rng.uniform(0, 1) if how == "429" else 0.02)


def phase(server: Server, ended: Ended, name: str, seconds: float, seed: int) -> None:
    """Let tenants ask for so long; return when all their requests have ended."""
    end = time.monotonic() + seconds
    n_hostile = N_HOSTILE if name == "hostile" else 0

    def repeat(act: Callable[..., None], *tenant: str) -> None:
        rng = random.Random(f"{seed} {threading.get_ident()}")
        while time.monotonic() < end:
            act(server, ended, name, rng, *tenant)

    asked: list[tuple[Any, ...]] = [(quiet,)]
    asked += [(honest, f"t{i}") for i in range(n_hostile, N_HONEST)]
    for i in range(n_hostile):
        asked += [(hostile, f"t{i}")] * (CONNECTIONS if i else FLOOD)
    threads = [threading.Thread(target=repeat, args=each) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def percentile(values: list[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p * len(ordered)))] if ordered else float("nan")


def report(ended: Ended) -> float:
    """Print how requests ended. Return the ratio of the quiet tenant's 99th percentiles."""
    for who, counts in sorted(ended.counts.items()):
        print(f"{who}: {dict(counts.most_common())}")
    print("seconds of a whole request, and to its first byte: n, median, 99th percentile, most")
    for who in sorted(ended.whole):
        for what, values in (("whole", ended.whole[who]), ("first", ended.first[who])):
            shown = (percentile(values, 0.5), percentile(values, 0.99), max(values))
            print(f"  {who}, {what}: {len(values)}, " + ", ".join(f"{value:.2f}" for value in shown))
    beside = {name: percentile(ended.whole[f"quiet beside {name}"], 0.99) for name in ("honest", "hostile")}
    ratio = beside["hostile"] / beside["honest"]
    print(
        f"the quiet tenant's 99th percentile beside hostile ones is {ratio:.2f} times that beside honest ones"
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="beside hostile tenants; half as many beside honest"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often the phases take turns")
    parser.add_argument("--kv", default="mixed")
    given = parser.parse_args()
    ended, each = Ended(), given.minutes * 60 / given.rounds
    names = ["quiet", *(f"t{i}" for i in range(N_HONEST))]
    with tempfile.TemporaryDirectory() as folder:
        keys = key_file(Path(folder), *(f"{name}:{key(name)}" for name in names))
        with running("--n-ctx", "4096", "--kv", given.kv, "--api-key-file", str(keys)) as server:
            for turn in range(given.rounds):
                phase(server, ended, "honest", each / 2, turn)
                phase(server, ended, "hostile", each, turn)
                print(f"round {turn + 1} of {given.rounds}", flush=True)
            ratio = report(ended)
            alive = server.process.poll() is None and server.stop(signal.SIGTERM) == 0
            print("the server", "ended well" if alive else f"did not end well:\n{server.log[-3000:]}")
            print("tracebacks in its log:", server.log.count("Traceback"))
    hangs = sum(counts["hangs"] for counts in ended.counts.values())
    print("requests that hang:", hangs)
    return int(bool(hangs) or not alive or ratio > 2)


if __name__ == "__main__":
    sys.exit(main())
