"""Streams from a server and times what comes: `python honest_child.py PORT KEY CLIENTS SECONDS`.

A process of its own, so that what else a test does is not measured. Prints JSON: seconds between tokens, to
the first one, and how often each status came.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import Any

_TOKENS = 32


def run(port: int, key: str, n_clients: int, seconds: float) -> dict[str, Any]:
    gaps: list[float] = []
    firsts: list[float] = []
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def client(no: int) -> None:
        turn = 0
        while not turn or time.monotonic() < end:
            turn += 1
            status, times = ask(port, key, f"Client {no}, question {turn}: what lies in the market?")
            statuses[status] += 1
            seconds_between = [after - before for before, after in pairwise(times)]
            firsts.extend(seconds_between[:1])
            gaps.extend(seconds_between[1:])

    threads = [threading.Thread(target=client, args=(i,)) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"gaps": gaps, "firsts": firsts, "statuses": statuses}


def ask(port: int, key: str, prompt: str) -> tuple[int, list[float]]:
    """The status, and when the request was sent and each token came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    times = [time.monotonic()]
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
    connection.close()
    return answer.status, times


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
