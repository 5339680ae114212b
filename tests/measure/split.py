"""Time a token whose layers are evaluated on another machine, at several distances, beside `Llama` alone.

    python tests/measure/split.py --kv mixed --kv f16 --n-prompt 128 --n-gen 32

In each round the same prompt is answered by `Llama` and by a client at each distance, which a proxy makes; a
prompt that repeats itself is answered without drafts and with them. Last, several clients beside an engine
with the whole model. Milliseconds are medians over all tokens; the first round warms up.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from mixedkv.engine import Engine
from mixedkv.limits import padded
from mixedkv.llama import Llama
from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.sample_text import document
from mixedkv_split.client import SplitClient
from mixedkv_split.export import export
from mixedkv_split.head import Head

_DELAYS = (0.0, 5.0, 20.0, 100.0)  # milliseconds there and back
_CLIENTS = (1, 4, 8)
_PROXY = Path(__file__).with_name("delay_proxy.py")


@contextmanager
def process(arguments: list[str], port_line: str) -> Iterator[int]:
    """Run a Python process; the port that it says it listens on."""
    command = [sys.executable, *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    try:
        found = next(filter(None, (re.search(port_line, line.rstrip()) for line in running.stdout)), None)
        if found is None:
            raise SystemExit(f"{' '.join(arguments[:4])} did not start")
        yield int(found[1])
    finally:
        running.kill()
        running.wait()


def timed(tokens: Iterable[int]) -> tuple[list[int], list[float]]:
    """Tokens of an answer, and the seconds that each took."""
    said, seconds, began = [], [], time.perf_counter()
    for token in tokens:
        now = time.perf_counter()
        said.append(token)
        seconds.append(now - began)
        began = now
    return said, seconds


def alone(llm: Llama, prompt: list[int], n: int) -> Iterator[int]:
    llm.reset()
    llm.kv.clear()
    for token, _ in zip(llm.generate(prompt, temp=0.0), range(n)):  # noqa: B905  the first does not end
        if token == llm.token_eos():
            return
        yield token


def distant(client: SplitClient, prompt: list[int], n: int, **options: Any) -> Iterator[int]:
    with client.session() as session:
        yield from session.generate_tokens(prompt, max_tokens=n, temperature=0, **options)


def measure(kv: str, args: argparse.Namespace, llm: Llama, clients: dict[float, SplitClient]) -> None:
    n_vocab, again = llm.n_vocab(), repeating(llm, args.n_prompt)
    first: dict[object, list[float]] = {}
    later: dict[object, list[float]] = {}
    same = dict.fromkeys(clients, True)
    for no in range(args.repeats + 1):
        prompt = random_prompt(n_vocab, args.n_prompt, no)
        runs: dict[object, tuple[list[int], list[float]]] = {"alone": timed(alone(llm, prompt, args.n_gen))}
        for delay, client in clients.items():
            runs[delay] = timed(distant(client, prompt, args.n_gen))
            same[delay] &= runs[delay][0] == runs["alone"][0]
            for draft in (0, 8):
                said, seconds = timed(distant(client, again, args.n_gen, draft=draft))
                mean = sum(seconds[1:]) / max(1, len(seconds) - 1)  # what was drafted comes at once
                runs[delay, draft] = said, [seconds[0], mean]
            runs[delay, "call"] = [], [0.0, *(call(client) for _ in range(5))]
        if no:
            for key, (_, seconds) in runs.items():
                first.setdefault(key, []).append(seconds[0])
                later.setdefault(key, []).extend(seconds[1:])
    ms = {key: 1e3 * median(seconds) for key, seconds in later.items() if seconds}
    for delay in clients:
        beyond = ms[delay] - ms["alone"] - ms[delay, "call"]
        print(
            f"{kv}, {delay:g} ms: call {ms[delay, 'call']:.2f}, token {ms[delay]:.2f} "
            f"(alone {ms['alone']:.2f}, beyond both {beyond:.2f}), first "
            f"{1e3 * median(first[delay]):.1f} (alone {1e3 * median(first['alone']):.1f}), "
            f"repeats {ms[delay, 0]:.2f}, drafted {ms[delay, 8]:.2f}, same tokens: {same[delay]}",
            flush=True,
        )


def call(client: SplitClient) -> float:
    began = time.perf_counter()
    client.describe()
    return time.perf_counter() - began


def repeating(llm: Llama, n: int) -> list[int]:
    """Text that says a passage again and again."""

    def tokenize(text: str) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=False)

    once = tokenize(document(1, n // 4, lambda text: len(tokenize(text)), chat=False))
    return (once * (n // len(once) + 1))[-n:]


def random_prompt(n_vocab: int, n: int, seed: int) -> list[int]:
    return Random(seed).choices(range(n_vocab // 8, n_vocab), k=n)


def crowd(kv: str, args: argparse.Namespace, client: SplitClient, engine: Engine) -> None:
    """Show the tokens a second of several clients, and of an engine that answers as many prompts."""
    bias = tuple((token, -100.0) for token in engine.detokenizer.ends)

    def split(prompts: list[list[int]]) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda each: list(distant(client, each, args.n_gen, logit_bias=bias)), prompts))

    def local(prompts: list[list[int]]) -> None:
        options: dict[str, Any] = {"max_tokens": args.n_gen, "temperature": 0, "logit_bias": bias}
        for answer in [engine.submit(prompt, **options) for prompt in prompts]:
            answer.result()

    for n in _CLIENTS:
        rates: dict[Callable[..., None], list[float]] = {split: [], local: []}
        for no in range(args.repeats + 1):
            prompts = [random_prompt(engine.llm.n_vocab(), args.n_prompt, 1000 * no + i) for i in range(n)]
            for contender, found in rates.items():
                began = time.perf_counter()
                contender(prompts)
                found.append(n * args.n_gen / (time.perf_counter() - began))
        a, b = (median(found[1:]) for found in rates.values())
        print(f"{kv}, {n} clients: {a:.0f} tokens/s, an engine {b:.0f}, ratio {a / b:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model")
    parser.add_argument("--kv", action="append", required=True)
    for name, default in (("n-prompt", 128), ("n-gen", 32), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    path, n_ctx = find_measured_model(args.model), padded(max(_CLIENTS) * (args.n_prompt + args.n_gen + 64))
    options: dict[str, Any] = {"n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    with tempfile.TemporaryDirectory() as folder:
        parts = export(path, Path(folder, "head.gguf"), Path(folder, "body.gguf"))
        for kv in args.kv:
            with ExitStack() as stack:
                open_ = stack.enter_context
                command = ["-m", "mixedkv", "split", "serve", str(parts.body), "--port", "0", "--kv", kv]
                command += ["--n-ctx", str(n_ctx), "--threads", str(args.threads)]
                port = open_(process(command, r" on 127\.0\.0\.1:(\d+)$"))
                head = open_(Head(parts.head, n_threads=args.threads))
                clients = {}
                for delay in _DELAYS:
                    far = open_(process([str(_PROXY), str(port), str(delay)], r"^(\d+)$")) if delay else port
                    clients[delay] = open_(SplitClient(head, f"127.0.0.1:{far}"))
                measure(kv, args, open_(Llama(path, kv=kv, n_ctx=n_ctx, **options)), clients)
                whole = open_(Llama(path, kv=kv, n_ctx=n_ctx, n_seq_max=16, kv_unified=True, **options))
                crowd(kv, args, clients[0.0], open_(Engine(whole, parallel=max(_CLIENTS))))


if __name__ == "__main__":
    main()
