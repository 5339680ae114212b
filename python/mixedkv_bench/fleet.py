"""Replicas on Ray Serve: what routing by prefixes and a shared store save, and what a kill costs."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mixedkv_bench.bench_test import Bench, BenchTest, Measure
from mixedkv_bench.harness.cache_settings import Setting
from mixedkv_bench.harness.chat_client import ClientSampling
from mixedkv_bench.harness.ray_fleet import RayFleet
from mixedkv_bench.harness.replay import Conversation, Replay, replay
from mixedkv_bench.harness.row import Row
from mixedkv_bench.harness.summary import quartiles
from mixedkv_bench.harness.table import Cells, Table, number
from mixedkv_bench.options import Options
from mixedkv_bench.serve import Script, ServeWork, TurnPart, by_turn

Routing = Literal["random", "ray", "prefix"]
_SENDING = 3.0  # seconds in which what was answered is stored and sent
_KILLED = 4  # conversations of each replica in a round with a kill


class FleetRow(Row):
    """One row per number of replicas and clients, routing, and with and without the shared store.

    The same conversations as of serve, new ones in each round, through the ingress of a Ray Serve application
    on this machine. The context of every replica has room for all of them. With the shared store Ray's own
    routing is left out.
    """

    test: Literal["fleet"] = "fleet"
    replicas: int = Field(description="engines, each in a process of its own with `threads` threads")
    clients: int = Field(description="requests at a time, and conversations in a round")
    n_prompt: int = Field(description="tokens of the first message")
    n_gen: int = Field(description="tokens of an answer")
    routing: Routing = Field(
        description='`"prefix"`: where most of a prompt lies, less what waits there; `"ray"`: Ray\'s own, '
        'the less busy of two replicas that are drawn; `"random"`: to any'
    )
    shared: bool = Field(description="whether the replicas keep KV on the server of `--remote`")
    tps: float | None = Field(
        default=None, description="generated tokens per second of all clients, prompts included, median"
    )
    hit_ratio: float | None = Field(default=None, description="share of prompt tokens not evaluated")
    by_turn: list[TurnPart] | None = Field(default=None, description="the answers by turn")


class ResumeRow(Row):
    """One row per number of replicas and place of the KV: a replica is ended by SIGKILL before the last turn.

    Each has four conversations in each of `--repeats` rounds. Ray Serve puts another one in its place. When
    that one has answered something else, all conversations go on one after the other; those that the killed
    replica had are what is measured. Answers, up to where they end by themselves, are compared with those of
    the same conversations where nobody is killed and nothing kept.
    """

    test: Literal["fleet_resume"] = "fleet_resume"
    replicas: int = Field(description="engines")
    tier: Literal["disk", "remote"] = Field(
        description='`"disk"`: all replicas have one folder; `"remote"`: the server of `--remote` alone'
    )
    n: int | None = Field(default=None, description="conversations that the killed replicas had")
    n_prompt: int | None = Field(default=None, description="tokens of their prompts at the last turn, mean")
    cached_tokens: float | None = Field(default=None, description="of these that were not evaluated, mean")
    ttft: float | None = Field(default=None, description="seconds to the first token, median")
    ttft_low: float | None = Field(default=None, description="lower quartile")
    ttft_high: float | None = Field(default=None, description="upper quartile")
    vs_disk: float | None = Field(default=None, description='that median by that of `"disk"`')
    same: bool | None = Field(default=None, description="whether all answers are those without a kill")


def check(options: Options) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ValueError("fleet needs Ray Serve: run pip install 'mixedkv[ray]'")
    if options.turns < 2:
        raise ValueError(f"--turns {options.turns}: use 2 or more, so that a conversation goes on")


def prepare(bench: Bench) -> Measure:
    work = ServeWork.of(bench.options, peer=False)
    return lambda: _measure(bench, _Fleets(bench, work))


def _measure(bench: Bench, fleets: _Fleets) -> None:
    with closing(RayFleet()) as fleet:
        for setting in bench.options.settings:
            for replicas in bench.options.replicas:
                fleets.measure(fleet, setting, replicas)


class _Fleets:
    def __init__(self, bench: Bench, work: ServeWork) -> None:
        self._bench, self._work, self._remote = bench, work, bench.options.remote
        self._script = Script(bench.model, bench.options.file, work)
        self._ends = ClientSampling(work.n_gen, ())
        self._n_ctx = self._script.n_ctx()

    def measure(self, fleet: RayFleet, setting: Setting, replicas: int) -> None:
        work, bench = self._work, self._bench
        base: dict[str, Any] = {"kv": setting.spec, "flash_attn": setting.flash_attn, "threads": work.threads}
        base["replicas"] = replicas
        n_held = max(work.n_conversations, _KILLED * replicas)
        options = {"model": bench.options.file.path, "kv": setting.spec, "n_ctx": self._n_ctx * n_held}
        options |= {"threads": work.threads, "parallel": work.n_conversations, "replicas": replicas}
        options["idle_prefixes"] = n_held
        remote = {"store_remote": self._remote} if self._remote else {}
        for shared in (False, True) if remote else (False,):
            for routing in ("random", "prefix") if shared else ("random", "ray", "prefix"):
                bench.progress.show(
                    f"fleet: {replicas} replicas, {routing}, {'' if shared else 'not '}shared"
                )
                fleet.deploy({**options, "routing": routing, **(remote if shared else {})})
                for clients in work.clients:
                    rounds = [self._replay(fleet, clients) for _ in range(work.repeats)]
                    head = {"clients": clients, "routing": routing, "shared": shared, **base}
                    head |= {"n_prompt": work.n_prompt, "n_gen": work.n_gen}
                    bench.add(FleetRow.model_validate({**head, **_of_rounds(rounds, work)}))
        self._resume(fleet, options, remote, base)

    def _replay(self, fleet: RayFleet, clients: int) -> Replay:
        """Replay conversations that no store has seen."""
        conversations = self._script.conversations(time.time_ns() % 10**9)[:clients]
        return replay(fleet.url, conversations, clients, self._script.sampling)

    def _resume(
        self, fleet: RayFleet, options: dict[str, Any], remote: dict[str, Any], base: dict[str, Any]
    ) -> None:
        """Resume one conversation at a time, so that sums are of the same batches."""
        done: dict[str, list[tuple[Sequence[Conversation], Replay]]] = {}
        with tempfile.TemporaryDirectory(prefix="mixedkv-fleet-") as folder:
            for tier, where in {"disk": {"store": folder}, **({"remote": remote} if remote else {})}.items():
                self._bench.progress.show(f"fleet: {options['replicas']} replicas, one is killed, {tier}")
                fleet.deploy({**options, **where})
                done[tier] = [
                    self._kill(fleet, _KILLED * options["replicas"]) for _ in range(self._work.repeats)
                ]
        fleet.deploy(options)
        disk = 0.0
        for tier, rounds in done.items():
            answers = [a for _, found in rounds for a in found.answers[-1] if a.tier == tier]
            row: dict[str, Any] = {"tier": tier, **base, "n": len(answers)}
            if answers:
                row["ttft_low"], row["ttft"], row["ttft_high"] = quartiles([a.ttft for a in answers])
                row["n_prompt"] = round(float(np.mean([a.n_prompt or 0 for a in answers])))
                row["cached_tokens"] = float(np.mean([a.n_cached or 0 for a in answers]))
                row["same"] = all(self._is_as_without(fleet, *one) for one in rounds)
                disk = row["ttft"] if tier == "disk" else disk
                if disk:
                    row["vs_disk"] = row["ttft"] / disk
            else:
                row["error"] = "no conversation was read from there: it was not stored in time"
            self._bench.add(ResumeRow.model_validate(row))

    def _kill(self, fleet: RayFleet, n: int) -> tuple[Sequence[Conversation], Replay]:
        """Replay that many conversations, and kill their replicas before the last turn."""
        first = time.time_ns() % 10**9
        conversations: list[Conversation] = []
        while len(conversations) < n:
            conversations += self._script.conversations(first + len(conversations))
        del conversations[n:]
        begun = [Conversation(one.messages[:-1]) for one in conversations]
        before = replay(fleet.url, begun, 1, self._ends)
        time.sleep(_SENDING)
        fleet.kill_one()
        return conversations, replay(fleet.url, conversations, 1, self._ends, before)

    def _is_as_without(self, fleet: RayFleet, conversations: Sequence[Conversation], found: Replay) -> bool:
        """Return whether a fleet where nobody is killed, and nothing is kept, answers the same."""
        alone = replay(fleet.url, conversations, 1, self._ends)
        texts = [[[a.text for a in turn] for turn in one.answers] for one in (alone, found)]
        return texts[0] == texts[1]


def _of_rounds(rounds: Sequence[Replay], work: ServeWork) -> dict[str, Any]:
    answers = [answer for done in rounds for turn in done.answers for answer in turn]
    n_prompt = sum(answer.n_prompt or 0 for answer in answers)
    return {
        "tps": float(np.median([done.n_tokens(work.n_gen) / done.seconds for done in rounds])),
        "hit_ratio": sum(answer.n_cached or 0 for answer in answers) / n_prompt if n_prompt else None,
        "by_turn": list(by_turn(rounds)),
    }


def _cells(rows: Sequence[FleetRow]) -> Cells:
    table = [["routing, store", "clients", "cached", "last turn", "its first token", "tokens/s"]]
    for row in rows:
        last = row.by_turn[-1] if row.by_turn else None
        table.append(
            [
                f"{row.routing}, {'shared' if row.shared else 'none'}",
                str(row.clients),
                number(row.hit_ratio, ".0%"),
                number(last.cached_tokens if last else None, ".0f"),
                number(1e3 * last.ttft if last else None, ".0f") + " ms",
                number(row.tps, ".1f"),
            ]
        )
    return table


def _resume_cells(rows: Sequence[ResumeRow]) -> Cells:
    return [["from", "conversations", "prompt", "cached", "first token", "x disk", "answers"]] + [
        [
            row.tier,
            number(row.n, "d"),
            number(row.n_prompt, "d"),
            number(row.cached_tokens, ".0f"),
            number(1e3 * row.ttft if row.ttft else None, ".0f") + " ms",
            number(row.vs_disk, ".2f"),
            "the same" if row.same else "others",
        ]
        for row in rows
    ]


TABLE = Table(row=FleetRow, title="Fleet of {} replicas", by=lambda row: row.replicas, cells=_cells)
RESUME_TABLE = Table(
    row=ResumeRow,
    title="Fleet of {} replicas, one is killed: the first answer elsewhere",
    by=lambda row: row.replicas,
    cells=_resume_cells,
)
TEST = BenchTest(
    name="fleet",
    measures="several servers that share stored KV",
    flags=("--replicas", "--clients", "--turns", "--n-prompt", "--n-gen", "--repeats", "--remote"),
    tables=(TABLE, RESUME_TABLE),
    check=check,
    prepare=prepare,
    weights=False,
)
