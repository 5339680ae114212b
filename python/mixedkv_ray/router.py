"""`Placing` as Ray Serve calls it, and chance."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mixedkv_ray.placing import Placing
from mixedkv_ray.prefix import Prefix


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
