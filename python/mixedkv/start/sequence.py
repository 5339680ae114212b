"""One sequence of a context: its tokens that have rows, and who may go on from them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.prompts.overflow import Gap
from mixedkv.tokens import Tokens, common_prefix


@dataclass(eq=False, slots=True)
class Sequence:
    """One sequence of the context. `tokens` are those that have rows, in order of position.

    Attributes:
        keep: a prefix that was asked for; it is copied, never continued, and evicted after others.
        paused: rows of an answer that goes on later: not continued by others, and evicted last of all.
        checkpoints: what it held besides rows when it was shorter, in order of length.
        whole: it still holds what the token at its end reads.
        stitched: some of its rows were computed elsewhere: only who accepts that goes on from them.
        chunks: what the request asked of these rows that put them together; None where it asked nothing.
        gap: what of a longer prompt was left out; where it is `stitched` too, rows behind were moved down,
            and nobody but the next turn goes on from them.
        shared: other sequences may have its rows at the positions below.
        session: whose prefix it then is, if it is a session's.
        n_prompt: how many of its tokens were the prompt that was answered last; 0 where none was.
        windowless: layers with a sliding window have let go of it; a checkpoint brings it back.
        version: changes whenever rows are taken away, so that who reads rows later can tell.
    """

    id: int
    tenant: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    running: bool = False
    keep: bool = False
    paused: bool = False
    checkpoints: list[Checkpoint] = field(default_factory=list)
    whole: bool = True
    stitched: bool = False
    chunks: object | None = None
    gap: Gap | None = None
    shared: int = 0
    session: str | None = None
    n_prompt: int = 0
    windowless: bool = False
    used_at: int = 0
    version: int = 0

    @property
    def saved(self) -> bool:
        """There is a checkpoint of it as it is."""
        return any(point.n == len(self.tokens) for point in self.checkpoints)

    def common(self, prompt: Tokens) -> int:
        """Return the number of first tokens that are the same."""
        return common_prefix(np.frombuffer(self.tokens, np.int32), prompt) if self.tokens else 0
