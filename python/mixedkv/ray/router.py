"""`Placing` as Ray Serve calls it, and chance."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

_MOST_BLOCKS = 200_000  # that are remembered: 50 MB of text
_MAX_SESSIONS = 100_000
_LONGEST = 3600.0  # seconds after which a request is over, whatever was heard of it
_ROUTING = 10.0  # seconds after which one that was placed has been given up, unless it was sent


class _Sent(NamedTuple):
    """A request that went to a replica: the characters to evaluate for it, and when it counts as over."""

    replica: str
    work: int
    over: float
    prefix: Prefix


class Placing:
    """Places prompts, for one event loop.

    Args:
        beta: how much waiting counts beside evaluating; 0 goes by prefixes alone.
    """

    def __init__(self, beta: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._beta, self._clock = beta, clock
        self._holders: OrderedDict[int, set[str]] = OrderedDict()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._numbers = count(1)
        self._last: dict[str, int] = {}  # number of what a replica was sent last
        self._work: dict[str, _Sent] = {}  # by request

    def place(self, request: str, prefix: Prefix, replicas: Collection[str]) -> list[str]:
        """Order replicas, the best first. The request counts for that one at once: others are placed before
        it is sent.
        """
        ranked = self.order(prefix, replicas, request)
        if ranked:
            self.sent(request, prefix, ranked[0], _ROUTING)
        return ranked

    def order(self, prefix: Prefix, replicas: Collection[str], request: str = "") -> list[str]:
        """Return the replicas, the best first. Of equals, the one that has waited longest for a prompt comes
        first.
        """
        waiting, answered, now = dict.fromkeys(replicas, 0), set(prefix.ends[:-1]), self._clock()
        self._work = {name: one for name, one in self._work.items() if one.over > now}
        for name, one in self._work.items():
            if one.replica in waiting and name != request and not answered.intersection(one.prefix.ends[-1:]):
                waiting[one.replica] += one.work
        home = self._sessions.get(prefix.session, "")

        def cost(replica: str) -> tuple[float, int]:
            new = 0 if replica == home else prefix.length - self.held(prefix, replica)
            return new + self._beta * waiting[replica], self._last.get(replica, 0)

        return sorted(replicas, key=cost)

    def held(self, prefix: Prefix, replica: str) -> int:
        """Return the number of characters that a replica was sent before."""
        for i, block in enumerate(prefix.blocks):
            if replica not in self._holders.get(block, ()):
                return BLOCK * i
        return BLOCK * len(prefix.blocks)

    def sent(self, request: str, prefix: Prefix, replica: str, seconds: float = _LONGEST) -> None:
        """Note that a request went to a replica. It counts as over after that many seconds, even if nothing
        is heard of it.
        """
        was = self._work.get(request)
        if was is not None and was.replica == replica:
            work = was.work
        else:
            self._last[replica] = next(self._numbers)
            work = prefix.length - self.held(prefix, replica) + BLOCK
        self._work[request] = _Sent(replica, work, self._clock() + seconds, prefix)
        for block in prefix.blocks:
            self._holders.setdefault(block, set()).add(replica)
            self._holders.move_to_end(block)
        if prefix.session:
            self._sessions[prefix.session] = replica
            self._sessions.move_to_end(prefix.session)
        while len(self._holders) > _MOST_BLOCKS:
            self._holders.popitem(last=False)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def done(self, request: str) -> None:
        """Note that a request was answered, or failed."""
        self._work.pop(request, None)


BLOCK = 256  # characters
_MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt.

    Args:
        blocks: a hash of each 256 characters and all before them, and of whose they are.
        length: characters of the prompt.
        ends: a hash of all up to the end of each of its messages; the last one is the whole prompt's.
        session: of the conversation it says it is of, "" for none.
    """

    blocks: tuple[int, ...] = ()
    length: int = 0
    session: str = ""
    ends: tuple[int, ...] = ()


def prefix_of(body: bytes, owner: str = "", session: str = "") -> Prefix:
    """Return the prefix of a request's body; of what is no prompt, an empty one.

    Args:
        owner: what tells tenants apart: KV is found by its own only.
        session: named beside the body.
    """
    try:
        asked = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        asked = {}
    if not isinstance(asked, dict):
        asked = {}
    texts = list(_texts(asked))
    text = "\n".join(texts)
    named = session or asked.get("session_id") or ""
    blocks, ends = [], []
    name = hashlib.sha256(owner.encode()).digest()
    all_before = hashlib.sha256(name)
    for one in texts:
        all_before.update(one.encode(errors="replace") + b"\n")
        ends.append(_number(all_before.digest()))
    for begin in range(0, min(len(text), BLOCK * _MAX_BLOCKS) - BLOCK + 1, BLOCK):
        name = hashlib.sha256(name + text[begin : begin + BLOCK].encode(errors="replace")).digest()
        blocks.append(_number(name))
    whose = hashlib.sha256(f"{owner}\n{named}".encode(errors="replace")).hexdigest()[:32] if named else ""
    return Prefix(tuple(blocks), len(text), whose, tuple(ends))


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")


def _texts(asked: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a chat, a completion or a response, in the order in which templates write it."""
    for name in ("tools", "system", "instructions", "prompt", "input"):
        if value := asked.get(name):
            yield value if isinstance(value, str) else json.dumps(value)
    messages = asked.get("messages")
    for message in messages if isinstance(messages, list) else []:
        yield json.dumps(message)


class RandomRouter(RequestRouter):  # type: ignore[misc]
    """Chooses a replica at random: the baseline of measurements."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [[one] for one in random.sample(candidate_replicas, len(candidate_replicas))]


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a prompt where most of it lies, less what waits there."""

    def initialize_state(self, beta: float = 1.0, **_: Any) -> None:
        self._placing = Placing(beta)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        prefix = _prefix(pending_request)
        if pending_request is None:
            return [[by_name[name]] for name in self._placing.order(prefix, by_name)]
        request = pending_request.metadata.internal_request_id
        return [[by_name[name]] for name in self._placing.place(request, prefix, by_name)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request = pending_request.metadata.internal_request_id
        self._placing.sent(request, _prefix(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._placing.done(internal_request_id)


def _prefix(request: PendingRequest | None) -> Prefix:
    """Return the prefix that the ingress gives with each request."""
    found = request.kwargs.get("prefix") if request is not None else None
    return found if isinstance(found, Prefix) else Prefix()
