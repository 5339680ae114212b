"""Tells routers what the context holds, like vLLM: ZeroMQ messages with a topic, a number (8 bytes, big
endian) and a batch of events in MessagePack.

A block of 16 tokens is named by the first 8 bytes, big endian, of SHA-256 over the name of the block before
it (32 bytes) and its tokens (int32, little endian). The name before the first block is SHA-256 of "mixedkv kv
events\\n" and the tenant. A new listener is told everything: `AllBlocksCleared`, then `BlockStored` for all
blocks. Each model has a topic of its own. See docs/many-machines.md for what routers do with it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import zmq

from mixedkv.errors import ClosedError

if TYPE_CHECKING:
    from mixedkv.engine import Engine
    from mixedkv.prefix.sequences import Sequence as Held

log = logging.getLogger("mixedkv.server")

BLOCK = 16
MEDIUM = "CPU"
_SECONDS = 0.1  # seconds between two looks
_SHORT = 8  # bytes of a name that are sent
_MAX_UNREAD = 100_000  # messages that may wait for a listener


class _Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(_Event):
    """Consecutive blocks of a sequence that were stored."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(_Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """Events at one time, in seconds since 1970."""

    ts: float
    events: list[Event]


@dataclass(slots=True)
class _Told:
    """The blocks of a sequence that listeners know of."""

    version: int
    tenant: str
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class News:
    """A sequence, and its new tokens from a block on."""

    id: int
    version: int
    tenant: str
    first: int
    tokens: array[int]


class HeldBlocks:
    """Makes events from the contents of sequences."""

    def __init__(self) -> None:
        self._told: dict[int, _Told] = {}
        self._holders: Counter[bytes] = Counter()

    def look(self, held: Sequence[Held]) -> list[News]:
        """Return the sequences with their new tokens; called on the engine's thread.

        One that is left out, as assembled ones are, counts as gone: its rows are not exact.
        """
        news = []
        for seq in held:
            if not seq.assembled:
                told = self._told.get(seq.id)
                n = len(seq.tokens) // BLOCK
                same = told is not None and (told.version, told.tenant) == (seq.version, seq.tenant)
                first = len(told.names) if told is not None and same and len(told.names) <= n else 0
                news.append(
                    News(seq.id, seq.version, seq.tenant, first, seq.tokens[BLOCK * first : BLOCK * n])
                )
        return news

    def forget(self) -> bool:
        """Forget what listeners know; return whether that was anything."""
        had = bool(self._told)
        self._told.clear()
        self._holders.clear()
        return had

    def changes(self, news: Sequence[News]) -> list[Event]:
        """Return the events since the last call."""
        had = bool(self._told)
        gone: list[bytes] = []
        events: list[Event] = []
        here = {one.id for one in news}
        for seq in [seq for seq in self._told if seq not in here]:
            gone += self._told.pop(seq).names
        for one in news:
            told = self._told.get(one.id)
            kept = told.names[: one.first] if told is not None else []
            if told is not None:
                gone += told.names[one.first :]
            names = [*kept, *_names(kept[-1] if kept else _root(one.tenant), one.tokens)]
            self._told[one.id] = _Told(one.version, one.tenant, names)
            events += self._stored(names, one)
        left = []
        for name in gone:
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name]
                left.append(name)
        if had and not self._holders:
            return [AllBlocksCleared()] if left else []
        return [*events, BlockRemoved([_short(name) for name in left], MEDIUM)] if left else events

    def _stored(self, names: list[bytes], one: News) -> Iterator[Event]:
        """Yield an event for each run of new blocks."""
        run: list[int] = []
        for i in range(one.first, len(names) + 1):
            new = i < len(names) and not self._holders[names[i]]
            if i < len(names):
                self._holders[names[i]] += 1
            if new:
                run.append(i)
            elif run:
                begin, end = run[0], run[-1] + 1
                yield BlockStored(
                    [_short(name) for name in names[begin:end]],
                    _short(names[begin - 1]) if begin else None,
                    one.tokens[BLOCK * (begin - one.first) : BLOCK * (end - one.first)].tolist(),
                    BLOCK,
                    None,
                    MEDIUM,
                )
                run = []


@dataclass(slots=True)
class _Publisher:
    """Publishes the events of one engine, under a topic of its own."""

    topic: bytes
    engine: Engine
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    n_sent: int = 0


class KVEvents:
    """Publishes what engines hold, ten times a second.

    Args:
        endpoint: ZeroMQ address to listen on: tcp://HOST:PORT or ipc://PATH.
        engines: engines by the topic of their messages.

    Raises:
        ValueError: the server cannot listen there.
    """

    def __init__(self, endpoint: str, engines: Mapping[str, Engine]) -> None:
        self._publishers = [_Publisher(topic.encode(), engine) for topic, engine in engines.items()]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_UNREAD)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # also report listeners of a topic that others listen to
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise ValueError(f"kv_events={endpoint}: {error}: use tcp://HOST:PORT or ipc://PATH") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mixedkv-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> KVEvents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        try:
            while self._publishers and not self._closing.wait(_SECONDS):
                topics = self._new_topics()
                for one in self._publishers:
                    if one.topic.startswith(topics):
                        one.blocks.forget()
                        self._send(one, [AllBlocksCleared()])
                    self._publish_changes(one)
        except Exception:
            log.exception("KV events have stopped")
        finally:
            self._context.destroy()

    def _new_topics(self) -> tuple[bytes, ...]:
        """Return the prefixes of topics that new listeners have subscribed to."""
        found = []
        while self._socket.poll(0):
            message = self._socket.recv()
            if message[:1] == b"\x01":
                found.append(message[1:])
        return tuple(found)

    def _publish_changes(self, one: _Publisher) -> None:
        """Publish the changes. An engine that has ended holds nothing; the others continue."""
        with suppress(ClosedError):
            held = one.engine.call(lambda: one.blocks.look(one.engine.pool.held()))
            if events := one.blocks.changes(held.result()):
                self._send(one, events)
            return
        if one.blocks.forget():
            self._send(one, [AllBlocksCleared()])

    def _send(self, one: _Publisher, events: list[Event]) -> None:
        number = one.n_sent.to_bytes(8, "big")
        self._socket.send_multipart(
            [one.topic, number, msgspec.msgpack.encode(EventBatch(time.time(), events))]
        )
        one.n_sent += 1


def _root(tenant: str) -> bytes:
    return hashlib.sha256(b"mixedkv kv events\n" + tenant.encode()).digest()


def _names(before: bytes, tokens: array[int]) -> Iterator[bytes]:
    for begin in range(0, len(tokens), BLOCK):
        data = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens[begin : begin + BLOCK])
        before = hashlib.sha256(before + data).digest()
        yield before


def _short(name: bytes) -> int:
    return int.from_bytes(name[:_SHORT], "big")
