"""The places that a server has for connections, who holds them, and who gives one up when they are short.

A connection has an owner once a request of it was let in: the tenant of its key, or its address on a server
without keys. A connection without one, whether it shakes hands, sends a head or is being refused, is a
stranger's. It gives way to every new connection, so that who has no key can hold places only as long as
nobody else comes.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

log = logging.getLogger("mixedkv.server")


PLACE = "mixedkv.place"  # in a request's scope


class Stage(Enum):
    """The stages of a connection, by what it waits for."""

    HANDSHAKE = "handshake"
    HEAD = "head"  # of its first request, or the rest of a later one
    BODY = "body"
    ANSWER = "answer"  # the server works
    IDLE = "idle"  # between two requests


_WAITS_FOR_CLIENT = (Stage.IDLE, Stage.HEAD, Stage.BODY)  # the order in which owners give way
_SHORT = (
    "all %d places for connections are taken (--max-connections): new ones take those of the oldest that "
    "have sent no request with a key, then those of idle ones"
)
_BEYOND = 64  # connections: for health checks, and to see whether an owner comes who has few places


class ConnectionPlace:
    """The place of one connection.

    Attributes:
        address: where it comes from, see `address_of`.
        owner: whose requests were let in on it; None for a stranger.
        since: when its stage began, by the event loop's clock.
        is_beyond: it came when all places were taken by connections that do not give way.
    """

    __slots__ = ("_drop", "_places", "address", "is_beyond", "owner", "since", "stage")

    def __init__(self, places: Places, address: str, drop: Callable[[], None], now: float) -> None:
        self._places, self._drop = places, drop
        self.address = address
        self.owner: str | None = None
        self.stage, self.since, self.is_beyond = Stage.HANDSHAKE, now, False

    def move(self, stage: Stage, now: float) -> None:
        """Note what the connection waits for now."""
        if stage is not self.stage:
            self.stage, self.since = stage, now

    def ends_by(self, drop: Callable[[], None]) -> None:
        """Set what ends the connection."""
        self._drop = drop

    def let_in(self, tenant: str) -> bool:
        """Make the connection a tenant's, as a request of it came. Return False if it has to be refused: all
        places are taken, and nobody holds more of them than this tenant.
        """
        return self._places.let_in(self, tenant or f"@{self.address}")

    def leave(self) -> None:
        """Free the place."""
        self._places.leave(self)

    def drop(self) -> None:
        """End the connection, whose place another one takes."""
        self.leave()
        self._drop()


class Places:
    """The places of a server.

    Args:
        limit: connections at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: set[ConnectionPlace] = set()
        self._strangers: dict[str, dict[ConnectionPlace, None]] = {}  # by address, the oldest first
        self._owners: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._taken)

    def n_of(self, stage: Stage) -> int:
        """Return the number of connections in a stage."""
        return sum(place.stage is stage for place in self._taken)

    def enter(self, address: str, drop: Callable[[], None], now: float) -> ConnectionPlace | None:
        """Give a new connection a place; None if there is none.

        Args:
            drop: ends the connection.
        """
        place = ConnectionPlace(self, address, drop, now)
        if len(self._taken) >= self.limit:
            giving_way = self._oldest_stranger() if self._n_strangers >= _BEYOND else self._idlest()
            if giving_way is not None:
                log.warning(_SHORT, self.limit)
                giving_way.drop()
            elif len(self._taken) >= self.limit + _BEYOND:
                return None
            place.is_beyond = len(self._taken) >= self.limit
        self._taken.add(place)
        self._strangers.setdefault(address, {})[place] = None
        return place

    def let_in(self, place: ConnectionPlace, owner: str) -> bool:
        """Make a connection an owner's, see `ConnectionPlace.let_in`."""
        if place not in self._taken:
            return False
        if place.owner != owner:
            self._disown(place)
            place.owner = owner
            self._owners[owner] += 1
        if not place.is_beyond:
            return True
        if len(self._taken) > self.limit and not self._make_room(owner):
            return False
        place.is_beyond = False
        return True

    def _make_room(self, owner: str) -> bool:
        """End a connection for one that came beyond the limit: a stranger's, or what waits for its client of
        the owner who has most. Return False if that is this one; who has fewer stays beyond the limit.
        """
        stranger = self._oldest_stranger()
        if stranger is not None:
            stranger.drop()
            return True
        richest, most = self._owners.most_common(1)[0]
        if self._owners[owner] >= most:
            return False
        waiting = [each for each in self._taken if each.owner == richest and _can_give_way(each)]
        if waiting:
            min(waiting, key=_order).drop()
        return True

    def leave(self, place: ConnectionPlace) -> None:
        """Free a place."""
        if place in self._taken:
            self._taken.remove(place)
            self._disown(place)

    def drop_unfinished(self) -> None:
        """End all connections that have not finished their handshake."""
        for place in [place for place in self._taken if place.stage is Stage.HANDSHAKE]:
            place.drop()

    def _disown(self, place: ConnectionPlace) -> None:
        if place.owner is None:
            strangers = self._strangers[place.address]
            del strangers[place]
            if not strangers:
                del self._strangers[place.address]
            return
        self._owners[place.owner] -= 1
        if not self._owners[place.owner]:
            del self._owners[place.owner]

    @property
    def _n_strangers(self) -> int:
        return len(self._taken) - self._owners.total()

    def _oldest_stranger(self) -> ConnectionPlace | None:
        """Return the oldest stranger of the address that has most of them."""
        strangers = max(self._strangers.values(), key=len, default=None)
        return next(iter(strangers)) if strangers else None

    def _idlest(self) -> ConnectionPlace | None:
        """Return the idlest connection of the owner who has most."""
        idle = (place for place in self._taken if place.stage is Stage.IDLE)
        return min(idle, key=lambda place: (-self._owners[place.owner or ""], place.since), default=None)


def _can_give_way(place: ConnectionPlace) -> bool:
    return place.stage in _WAITS_FOR_CLIENT


def _order(place: ConnectionPlace) -> tuple[int, float]:
    return _WAITS_FOR_CLIENT.index(place.stage), place.since


def address_of(peer: Any) -> str:
    """Return the part of a peer's address that one client has for itself: all of IPv4's, the first 64 bits of
    IPv6's, "" for a Unix socket.
    """
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    try:
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    except OSError:
        return host
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    return socket.inet_ntop(socket.AF_INET, packed[12:]) if mapped else packed[:8].hex(":", 2)
