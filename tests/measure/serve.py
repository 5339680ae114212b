"""Replay conversations against OpenAI-compatible servers: tokens per second, and time to the first token.

    python tests/measure/serve.py --clients 1 8 32 --turns 1 --n-prompt 1200 --shared 0.5 \\
        'mixedkv serve --kv mixed --n-ctx 16384 --parallel 8 --threads 1 --port {port}' \\
        'llama-server -m model.gguf -c 16384 -np 8 --kv-unified -t 1 --port {port}'

Servers run all the time and take turns, round by round; each round has new conversations, the same for all.
The first message is a journal, of which all conversations may share the beginning, the others ask about it.
Answers are greedy, and what would end them is ruled out. The first round warms up. Each server is compared
with the last one, within a round. Intervals (95%) are bootstraps over rounds. After Ctrl-C the rounds until
then are shown.
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
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import llama_cpp
import numpy as np

from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness import sample_text
from mixedkv_bench.harness.contexts import LoadedModel
from mixedkv_bench.harness.summary import bootstrap_interval

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

    def __init__(self, model: LoadedModel, n_prompt: int, shared: float, n_gen: int, turns: int) -> None:
        self._count = lambda text: len(model.tokenize(text))
        n_shared = int(shared * n_prompt)
        self._shared = sample_text.journal(0, n_shared, 1, self._count).text + " " if n_shared else ""
        self._n_prompt, self.n_gen, self._turns = n_prompt - n_shared, n_gen, turns
        ends = [i for i in range(model.n_vocab) if llama_cpp.llama_vocab_is_eog(model.vocab, i)]
        self._bias = {str(token): -100.0 for token in ends}

    def conversation(self, seed: int) -> list[str]:
        """A journal, then questions about it. Another seed, of 1 or more, shares the beginning where that
        is asked for, and else no more than a few words.
        """
        per_slot = 1 + self._turns // (2 * len(sample_text.DEPTHS))
        journal = sample_text.journal(seed, self._n_prompt, per_slot, self._count)
        questions = [each.fact.question for each in journal.questions]
        Random(seed).shuffle(questions)
        return [self._shared + journal.text, *questions[: self._turns - 1]]

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
class Round:
    """What one server did in a round, with a number of clients."""

    seconds: float
    cpu: float  # seconds
    tokens: int
    conversations: list[Turns]

    @property
    def answers(self) -> Turns:
        return [answer for turns in self.conversations for answer in turns]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_of_a_token(self) -> float:
        return self.cpu / self.tokens

    @property
    def first(self) -> float:
        """Median seconds to the first text."""
        return statistics.median(answer.first for answer in self.answers)


Rounds = Sequence[Round]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def server(command: str) -> Iterator[tuple[str, int]]:
    """Run a server; its address and its process's id, when it answers."""
    port, began = free_port(), time.monotonic()
    words = shlex.split(command.replace("{port}", str(port)))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _SECONDS
        while not _is_ready(f"http://127.0.0.1:{port}"):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command} did not start: run it by hand to see why")
            time.sleep(0.02)
        print(f"{command}\n  answers after {time.monotonic() - began:.1f} s", flush=True)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    """Return whether a server has loaded its model: llama-server lists it before, some have no /health."""
    return _status(f"{url}/health") in (200, 404) and _status(f"{url}/v1/models") == 200


