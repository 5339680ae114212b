"""Replay conversations against OpenAI-compatible servers: tokens per second, and time to the first token.

    python tests/measure/serve.py --clients 8 \\
        'mixedkv serve --kv mixed --n-ctx 16384 --parallel 8 --threads 1 --port {port}' \\
        'llama-server -m model.gguf -c 16384 -np 8 --kv-unified -t 1 --port {port}'

Servers run all the time and take turns, round by round; each round has new conversations, the same for all.
The first message is a journal, the others ask about it. Answers are greedy, and what would end them is ruled
out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import llama_cpp
import numpy as np

from mixedkv.model.named_model import find_model
from mixedkv_bench.harness import sample_text
from mixedkv_bench.harness.contexts import LoadedModel

_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
_SECONDS = 300.0


@dataclass
class Answer:
    """Seconds to the first text, the text, and the usage that the server tells."""

    first: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


Turns = list[Answer]


class Talk:
    """Makes conversations, and replays them."""

    def __init__(self, model: LoadedModel, n_prompt: int, n_gen: int, turns: int) -> None:
        self._n_prompt, self.n_gen, self._turns = n_prompt, n_gen, turns
        self._count = lambda text: len(model.tokenize(text))
        ends = [i for i in range(model.n_vocab) if llama_cpp.llama_vocab_is_eog(model.vocab, i)]
        self._bias = {str(token): -100.0 for token in ends}

    def conversation(self, seed: int) -> list[str]:
        """A journal, then questions about it; another seed shares no more than a few words."""
        per_slot = 1 + self._turns // (2 * len(sample_text.DEPTHS))
        journal = sample_text.journal(seed, self._n_prompt, per_slot, self._count)
        questions = [each.fact.question for each in journal.questions]
        Random(seed).shuffle(questions)
        return [journal.text, *questions[: self._turns - 1]]

    def replay(self, url: str, messages: list[str]) -> Turns:
        """Answers of one conversation, each turn over a connection of its own: some servers end them."""
        history: list[dict[str, str]] = []
        answers = []
        for text in messages:
            history.append({"role": "user", "content": text})
            with closing(http.client.HTTPConnection(url, timeout=_SECONDS)) as connection:
                answers.append(self._ask(connection, history))
            history.append({"role": "assistant", "content": answers[-1].text})
        return answers

    def _ask(self, connection: http.client.HTTPConnection, messages: list[dict[str, str]]) -> Answer:
        body = {"model": "model", "messages": messages, "max_tokens": self.n_gen, "temperature": 0}
        body |= {"logit_bias": self._bias, "stream": True, "stream_options": {"include_usage": True}}
        began, answer = time.perf_counter(), Answer()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the server answered {response.status}: {response.read(500)!r}")
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                answer.usage = event.get("usage") or answer.usage
                for choice in event.get("choices") or ():
                    piece = (choice.get("delta") or {}).get("content") or ""
                    if piece and not answer.text:
                        answer.first = time.perf_counter() - began
                    answer.text += piece
        return answer


@dataclass
class Rates:
    """What was measured of one server and number of clients: by round, and all conversations."""

    tokens: list[float] = field(default_factory=list)  # a second
    cpu: list[float] = field(default_factory=list)  # seconds a token
    conversations: list[Turns] = field(default_factory=list)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def server(command: str) -> Iterator[tuple[str, int]]:
    """Run a server; its address and its process's id, when it answers."""
    port = free_port()
    process = subprocess.Popen(shlex.split(command.replace("{port}", str(port))), stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _SECONDS
        while not _answers(f"http://127.0.0.1:{port}/v1/models"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command} did not start: run it by hand to see why")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with _OPEN(url, timeout=5):
            return True
    except OSError:
        return False


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed: fields 14 and 15 of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def replay_all(
    talk: Talk, url: str, conversations: list[list[str]], clients: int, seconds: Callable[[], float]
) -> Rates:
    """Replay conversations, `clients` at a time."""
    cpu, began = seconds(), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda messages: talk.replay(url, messages), conversations))
    n = sum(answer.usage.get("completion_tokens", talk.n_gen) for turns in found for answer in turns)
    return Rates([n / (time.perf_counter() - began)], [(seconds() - cpu) / n], found)


def show(name: str, clients: int, rates: Rates) -> None:
    turns = list(zip(*rates.conversations, strict=True))
    first = " ".join(f"{1e3 * statistics.median(each.first for each in turn):.0f}" for turn in turns)
    last = 1e3 * float(np.percentile([each.first for each in turns[-1]], 95))
    answers = [each for turn in turns for each in turn]
    prompts = sum(each.usage.get("prompt_tokens", 0) for each in answers) or 1
    rate, cpu = statistics.median(rates.tokens), 1e3 * statistics.median(rates.cpu)
    cached = sum(each.cached for each in answers) / prompts
    print(name)
    print(
        f"  {clients} clients: {rate:.1f} tokens/s, CPU {cpu:.1f} ms a token, {cached:.0%} of prompts cached"
    )
    print(f"  first token by turn {first} ms, 95% of the last {last:.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", help="whose tokens are counted (default: the bundled model)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    for name, default in (("turns", 4), ("n-prompt", 512), ("n-gen", 64), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    talk = Talk(LoadedModel(find_model(args.model)), args.n_prompt, args.n_gen, args.turns)
    found = {(command, clients): Rates() for command in args.command for clients in args.clients}
    with ExitStack() as stack:
        running = {command: stack.enter_context(server(command)) for command in args.command}
        for no in range(args.repeats + 1):  # the first round warms up
            for i, clients in enumerate(args.clients):
                first = 1000 * (no * len(args.clients) + i)
                conversations = [talk.conversation(first + k) for k in range(max(args.clients))]
                for command, (url, pid) in list(running.items())[:: -1 if no % 2 else 1]:
                    rates = replay_all(talk, url, conversations, clients, lambda pid=pid: cpu_seconds(pid))
                    if no:
                        of = found[command, clients]
                        of.tokens += rates.tokens
                        of.cpu += rates.cpu
                        of.conversations += rates.conversations
    for (command, clients), rates in found.items():
        show(command, clients, rates)


if __name__ == "__main__":
    main()
