"""Conversations over HTTP: time to the first token by turn, tokens per second by number of clients, and how
much a long prompt holds up the answers of others.

All servers run at the same time, each in a process of its own, and take turns, round by round; those that
wait use no CPU. The same requests go to all; each round and each number of clients has new conversations, so
that no server knows one already. Ratios are taken within a round and their median is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import llama_cpp
import numpy as np
from pydantic import Field

from mixedkv.limits import CELLS, padded
from mixedkv.model.gguf_file import ModelFile
from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness import servers
from mixedkv_bench.harness.bench_peer import check_program
from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.chat_client import ClientSampling
from mixedkv_bench.harness.contexts import CannotRunError, LoadedModel
from mixedkv_bench.harness.progress import Bar
from mixedkv_bench.harness.replay import Conversation, Replay, make_conversation, replay, room
from mixedkv_bench.harness.row import Row, RowPart
from mixedkv_bench.harness.servers import ServerSpec
from mixedkv_bench.harness.stall import Stall, stall
from mixedkv_bench.harness.summary import quartiles
from mixedkv_bench.harness.table import NONE, Cells, Table, number, spread
from mixedkv_bench.options import Options

_MAX_BANNED = 300  # entries of a logit_bias at OpenAI
_SEED = 100_000
_LONG = 4096  # tokens of the prompt that others must not notice
_SHORT = 32  # tokens of the prompts of these others


class ServerRow(Row):
    """Fields that rows of servers share."""

    engine: str = Field(
        description='`"mixedkv"`, `"llama_cpp"`, `"llama_cpp, RAM cache"`, or with `--peer PROGRAM` its name'
    )
    n_ctx: int = Field(description="tokens of context for each client")
    peer_version: str | None = Field(default=None, description="version of the stock llama_cpp")
    peer_extra_buffers: bool | None = Field(
        default=None, description="false where it ran without repacked weights, as for speed"
    )


class TurnPart(RowPart):
    """All answers at one turn."""

    turn: int = Field(description="which, from 1")
    n: int = Field(description="answers")
    ttft: float = Field(
        description="seconds from sending the request to the first text out of the socket, median"
    )
    low: float = Field(description="its lower quartile")
    high: float = Field(description="its upper quartile")
    p95: float | None = Field(default=None, description="its 95th percentile")
    prompt_tokens: float | None = Field(description="mean; null where the server does not tell")
    cached_tokens: float | None = Field(description="mean; null where the server does not tell")


class ServeRow(ServerRow):
    """One row per server and number of clients.

    Conversations over HTTP, streamed, replayed against `mixedkv serve` and against `python -m
    llama_cpp.server` of the stock llama-cpp-python. All servers run during the whole run, each in a process
    of its own, and take turns, round by round. All get the same requests: greedy, with the end of an answer
    ruled out by `logit_bias`, so that each has `n_gen` tokens. The history of a conversation has the answers
    that the server gave. Each round and each number of clients has new conversations. The first message is a
    journal of `n_prompt` tokens, the others are questions about it.

    The stock server runs with `logits_all=false` (it would write the logits of prompts),
    `interrupt_requests=false` (a new request would cut off the running one) and without flash attention. It
    runs once as it is, with the prefix of the last request in its context, and once with its RAM cache. It
    has a context of `n_ctx` tokens; `mixedkv serve` has `n_ctx` times the largest number of clients, shared
    by all.

    With `--peer PROGRAM` a llama-server takes their place, with each of llama.cpp's own caches among the
    settings. It has a slot for each client and as many tokens of one cache for all of them, and its prompt
    cache. What a long prompt costs the others is not measured then.
    """

    test: Literal["serve"] = "serve"
    clients: int = Field(
        description="requests at a time: each client works through conversations, turn by turn"
    )
    conversations: int | None = Field(
        default=None,
        description="how many in a round, the same for every number of clients; with one client they come "
        "one after another",
    )
    n_turns: int | None = Field(default=None, description="messages of a conversation")
    n_prompt: int | None = Field(default=None, description="tokens of its first message")
    n_gen: int | None = Field(default=None, description="tokens of an answer")
    tps: float | None = Field(
        default=None,
        description="generated tokens per second of all clients together, prompts included in the time; "
        "median of the rounds",
    )
    tps_low: float | None = Field(default=None, description="lower quartile of the rounds")
    tps_high: float | None = Field(default=None, description="upper quartile of the rounds")
    tps_samples: list[float] | None = Field(default=None, description="all rounds, in order")
    vs_serial: float | None = Field(
        default=None,
        description="times as fast as the same server with one client: median of the ratios within a round",
    )
    vs_stock: float | None = Field(
        default=None,
        description="times as fast as the stock server with the same number of clients, the faster of its "
        "two; with `--peer PROGRAM` as that, the fastest of its settings",
    )
    cpu_ms: float | None = Field(
        default=None, description="milliseconds of CPU time for a generated token, prompts included, median"
    )
    hit_ratio: float | None = Field(
        default=None,
        description="share of prompt tokens that were not evaluated, from "
        "`usage.prompt_tokens_details.cached_tokens`; the stock server does not tell",
    )
    by_turn: list[TurnPart] | None = Field(default=None, description="the answers by turn")


class StallRow(ServerRow):
    """One row per setting of `mixedkv serve`.

    How much a long prompt holds up others: some answers are generated for two seconds alone, then while the
    prompt is evaluated. Seconds between two tokens of an answer are as they come out of the socket: means,
    since tokens that gather on the way come at once.
    """

    test: Literal["stall"] = "stall"
    streams: int = Field(description="answers that are generated")
    n_prompt: int = Field(description="tokens of the long prompt")
    idle: float = Field(description="seconds between two tokens without the prompt, mean")
    idle_p95: float = Field(description="its 95th percentile")
    idle_max: float = Field(description="the longest")
    busy: float = Field(description="seconds between two tokens with the prompt, mean")
    busy_p95: float = Field(description="its 95th percentile")
    busy_max: float = Field(description="the longest")
    vs_idle: float = Field(description="mean with by mean without, median of the rounds")
    ttft: float = Field(description="seconds to the first token of the long prompt, median")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeWork:
    """Work that is timed: conversations of `turns` messages, the first of `n_prompt` tokens, with answers of
    `n_gen`; as many conversations as the largest of `clients`, for every number of clients.
    """

    n_prompt: int
    n_gen: int
    turns: int
    clients: tuple[int, ...]
    threads: int
    repeats: int
    peer: bool
    program: Path | None = None  # a llama-server, in place of the stock server
    n_ctx: int | None = None  # tokens for each client; None for what the conversations need

    @classmethod
    def of(cls, options: Options, **rest: Any) -> ServeWork:
        """Return the work that the options of `serve` and `fleet` have in common, and the `rest` by name."""
        return cls(
            n_prompt=options.n_prompt,
            n_gen=options.n_gen,
            turns=options.turns,
            clients=options.clients,
            threads=options.threads,
            repeats=options.repeats,
            **rest,
        )

    @property
    def n_conversations(self) -> int:
        return max(self.clients)


@dataclass
class ServerContender:
    """One server: how it is started, and what came of it, by number of clients."""

    engine: str
    setting: Setting
    command: Callable[[int], list[str]]
    server: servers.Server | None = None
    error: str = ""
    replays: dict[int, list[Replay]] = field(default_factory=dict)
    cpu: dict[int, list[float]] = field(default_factory=dict)  # seconds of each replay
    stalls: list[Stall] = field(default_factory=list)


class Script:
    """The conversations, each with a number, and how they are sampled."""

    def __init__(self, model: LoadedModel, file: ModelFile, work: ServeWork) -> None:
        self._work = work
        self._count = lambda text: len(model.tokenize(text))
        self.sampling = ClientSampling(work.n_gen, _banned(model, file))

    def conversations(self, group: int) -> list[Conversation]:
        """Return the conversations that are replayed together; another group shares none with this one."""
        n, work = self._work.n_conversations, self._work
        seeds = range(_SEED + group * n, _SEED + (group + 1) * n)
        return [make_conversation(seed, work.n_prompt, work.turns, self._count) for seed in seeds]

    def prompt(self, seed: int, n_tokens: int) -> str:
        return make_conversation(_SEED - 1 - seed, n_tokens, 1, self._count).messages[0]

    def n_ctx(self) -> int:
        """Return how many tokens a client needs, and some more, since conversations differ."""
        n = room(self.conversations(0), self._work.n_gen, self._count)
        return padded(n + n // 16)


def check(options: Options) -> None:
    if options.peer_path is not None:
        check_program(options.peer_path)
    elif options.peer:
        servers.check_stock()


def prepare(bench: Bench) -> Measure:
    options = bench.options
    work = ServeWork.of(options, peer=options.peer, program=options.peer_path, n_ctx=options.n_ctx_client)
    return lambda: measure(bench, work)


def measure(bench: Bench, work: ServeWork) -> None:
    """Add a row for every server and number of clients, and one with the stall of each of ours.

    What was measured is added also when this is interrupted.
    """
    file, progress = bench.options.file, bench.progress
    script = Script(bench.model, file, work)
    n_ctx = work.n_ctx or script.n_ctx()
    spec = ServerSpec(file=file, n_ctx=n_ctx, clients=work.n_conversations, threads=work.threads)
    contenders = _contenders(bench.options, spec, work)
    progress.add(len(contenders) * (1 + work.repeats * (len(work.clients) + 1)))
    try:
        with ExitStack() as stack:
            for contender in contenders:
                _start(contender, script, stack, progress)
            for no in range(work.repeats):
                for contender in contenders[:: -1 if no % 2 else 1]:
                    _round(contender, no, script, work, spec, progress)
    finally:
        for row in _rows(contenders, work, spec):
            bench.add(row)


def _contenders(options: Options, spec: ServerSpec, work: ServeWork) -> list[ServerContender]:
    def ours(setting: Setting) -> ServerContender:
        return ServerContender("mixedkv", setting, lambda port: servers.mixedkv_command(spec, setting, port))

    def stock(engine: str) -> ServerContender:
        (f16,) = make_settings(["f16"], "off")
        return ServerContender(engine, f16, lambda port: servers.stock_command(spec, engine, port))

    contenders = [ours(setting) for setting in options.settings]
    if (program := work.program) is not None:
        return contenders + [_rival(setting, spec, program) for setting in options.peer_settings]
    return contenders + ([stock(servers.STOCK), stock(servers.STOCK_CACHE)] if work.peer else [])


def _rival(setting: Setting, spec: ServerSpec, program: Path) -> ServerContender:
    return ServerContender(
        program.name, setting, lambda port: servers.llama_server_command(spec, setting, program, port)
    )


def _start(contender: ServerContender, script: Script, stack: ExitStack, progress: Bar) -> None:
    """Start a server and let it answer once."""
    progress.show(f"serve: start {contender.engine} {contender.setting.name}")
    port = servers.free_port()
    try:
        contender.server = servers.Server(contender.command(port), port)
        stack.callback(contender.server.close)
        warm = Conversation((script.prompt(0, 64),))
        replay(contender.server.url, [warm], 1, script.sampling)
    except CannotRunError as error:
        contender.error = str(error)
    progress.step()


def _round(
    contender: ServerContender,
    no: int,
    script: Script,
    work: ServeWork,
    spec: ServerSpec,
    progress: Bar,
) -> None:
    for i, clients in enumerate(work.clients):
        progress.show(f"serve: {contender.engine} {contender.setting.name}, {clients} clients")
        if contender.server is not None and not contender.error:
            conversations = script.conversations(no * len(work.clients) + i)
            try:
                before = contender.server.cpu_seconds
                done = replay(contender.server.url, conversations, clients, script.sampling)
                contender.replays.setdefault(clients, []).append(done)
                if before is not None and (after := contender.server.cpu_seconds) is not None:
                    contender.cpu.setdefault(clients, []).append(after - before)
            except CannotRunError as error:
                contender.error = f"{error} {contender.server.last_words()}"
        progress.step()
    if (
        contender.server is not None
        and not contender.error
        and contender.engine == "mixedkv"
        and work.n_conversations > 1
        and work.program is None
    ):
        progress.show(f"serve: {contender.engine} {contender.setting.name}, a long prompt")
        try:
            contender.stalls.append(_stall(contender.server, no, script, work, spec))
        except CannotRunError as error:
            contender.error = f"{error} {contender.server.last_words()}"
    progress.step()


def _stall(server: servers.Server, no: int, script: Script, work: ServeWork, spec: ServerSpec) -> Stall:
    """Measure how a long prompt of one client delays the answers of all others, which share the room."""
    n_streams = work.n_conversations - 1
    n_long = min(_LONG, spec.n_ctx * spec.clients // 2)
    n_room = (spec.n_ctx * spec.clients - n_long - CELLS) // n_streams - 2 * _SHORT
    if n_room < 1:
        raise CannotRunError(
            f"{n_streams} answers have no room beside a prompt of {n_long} tokens: use a larger --n-ctx"
        )
    seeds = range(no * spec.clients, (no + 1) * spec.clients)
    *streams, prompt = (script.prompt(1 + i, _SHORT if i < seeds[-1] else n_long) for i in seeds)
    return stall(server.url, streams, prompt, n_room, script.sampling)


def _rows(contenders: Sequence[ServerContender], work: ServeWork, spec: ServerSpec) -> Iterator[ServerRow]:
    for contender in contenders:
        head: dict[str, Any] = {
            "engine": contender.engine,
            "kv": contender.setting.spec,
            "flash_attn": contender.setting.flash_attn,
            "threads": work.threads,
            "n_ctx": spec.n_ctx,
        }
        if contender.engine in (servers.STOCK, servers.STOCK_CACHE):
            head["peer_version"] = llama_cpp.__version__
            head["peer_extra_buffers"] = servers.stock_extra_buffers(spec.file)
        for clients, replays in contender.replays.items():
            measured = _of_replays(contender, contenders, clients, replays, work)
            yield ServeRow.model_validate({"clients": clients, **head, **measured})
        if contender.stalls:
            yield StallRow.model_validate(head | _of_stalls(contender.stalls, work))
        if contender.error:
            failed = {"clients": max(work.clients), "error": contender.error}
            yield ServeRow.model_validate(head | failed)


def _of_replays(
    contender: ServerContender,
    contenders: Sequence[ServerContender],
    clients: int,
    replays: Sequence[Replay],
    work: ServeWork,
) -> dict[str, Any]:
    rates = [done.n_tokens(work.n_gen) / done.seconds for done in replays]
    low, median, high = quartiles(rates)
    row: dict[str, Any] = {
        "conversations": work.n_conversations,
        "n_turns": work.turns,
        "n_prompt": work.n_prompt,
        "n_gen": work.n_gen,
        "tps": median,
        "tps_low": low,
        "tps_high": high,
        "tps_samples": rates,
        "by_turn": list(by_turn(replays)),
    }
    if cpu := contender.cpu.get(clients):
        row["cpu_ms"] = 1e3 * float(
            np.median([c / done.n_tokens(work.n_gen) for c, done in zip(cpu, replays, strict=False)])
        )
    if 1 in contender.replays:
        row["vs_serial"] = _ratio(contender.replays[1], replays)
    stock = [other for other in contenders if other.engine != "mixedkv" and other.replays.get(clients)]
    if stock:
        row["vs_stock"] = min(_ratio(other.replays[clients], replays) for other in stock)
    known = [a for done in replays for turn in done.answers for a in turn if a.n_cached is not None]
    if n_prompt := sum(answer.n_prompt or 0 for answer in known):
        row["hit_ratio"] = sum(answer.n_cached or 0 for answer in known) / n_prompt
    return row


def _ratio(base: Sequence[Replay], replays: Sequence[Replay]) -> float:
    """Return the median over rounds of how much less time the same work took than in `base` in the same
    round.
    """
    return float(np.median([b.seconds / r.seconds for b, r in zip(base, replays, strict=False)]))


def by_turn(replays: Sequence[Replay]) -> Iterator[TurnPart]:
    for turn in range(len(replays[0].answers)):
        answers = [answer for done in replays for answer in done.answers[turn]]
        low, median, high = quartiles([answer.ttft for answer in answers])
        yield TurnPart(
            turn=turn + 1,
            n=len(answers),
            ttft=median,
            low=low,
            high=high,
            p95=float(np.percentile([answer.ttft for answer in answers], 95)),
            prompt_tokens=_mean([answer.n_prompt for answer in answers]),
            cached_tokens=_mean([answer.n_cached for answer in answers]),
        )


def _mean(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def _of_stalls(stalls: Sequence[Stall], work: ServeWork) -> dict[str, Any]:
    """Return means, since tokens that gather on the way arrive at once, with no time between them."""
    idle = np.concatenate([one.idle for one in stalls])
    busy = np.concatenate([one.busy for one in stalls])
    return {
        "streams": work.n_conversations - 1,
        "n_prompt": stalls[0].n_prompt,
        "idle": float(idle.mean()),
        "idle_p95": float(np.percentile(idle, 95)),
        "idle_max": float(idle.max()),
        "busy": float(busy.mean()),
        "busy_p95": float(np.percentile(busy, 95)),
        "busy_max": float(busy.max()),
        "vs_idle": float(np.median([one.busy.mean() / one.idle.mean() for one in stalls])),
        "ttft": float(np.median([one.ttft for one in stalls])),
    }


def _banned(model: LoadedModel, file: ModelFile) -> tuple[int, ...]:
    """Return the tokens that end an answer, and if they are few all others that are no text."""
    vocab = llama_cpp.llama_model_get_vocab(model.ptr)
    ends = [i for i in range(model.n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, i)]
    control = [i for i in range(model.n_vocab) if llama_cpp.llama_vocab_is_control(vocab, i)]
    both = sorted({*ends, *control})
    return tuple(both if len(both) <= _MAX_BANNED else ends)


def _serve_cells(rows: Sequence[ServeRow]) -> Cells:
    head = ["server", "tok/s", "", "x one by one", "x stock", "first token: turn 1"]
    return [[*head, "turn 2", "last turn", "its 95%", "cached", "CPU ms a token"]] + [
        [
            row.name,
            number(row.tps, ".1f"),
            spread(row.tps_low, row.tps, row.tps_high, row.tps_samples),
            number(row.vs_serial, ".2f"),
            number(row.vs_stock, ".2f"),
            *_turn_cells(row.by_turn or []),
            number(row.hit_ratio, ".0%"),
            number(row.cpu_ms, ".1f"),
        ]
        for row in rows
    ]


def _turn_cells(parts: Sequence[TurnPart]) -> list[str]:
    """Return the milliseconds of the first turn, the second and the last, and of its slowest twentieth."""
    turns = [f"{1e3 * part.ttft:.0f} ms" for part in parts]
    late = f"{1e3 * parts[-1].p95:.0f} ms" if parts and parts[-1].p95 is not None else NONE
    return [turns[i] if len(turns) > i else NONE for i in (0, 1)] + [turns[-1] if turns else NONE, late]


def _stall_cells(rows: Sequence[StallRow]) -> Cells:
    head = ["server", "idle", "95%", "longest", "during", "95%", "longest", "during by idle"]
    return [[*head, "prompt", "its first token"]] + [
        [
            row.name,
            *(number(1e3 * seconds, ".1f") for seconds in (row.idle, row.idle_p95, row.idle_max)),
            *(number(1e3 * seconds, ".1f") for seconds in (row.busy, row.busy_p95, row.busy_max)),
            number(row.vs_idle, ".2f"),
            number(row.n_prompt, ",d"),
            number(1e3 * row.ttft, ",.0f"),
        ]
        for row in rows
    ]


SERVE_TABLE = Table(
    row=ServeRow, title="Server with {} at a time", by=lambda row: row.clients, cells=_serve_cells
)
STALL_TABLE = Table(
    row=StallRow,
    title="Time between tokens of {} answers while a long prompt is evaluated, milliseconds",
    by=lambda row: row.streams,
    cells=_stall_cells,
)
TEST = BenchTest(
    name="serve",
    measures="the server with several clients, beside llama-cpp-python's or another one",
    flags=("--clients", "--turns", "--n-prompt", "--n-gen", "--n-ctx", "--repeats", "--peer", "--peer-kv"),
    tables=(SERVE_TABLE, STALL_TABLE),
    check=check,
    prepare=prepare,
)
