"""Measures what it costs to have the layers on another machine: bytes and milliseconds a token, beside
`Llama`.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mixedkv.llama import Llama
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.sample_text import passage
from mixedkv_bench.harness.table import Cells, Table, number
from mixedkv_bench.options import Options
from mixedkv_bench.split_clients import TABLE as CLIENTS_TABLE
from mixedkv_bench.split_clients import SplitClientsRow, measure_clients, n_ctx_of, random_prompt

if TYPE_CHECKING:
    from mixedkv.engine.chat.tokenizer import Tokenizer
    from mixedkv.split.client import SplitClient
    from mixedkv.split.export import Exported

_DELAYS = (0.0, 5.0, 20.0, 100.0)  # milliseconds there and back
_N_CALLS = 5  # that do nothing, after each answer
_N_DRAFT = 8


class SplitRow(Row):
    """One row per cache and distance of the server; vectors are F16.

    In each round the same prompt is answered by `Llama` alone and by a client at each distance in turn,
    greedily. Milliseconds are medians over all tokens, or over the rounds.
    """

    test: Literal["split"] = "split"
    delay_ms: float = Field(description="added to a round trip by a proxy; 0 is without one")
    round_trip_ms: float = Field(description="a call of the server that does nothing, delay included")
    n_prompt: int = Field(description="tokens of the prompt")
    prompt_ms: float = Field(description="until the first token, sent in messages of 256 tokens")
    local_prompt_ms: float = Field(description="the same of `Llama` alone")
    token_ms: float = Field(description="between tokens of the answer")
    local_token_ms: float = Field(description="the same of `Llama` alone")
    overhead_ms: float = Field(description="token_ms beyond local_token_ms and round_trip_ms")
    repeating_ms: float = Field(description="a token of text that repeats, mean of an answer")
    drafted_ms: float = Field(description="the same with up to 8 tokens drafted by prompt lookup")
    sent_bytes: float = Field(description="of vectors, for each token of prompt and answer")
    received_bytes: float = Field(description="of hidden states, for each token of the answer")
    same_tokens: bool = Field(description="whether all answers are those of `Llama` alone")


def check(options: Options) -> None:
    try:
        import grpc  # noqa: F401
        import grpc_health  # noqa: F401
    except ImportError as error:
        raise ValueError(f"split needs {error.name}: run pip install 'mixedkv[split]'") from None


def prepare(bench: Bench) -> Measure:
    return lambda: measure(bench)


def measure(bench: Bench) -> None:
    """Add one row per cache and delay."""
    from mixedkv.split.export import export

    options = bench.options
    bench.progress.add(len(options.settings))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        parts = export(options.file.path, Path(folder, "head.gguf"), Path(folder, "body.gguf"))
        for setting in options.settings:
            bench.progress.show(f"split: {setting.name}")
            for row in _measure(options, setting.spec, setting.flash_attn, parts):
                bench.add(row)
            bench.progress.step()


def _measure(
    options: Options, kv: str, flash_attn: bool, parts: Exported
) -> Iterator[SplitRow | SplitClientsRow]:
    from mixedkv.split.client import SplitClient
    from mixedkv.split.head import Head

    n_ctx = 256 * -(-(options.n_prompt + options.n_gen + 1) // 256) + 256
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(
            _server(parts.body, kv, max(2 * n_ctx, n_ctx_of(options)), options.threads)
        )
        head = stack.enter_context(Head(parts.head, n_threads=options.threads))
        local = _Local(
            stack.enter_context(
                Llama(
                    options.file.path,
                    kv=kv,
                    n_ctx=n_ctx,
                    n_threads=options.threads,
                    n_threads_batch=options.threads,
                    verbose=False,
                )
            )
        )
        distant = []
        for delay in _DELAYS:
            far = stack.enter_context(_proxy(port, delay)) if delay else port
            client = stack.enter_context(SplitClient(head, f"127.0.0.1:{far}"))
            distant.append(_Distant(client, delay))
        prompts = [
            random_prompt(head.tokenizer.n_vocab, options.n_prompt, i) for i in range(options.repeats + 1)
        ]
        for i, prompt in enumerate(prompts):
            for contender in (local, *distant):
                contender.answer(prompt, options.n_gen, count=i > 0)  # the first round warms up
            for contender in distant:
                contender.repeat(_repeating(head.tokenizer, options.n_prompt), options.n_gen, count=i > 0)
        for contender in distant:
            yield contender.row(local, kv, flash_attn, options)
        yield from measure_clients(options, kv, flash_attn, distant[0].client)


class _Contender:
    """Answers of one kind and what they took, in seconds."""

    def __init__(self) -> None:
        self.prompts: list[float] = []
        self.tokens: list[float] = []
        self.answers: list[list[int]] = []

    def generate(self, prompt: list[int], n: int) -> Iterator[int]:
        raise NotImplementedError

    def answer(self, prompt: list[int], n: int, count: bool) -> None:
        began, times, answer = time.perf_counter(), [], []
        for token in self.generate(prompt, n):
            now = time.perf_counter()
            times.append(now - began)
            began = now
            answer.append(token)
        if count:
            self.prompts.append(times[0])
            self.tokens += times[1:]
            self.answers.append(answer)


class _Local(_Contender):
    def __init__(self, llm: Llama) -> None:
        super().__init__()
        self._llm = llm

    def generate(self, prompt: list[int], n: int) -> Iterator[int]:
        self._llm.reset()
        self._llm.kv.clear()
        for i, token in enumerate(self._llm.generate(prompt, temp=0.0)):
            if i == n or token == self._llm.token_eos():
                return
            yield token


class _Distant(_Contender):
    def __init__(self, client: SplitClient, delay: float) -> None:
        super().__init__()
        self.client, self._delay = client, delay
        self._sent = self._received = 0.0  # bytes a token, of the latest answer
        self._calls: list[float] = []
        self._repeating: dict[int, list[float]] = {0: [], _N_DRAFT: []}  # seconds a token by `draft`

    def answer(self, prompt: list[int], n: int, count: bool) -> None:
        super().answer(prompt, n, count)
        self._calls += [self._call() for _ in range(_N_CALLS if count else 0)]

    def generate(self, prompt: list[int], n: int) -> Iterator[int]:
        with self.client.session() as session:
            yield from session.generate_tokens(prompt, max_tokens=n, temperature=0)
            self._sent = session.n_sent_bytes / len(session.tokens)
            self._received = session.n_received_bytes / (len(session.tokens) - len(prompt) + 1)

    def repeat(self, prompt: list[int], n: int, count: bool) -> None:
        """Answer a prompt that repeats, without drafts and with them."""
        for draft, taken in self._repeating.items():
            with self.client.session() as session:
                answer = session.generate_tokens(prompt, max_tokens=n, temperature=0, draft=draft)
                next(answer)
                began = time.perf_counter()
                n_more = sum(1 for _ in answer)
                if count and n_more:
                    taken.append((time.perf_counter() - began) / n_more)

    def row(self, local: _Local, kv: str, flash_attn: bool, options: Options) -> SplitRow:
        round_trip = statistics.median(self._calls)
        token, local_token = statistics.median(self.tokens), statistics.median(local.tokens)
        return SplitRow(
            kv=kv,
            flash_attn=flash_attn,
            threads=options.threads,
            delay_ms=self._delay,
            round_trip_ms=1e3 * round_trip,
            n_prompt=options.n_prompt,
            prompt_ms=1e3 * statistics.median(self.prompts),
            local_prompt_ms=1e3 * statistics.median(local.prompts),
            token_ms=1e3 * token,
            local_token_ms=1e3 * local_token,
            overhead_ms=1e3 * (token - local_token - round_trip),
            repeating_ms=1e3 * statistics.median(self._repeating[0]),
            drafted_ms=1e3 * statistics.median(self._repeating[_N_DRAFT]),
            sent_bytes=self._sent,
            received_bytes=self._received,
            same_tokens=self.answers == local.answers,
        )

    def _call(self) -> float:
        began = time.perf_counter()
        self.client.describe()
        return time.perf_counter() - began


def _repeating(tokenizer: Tokenizer, n: int) -> list[int]:
    once = passage(n // 4, lambda text: tokenizer.tokenize(text, start=False))
    return (once * (n // len(once) + 1))[-n:]


@contextlib.contextmanager
def _server(body: Path, kv: str, n_ctx: int, threads: int) -> Iterator[int]:
    command = ["-m", "mixedkv", "split", "serve", str(body), "--port", "0", "--kv", kv]
    command += ["--n-ctx", str(n_ctx), "--threads", str(threads)]
    with _process(command, r" on 127\.0\.0\.1:(\d+)$") as port:
        yield port


@contextlib.contextmanager
def _proxy(port: int, delay: float) -> Iterator[int]:
    command = ["-m", "mixedkv_bench.harness.delay_proxy", str(port), str(delay)]
    with _process(command, r"^(\d+)$") as own:
        yield own


@contextlib.contextmanager
def _process(arguments: list[str], port_line: str) -> Iterator[int]:
    """Start a Python process; gives the port that it says it listens on."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            if found := re.search(port_line, line.rstrip()):
                yield int(found[1])
                return
            said.append(line)
        raise ValueError(f"{' '.join(arguments[:4])} did not start: {''.join(said)}")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _cells(rows: Sequence[SplitRow]) -> Cells:
    head = [
        "delay",
        "round trip",
        "token",
        "alone",
        "overhead",
        "prompt",
        "alone",
        "repeats",
        "drafted",
        "sent",
        "received",
        "same",
    ]
    return [[*head]] + [
        [
            f"{row.delay_ms:g} ms",
            *(
                number(value, ".2f")
                for value in (
                    row.round_trip_ms,
                    row.token_ms,
                    row.local_token_ms,
                    row.overhead_ms,
                    row.prompt_ms,
                    row.local_prompt_ms,
                    row.repeating_ms,
                    row.drafted_ms,
                )
            ),
            number(row.sent_bytes, ".0f"),
            number(row.received_bytes, ".0f"),
            "yes" if row.same_tokens else "no",
        ]
        for row in rows
    ]


TABLE = Table(
    row=SplitRow, title="Split, {} cache (milliseconds; bytes a token)", by=lambda row: row.name, cells=_cells
)
TEST = BenchTest(
    name="split",
    measures="layers on one machine, embeddings and output head on another",
    flags=("--n-prompt", "--n-gen", "--repeats", "--folder"),
    tables=(TABLE, CLIENTS_TABLE),
    prepare=prepare,
    check=check,
)
