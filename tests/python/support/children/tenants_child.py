"""Honest tenants, each with one request at a time: `python -m support.children.tenants_child PORT KEY...`.

They ask until the end of the input, in a process of its own, so that what they wait for is the server. Prints
JSON: of each request when it began, on the machine's clock, the seconds to its first token and of all of it,
and its status: 0 where it hangs.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time

from support.children.flood_child import words

HANGS = 120.0  # seconds without a byte


def run(port: int, keys: list[str]) -> list[tuple[float, float, float, int]]:
    seen: list[tuple[float, float, float, int]] = []
    over = threading.Event()

    def tenant(key: str) -> None:
        rng = random.Random(key)
        time.sleep(rng.random())
        while not over.is_set():
            seen.append(ask(port, key, words(rng, rng.randint(20, 200)), rng.randint(8, 48)))
            over.wait(rng.uniform(0.2, 2))

    threads = [threading.Thread(target=tenant, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    return seen


def ask(port: int, key: str, text: str, n: int) -> tuple[float, float, float, int]:
    began, first, status = time.monotonic(), 0.0, 0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        data = b""
        while part := answer.read1(65536):
            first = first or time.monotonic() - began
            data = data[-200:] + part
        status = answer.status if answer.status != 200 or b"[DONE]" in data else -1
    except (OSError, http.client.HTTPException):
        status = 0
    finally:
        connection.close()
    return began, first, time.monotonic() - began, status


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2:])), flush=True)