def _status(url: str) -> int:
    try:
        with _OPEN(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def cpu_seconds(pid: int) -> float:
    """Return the seconds that a process and its children have computed: fields 14 and 15 of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds + sum(cpu_seconds(child) for child in _children(pid))


def memory(pid: int) -> int:
    """Return the bytes that a process and its children hold now, files they map included."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    own = sum(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))
    return own + sum(memory(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    lists = [each.read_text().split() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in lists for child in each]


def replay_all(
    talk: Talk, url: str, conversations: list[list[str]], clients: int, seconds: Callable[[], float]
) -> Round:
    """Replay conversations, `clients` at a time."""
    cpu, began = seconds(), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda messages: talk.replay(url, messages), conversations))
    n = sum(answer.usage.get("completion_tokens", talk.n_gen) for turns in found for answer in turns)
    return Round(time.perf_counter() - began, seconds() - cpu, n, found)


def first_percentile(percent: float) -> Callable[[Rounds], float]:
    """Return what computes a percentile of the seconds to the first text in some rounds."""
    return lambda rounds: float(
        np.percentile([each.first for one in rounds for each in one.answers], percent)
    )


def estimate(rounds: Sequence[Any], statistic: Callable[[Any], float], form: str = ".2f") -> str:
    """Return a statistic of rounds, with its interval where there are several."""
    text = format(statistic(rounds), form)
    if len(rounds) < 2:
        return text
    low, high = bootstrap_interval(rounds, statistic)
    return f"{text} ({low:{form}} to {high:{form}})"


def show(name: str, clients: int, rounds: Rounds) -> None:
    answers = [each for one in rounds for each in one.answers]
    prompts = sum(each.usage.get("prompt_tokens", 0) for each in answers) or 1
    cached = sum(each.cached for each in answers) / prompts
    rate = estimate(rounds, lambda some: statistics.median(each.rate for each in some), ".1f")
    cpu = 1e3 * statistics.median(each.cpu_of_a_token for each in rounds)
    turns = list(zip(*(turns for one in rounds for turns in one.conversations), strict=True))
    by_turn = ", ".join(f"{statistics.median(each.first for each in turn):.2f}" for turn in turns)
    print(name)
    print(f"  {clients} clients: {rate} tokens/s, CPU {cpu:.1f} ms a token, {cached:.0%} of prompts cached")
    median, last = (estimate(rounds, first_percentile(percent)) for percent in (50, 99))
    print(f"  first token after {median} s, 99% {last}; by turn {by_turn}", flush=True)


def compare(rounds: Rounds, base_rounds: Rounds) -> None:
    """Print the medians of ratios within a round to another server's."""

    def ratio(measure: Callable[[Round], float]) -> str:
        ratios = [measure(one) / measure(base) for one, base in zip(rounds, base_rounds, strict=False)]
        return estimate(ratios, lambda some: float(np.median(some)))

    rate, first = ratio(lambda one: one.rate), ratio(lambda one: one.first)
    cpu = ratio(lambda one: one.cpu_of_a_token)
    print(f"  by the last server's: tokens/s {rate}, first token {first}, CPU {cpu}", flush=True)


def share(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to less than 1")
    return float(text)


def measure(args: argparse.Namespace, talk: Talk) -> Iterator[tuple[str, int, Round]]:
    """Yield rounds as they come, with the server's command and the number of clients."""
    with ExitStack() as stack:
        running = {command: stack.enter_context(server(command)) for command in args.command}
        for no in range(args.repeats + 1):
            for i, clients in enumerate(args.clients):
                first = 1000 * (no * len(args.clients) + i) + 1
                conversations = [talk.conversation(first + k) for k in range(clients * args.each)]
                for command, (url, pid) in list(running.items())[:: -1 if no % 2 else 1]:
                    done = replay_all(talk, url, conversations, clients, lambda pid=pid: cpu_seconds(pid))
                    if no:
                        yield command, clients, done
        for command, (_, pid) in running.items():
            print(f"{command}\n  holds {memory(pid) / 2**20:.0f} MiB at the end", flush=True)


def report(found: Mapping[tuple[str, int], Rounds], last: str) -> None:
    for (command, clients), rounds in found.items():
        if rounds:
            show(command, clients, rounds)
            if command != last and found[last, clients]:
                compare(rounds, found[last, clients])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", help="whose tokens are counted (default: the bundled model)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    for name, default in (("each", 1), ("turns", 4), ("n-prompt", 512), ("n-gen", 64), ("repeats", 2)):
        about = " (conversations of a client in a round)" if name == "each" else ""
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default}{about}")
    parser.add_argument("--shared", type=share, default=0.0, help="share of the first message common to all")
    parser.add_argument("--json", type=Path, help="write each round as a line")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    model = LoadedModel(find_measured_model(args.model))
    talk = Talk(model, args.n_prompt, args.shared, args.n_gen, args.turns)
    found = {(command, clients): list[Round]() for command in args.command for clients in args.clients}
    try:
        with open(args.json or os.devnull, "w", encoding="utf-8") as file:
            for command, clients, done in measure(args, talk):
                found[command, clients].append(done)
                line = {"server": command, "clients": clients, "rate": done.rate, **asdict(done)}
                print(json.dumps(line), file=file, flush=True)
    except KeyboardInterrupt:
        print("interrupted: this is what was measured until then", file=sys.stderr)
    report(found, args.command[-1])


if __name__ == "__main__":
    main()
