"""`Placing` as Ray Serve calls it, and chance."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mixedkv.ray.placing import Placing

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
