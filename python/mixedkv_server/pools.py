"""Thread pools for slow work, one for each kind, so that much work of one kind does not delay the others."""

from __future__ import annotations

from mixedkv.work.fair_pool import FairPool
from mixedkv.work.turns import Limits, unlimited

REST = 2.0  # a tenant's work takes a third of a thread at most while others have requests
LARGE = 1 << 16  # bytes of a large body; a smaller one takes a millisecond


class Pools:
    """Thread pools for work off the event loop. Sessions use the loop's own threads, so that a database that
    does not answer delays no other work.

    Args:
        limits: returns the limits of a tenant, of which the weight counts where prompts are prepared.
    """

    def __init__(self, limits: Limits = unlimited) -> None:
        self.prompts = FairPool(3, "mixedkv-prompt", limits, REST)  # templates, tokens, schemas
        self.large_prompts = FairPool(2, "mixedkv-large-prompt", limits, REST)
        self.answers = FairPool(1, "mixedkv-answer", limits)  # large ones to encode, a chunk at a time

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop waiting work, give up running work, and wait for it: it uses the model that is freed next."""
        for pool in (self.answers, self.prompts, self.large_prompts):
            pool.close()
