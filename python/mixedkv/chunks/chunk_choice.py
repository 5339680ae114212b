"""Settings of one request for the reuse of passages."""

from __future__ import annotations

from dataclasses import dataclass

from mixedkv.chunks.chunk_reuse import REPAIRS, Repair


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

    Raises:
        ValueError: a value is out of range; the message begins with `chunks.` and the field.
    """

    repair: Repair | None = None
    ratio: float | None = None
    overlap_k: int | None = None
    chunk_size: int | None = None
    boundary_window: int | None = None

    def __post_init__(self) -> None:
        if self.repair is not None and self.repair not in REPAIRS:
            raise ValueError(f"chunks.repair={self.repair!r}: use one of {', '.join(REPAIRS)}")
        if self.ratio is not None and (
            isinstance(self.ratio, bool)
            or not isinstance(self.ratio, int | float)
            or not 0 <= self.ratio <= 1
        ):
            raise ValueError(f"chunks.ratio={self.ratio!r}: use a number from 0 to 1")
        self._check_whole("overlap_k", self.overlap_k, 0, 1024)
        self._check_whole("chunk_size", self.chunk_size, 1, 2**31 - 1)
        self._check_whole("boundary_window", self.boundary_window, 0, 2**31 - 1)

    @staticmethod
    def _check_whole(field: str, value: int | None, low: int, high: int) -> None:
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high
        ):
            raise ValueError(f"chunks.{field}={value!r}: use a whole number from {low} to {high}")
