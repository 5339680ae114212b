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
from typing import Any

import llama_cpp
import numpy as np

from mixedkv.bench.harness import servers
from mixedkv.bench.harness.cache_settings import Setting, make_settings
from mixedkv.bench.harness.chat_client import Sampling
from mixedkv.bench.harness.contexts import CannotRunError, Model
from mixedkv.bench.harness.progress import Progress
from mixedkv.bench.harness.replay import Conversation, Replay, make_conversation, replay, room
from mixedkv.bench.harness.stall import Stall, stall
from mixedkv.bench.harness.summary import quartiles
from mixedkv.limits import CELLS, padded
from mixedkv.model.gguf_file import ModelFile

_MAX_BANNED = 300  # entries of a logit_bias at OpenAI
_SEED = 100_000
_LONG = 4096  # tokens of the prompt that others must not notice
_SHORT = 32  # tokens of the prompts of these others

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is asked: conversations of `turns` messages, the first of `n_prompt` tokens, with answers of
    `n_gen`; as many conversations as the largest of `clients`, for every number of clients.
    """

    n_prompt: int
    n_gen: int
    turns: int
    clients: tuple[int, ...]
    threads: int
    repeats: int
    peer: bool
    n_ctx: int | None = None  # tokens for each client; None for what the conversations need

    @property
    def n_conversations(self) -> int:
        return max(self.clients)


@dataclass
class Lane:
    """One server: how it is started, and what came of it, by number of clients."""

    engine: str
    setting: Setting
    command: Callable[[int], list[str]]
    server: servers.Server | None = None
    error: str = ""
    replays: dict[int, list[Replay]] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)


class Script:
    """The conversations, each with a number, and how they are sampled."""

    def __init__(self, model: Model, file: ModelFile, work: Work) -> None:
        self._work = work
        self._count = lambda text: len(model.tokenize(text))
        self.sampling = Sampling(work.n_gen, _banned(model, file))

    def conversations(self, group: int) -> list[Conversation]:
        """As many as are replayed together; another group shares none with this one."""
        n, work = self._work.n_conversations, self._work
        seeds = range(_SEED + group * n, _SEED + (group + 1) * n)
        return [make_conversation(seed, work.n_prompt, work.turns, self._count) for seed in seeds]

    def prompt(self, seed: int, n_tokens: int) -> str:
        return make_conversation(_SEED - 1 - seed, n_tokens, 1, self._count).messages[0]

    def n_ctx(self) -> int:
        """Tokens that a client needs; some more, since conversations differ."""
        n = room(self.conversations(0), self._work.n_gen, self._count)
        return padded(n + n // 16)


def measure(
    model: Model,
    file: ModelFile,
    settings: Sequence[Setting],
    work: Work,
    progress: Progress,
    add: Callable[[Row], None],
) -> None:
    """Add a row for every server and number of clients, and one with the stall of each of ours.

    What was measured is added also when this is interrupted.
    """
    script = Script(model, file, work)
    n_ctx = work.n_ctx or script.n_ctx()
    need = servers.Need(file=file, n_ctx=n_ctx, clients=work.n_conversations, threads=work.threads)
    lanes = _lanes(settings, need, work)
    progress.add(len(lanes) * (1 + work.repeats * (len(work.clients) + 1)))
    try:
        with ExitStack() as stack:
            for lane in lanes:
                _start(lane, script, stack, progress)
            for no in range(work.repeats):
                for lane in lanes[:: -1 if no % 2 else 1]:
                    _round(lane, no, script, work, need, progress)
    finally:
        for row in _rows(lanes, work, need):
            add(row)


def _lanes(settings: Sequence[Setting], need: servers.Need, work: Work) -> list[Lane]:
    def ours(setting: Setting) -> Lane:
        return Lane("mixedkv", setting, lambda port: servers.mixedkv_command(need, setting, port))

    def stock(engine: str) -> Lane:
        (f16,) = make_settings(["f16"], "off")
        return Lane(engine, f16, lambda port: servers.stock_command(need, engine, port))

    lanes = [ours(setting) for setting in settings]
    return lanes + ([stock(servers.STOCK), stock(servers.STOCK_CACHE)] if work.peer else [])


def _start(lane: Lane, script: Script, stack: ExitStack, progress: Progress) -> None:
    """Start a server and let it answer once."""
    progress.show(f"serve: start {lane.engine} {lane.setting.name}")
    port = servers.free_port()
    try:
        lane.server = servers.Server(lane.command(port), port)
        stack.callback(lane.server.close)
        warm = Conversation((script.prompt(0, 64),))
        replay(lane.server.url, [warm], 1, script.sampling)
    except CannotRunError as error:
        lane.error = str(error)
    progress.step()


def _round(lane: Lane, no: int, script: Script, work: Work, need: servers.Need, progress: Progress) -> None:
    for i, clients in enumerate(work.clients):
        progress.show(f"serve: {lane.engine} {lane.setting.name}, {clients} clients")
        if lane.server is not None and not lane.error:
            conversations = script.conversations(no * len(work.clients) + i)
            try:
                done = replay(lane.server.url, conversations, clients, script.sampling)
                lane.replays.setdefault(clients, []).append(done)
            except CannotRunError as error:
                lane.error = f"{error} {lane.server.last_words()}"
        progress.step()
    if lane.server is not None and not lane.error and lane.engine == "mixedkv" and work.n_conversations > 1:
        progress.show(f"serve: {lane.engine} {lane.setting.name}, a long prompt")
        try:
            lane.stalls.append(_stall(lane.server, no, script, work, need))
        except CannotRunError as error:
            lane.error = f"{error} {lane.server.last_words()}"
    progress.step()


def _stall(server: servers.Server, no: int, script: Script, work: Work, need: servers.Need) -> Stall:
    """One client asks for a long prompt while all others generate; they share the room of all."""
    n_streams = work.n_conversations - 1
    n_long = min(_LONG, need.n_ctx * need.clients // 2)
    n_room = (need.n_ctx * need.clients - n_long - CELLS) // n_streams - 2 * _SHORT
    seeds = range(no * need.clients, (no + 1) * need.clients)
    *streams, prompt = (script.prompt(1 + i, _SHORT if i < seeds[-1] else n_long) for i in seeds)
    return stall(server.url, streams, prompt, n_room, script.sampling)


def _rows(lanes: Sequence[Lane], work: Work, need: servers.Need) -> Iterator[Row]:
    for lane in lanes:
        head: Row = {
            "engine": lane.engine,
            "kv": lane.setting.spec,
            "flash_attn": lane.setting.flash_attn,
            "threads": work.threads,
            "n_ctx": need.n_ctx,
        }
        if lane.engine != "mixedkv":
            head["peer_version"] = llama_cpp.__version__
            head["peer_extra_buffers"] = servers.stock_extra_buffers(need.file)
        for clients, replays in lane.replays.items():
            yield {
                "test": "serve",
                "clients": clients,
                **head,
                **_of_replays(lane, lanes, clients, replays, work),
            }
        if lane.stalls:
            yield {"test": "stall", **head, **_of_stalls(lane.stalls, work)}
        if lane.error:
            yield {"test": "serve", "clients": max(work.clients), **head, "error": lane.error}


def _of_replays(
    lane: Lane, lanes: Sequence[Lane], clients: int, replays: Sequence[Replay], work: Work
) -> Row:
    rates = [done.n_tokens(work.n_gen) / done.seconds for done in replays]
    low, median, high = quartiles(rates)
    row: Row = {
        "conversations": work.n_conversations,
        "n_turns": work.turns,
        "n_prompt": work.n_prompt,
        "n_gen": work.n_gen,
        "tps": median,
        "tps_low": low,
        "tps_high": high,
        "tps_samples": rates,
        "by_turn": list(_by_turn(replays)),
    }
    if 1 in lane.replays:
        row["vs_serial"] = _ratio(lane.replays[1], replays)
    stock = [other for other in lanes if other.engine != "mixedkv" and other.replays.get(clients)]
    if stock:
        row["vs_stock"] = min(_ratio(other.replays[clients], replays) for other in stock)
    known = [a for done in replays for turn in done.answers for a in turn if a.n_cached is not None]
    if n_prompt := sum(answer.n_prompt or 0 for answer in known):
        row["hit_ratio"] = sum(answer.n_cached or 0 for answer in known) / n_prompt
    return row


def _ratio(base: Sequence[Replay], replays: Sequence[Replay]) -> float:
    """Median over rounds of how much less time the same work took than in `base` in the same round."""
    return float(np.median([b.seconds / r.seconds for b, r in zip(base, replays, strict=False)]))


def _by_turn(replays: Sequence[Replay]) -> Iterator[Row]:
    for turn in range(len(replays[0].answers)):
        answers = [answer for done in replays for answer in done.answers[turn]]
        low, median, high = quartiles([answer.ttft for answer in answers])
        part: Row = {"turn": turn + 1, "n": len(answers), "ttft": median, "low": low, "high": high}
        for key, name in (("prompt_tokens", "n_prompt"), ("cached_tokens", "n_cached")):
            values = [getattr(answer, name) for answer in answers]
            part[key] = None if None in values else float(np.mean(values))
        yield part


def _of_stalls(stalls: Sequence[Stall], work: Work) -> Row:
    """Means, since tokens that gather on the way come at once, with no time between them."""
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


def _banned(model: Model, file: ModelFile) -> tuple[int, ...]:
    """Tokens that end an answer, and if they are few all others that are no text."""
    vocab = llama_cpp.llama_model_get_vocab(model.ptr)
    ends = [i for i in range(model.n_vocab) if llama_cpp.llama_vocab_is_eog(vocab, i)]
    control = [i for i in range(model.n_vocab) if llama_cpp.llama_vocab_is_control(vocab, i)]
    both = sorted({*ends, *control})
    return tuple(both if len(both) <= _MAX_BANNED else ends)
