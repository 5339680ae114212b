"""Settings of reuse: what a request chooses, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Repair = Literal["none", "seam", "cacheblend", "query"]
REPAIRS: tuple[Repair, ...] = get_args(Repair)


@dataclass(frozen=True, kw_only=True, slots=True)
class DonorUse:
    """Positions [begin, end) of a prompt, and the stored entry and position that their rows come from.

    Args:
        common_left: how many tokens before `begin` are the same there.
    """

    begin: int
    end: int
    entry: str
    at: int
    common_left: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkReuse:
    """Tells which tokens of a prompt were reused, repaired and evaluated.

    Args:
        exact: every row equals that of an evaluation from the first token.
        n_tokens: of the prompt.
        n_cached_exact: tokens at its beginning with exact rows that were live or stored.
        n_cached_approximate: tokens whose rows were computed in another prompt and are used as they are.
        n_exact: tokens at its beginning with exact rows, cached or evaluated.
        n_new: tokens that neither the cache nor a donor had: every method evaluates them.
        n_evaluated: tokens that were evaluated, counting twice what was evaluated twice.
        method: how the seams were repaired; "none" where nothing was approximate.
        ratio: the share of reused tokens that the method evaluates again.
        donors: where the approximate rows come from.
        seconds: time of the call.
        reason: why chunks were not used although there were some; "" otherwise.
    """

    exact: bool
    n_tokens: int
    n_cached_exact: int
    n_cached_approximate: int
    n_exact: int
    n_new: int
    n_evaluated: int
    method: Repair
    ratio: float
    donors: tuple[DonorUse, ...]
    seconds: float
    reason: str = ""

    @property
    def reuse_ratio(self) -> float:
        """Share of the tokens that were not evaluated."""
        return (self.n_cached_exact + self.n_cached_approximate) / self.n_tokens

    @property
    def evaluated_ratio(self) -> float:
        """Evaluated tokens divided by the prompt's tokens."""
        return self.n_evaluated / self.n_tokens

    @property
    def repaired_ratio(self) -> float:
        """Share of the prompt's tokens that the repair evaluated: all evaluated ones except new ones."""
        return (self.n_evaluated - self.n_new) / self.n_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkChoice:
    """Settings of one request for the passages that it reuses; None keeps the connector's setting.

    Args:
        repair: how seams are repaired, see `Method`. A method other than the connector's has its own defaults
            for `ratio` and `overlap_k`.
        ratio: share of the reused tokens that "cacheblend" and "query" evaluate again.
        overlap_k: tokens at each edge of a passage that are evaluated again.
        chunk_size: passages shorter than half of this are not reused, and this many tokens at the beginning
            are exact. At least the connector's, whose index has no shorter ones.
        boundary_window: maximum number of tokens by which the edge of a passage moves to the end of a
            sentence.
    """

    repair: Repair | None = None
    ratio: float | None = None
    overlap_k: int | None = None
    chunk_size: int | None = None
    boundary_window: int | None = None
