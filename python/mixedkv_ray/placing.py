"""Chooses the replica that answers a prompt: where it takes the least work.

That is what of the prompt has no KV there, and beta times what others that wait there have none of. What was
sent where is known, not what was evicted since: a guess that is wrong costs time, never an answer.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import count
from typing import NamedTuple

from mixedkv_ray.prefix import BLOCK, Prefix

_MAX_BLOCKS = 200_000  # that are remembered: 50 MB of text
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
        while len(self._holders) > _MAX_BLOCKS:
            self._holders.popitem(last=False)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def done(self, request: str) -> None:
        """Note that a request was answered, or failed."""
        self._work.pop(request, None)
