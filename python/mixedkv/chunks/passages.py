"""Finds passages of a prompt that were computed in other prompts, and decides whether they may be used and
how they are repaired. A `ChunkConnector` uses this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.chunks.assembly import Rows
from mixedkv.chunks.chunk_reuse import REPAIRS, ChunkChoice, Repair
from mixedkv.chunks.donors import SHORTEST_SEGMENT, WIDTH, DonorIndex, TextEnds, find_segments
from mixedkv.chunks.gate import Gate
from mixedkv.chunks.repair import USUAL, Method
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import INT32_MAX, check_int
from mixedkv.llama import Llama
from mixedkv.store import Identity, KVStore
from mixedkv.tokens import Tokens

_INDEXES = 64  # identities (and so tenants) whose donors are kept in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOptions:
    """Settings for finding and repairing passages.

    Args:
        chunk_size: passages of this many tokens are always found, shorter ones often; and this many tokens at
            the beginning of a prompt are always exact.
        boundary_window: maximum number of tokens by which the edge of a passage moves to the end of a
            sentence, line or message.
        max_donors: maximum number of places that are remembered for a passage.
        repair, ratio, overlap_k: see `Method`.
        max_kld: median divergence of checked requests, in nats, above which chunks are no longer reused.
        check: share of the requests that are also evaluated exactly, in idle time.
        seed: seed of the choice of these.

    Raises:
        ValueError: a setting is out of range.
    """

    chunk_size: int = 64
    boundary_window: int = 16
    max_donors: int = 4
    repair: Repair | None = None
    ratio: float | None = None
    overlap_k: int | None = None
    max_kld: float = 0.25
    check: float = 0.01
    seed: int | None = None

    def __post_init__(self) -> None:
        check_int("chunk_size", self.chunk_size, 2 * WIDTH, INT32_MAX - 1)
        try:
            check_int("boundary_window", self.boundary_window, 0, self.chunk_size // 2)
        except ValueError as error:
            raise ValueError(f"{error}, half of chunk_size") from None
        check_int("max_donors", self.max_donors, 1, 1024)

    @property
    def method(self) -> Method:
        return Method(repair=self.repair or USUAL, ratio=self.ratio, overlap_k=self.overlap_k)


_KINDS: dict[str, Callable[[str], Any]] = {
    "repair": str,
    **dict.fromkeys(("ratio", "max_kld", "check"), float),
    **dict.fromkeys(("overlap_k", "chunk_size", "boundary_window"), int),
}


def parse_chunks(text: str) -> dict[str, Any]:
    """Parse settings as `repair=query,chunk_size=64`.

    Returns:
        `ChunkOptions` by name.

    Raises:
        ValueError: a setting is unknown or out of range.
    """
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in _KINDS:
            raise ValueError(f"{name!r} is no setting of chunks: use {', '.join(_KINDS)}")
        try:
            options[name] = _KINDS[name](value)
        except ValueError:
            raise ValueError(f"{name}={value!r}: use a number") from None
    if isinstance(size := options.get("chunk_size"), int):
        options.setdefault("boundary_window", max(0, min(ChunkOptions().boundary_window, size // 2)))
    found = ChunkOptions(**options)
    _ = found.method, Gate(found.max_kld, found.check)  # which check the others
    return options


# what a request chooses of its method, and of where passages are found
_CHOICES = (("ratio", "overlap_k"), ("chunk_size", "boundary_window"))


class Passages:
    """Finds passages; one thread at a time.

    Args:
        llm: the `Llama` that evaluates the prompts.
        store: the store that has the passages.
        options: `ChunkOptions` by name.

    Attributes:
        method: how they are repaired.
        gate: whether passages may be used.

    Raises:
        UnsupportedModelError: rows of this model cannot be moved, or the method needs another cache.
        ValueError: a setting is out of range.
    """

    def __init__(self, llm: Llama, store: KVStore, **options: Any) -> None:
        check_memory(llm)
        self._options = ChunkOptions(**options)
        size, n_ctx = self._options.chunk_size, llm.kv.stats().n_ctx
        if size > n_ctx:
            raise ValueError(f"chunk_size={size}: the context has {n_ctx} tokens")
        self._store = store
        identity = Identity.of(llm)
        check_model(llm, identity, size)
        self.gate = Gate(self._options.max_kld, self._options.check, self._options.seed)
        self.method = self._options.method
        check_method(llm, self.method)
        self._n_ctx, self._sliding_window = n_ctx, identity.sliding_window
        self._unsupported = _unsupported(llm)
        self._ends = TextEnds(llm)
        self._indexes: dict[bytes, DonorIndex] = {}

    def chosen(self, choice: ChunkChoice) -> tuple[ChunkOptions, Method]:
        """Return the settings for a request: its own, with the defaults for those it does not give.

        Raises:
            UnsupportedModelError: this cache cannot serve the repair.
            ValueError: a value is out of range here; the message begins with `chunks.` and the field.
        """
        options, method = self._options, self.method
        given = {name: value for name, value in asdict(choice).items() if value is not None}
        of_method, of_options = ({name: given[name] for name in names if name in given} for names in _CHOICES)
        try:
            if choice.repair is not None and choice.repair != method.repair:
                method = Method(repair=choice.repair)
            method, options = replace(method, **of_method), replace(options, **of_options)
        except ValueError as error:
            raise ValueError(f"chunks.{error}") from None
        if (lack := self._unsupported.get(method.repair)) is not None:
            raise UnsupportedModelError(f"chunks.{lack}")
        least, most = self._options.chunk_size, min(self._n_ctx, self._sliding_window or self._n_ctx)
        if not least <= options.chunk_size <= most:
            raise ValueError(
                f"chunks.chunk_size={options.chunk_size}: use a whole number from {least} to {most}"
            )
        return options, method

    def find(
        self, tokens: Tokens, identity: Identity, n_exact: int, options: ChunkOptions | None = None
    ) -> Rows:
        """Return the passages after the first `n_exact` tokens, which have rows, and after the first chunk;
        none while the gate is closed.
        """
        if self.gate.closed:
            return []
        options = options or self._options
        index, ends = self.refresh(identity), self._ends.of(tokens)
        low, shortest = max(n_exact, _head(ends, options)), SHORTEST_SEGMENT
        if options.chunk_size > self._options.chunk_size:
            shortest = max(shortest, options.chunk_size // 2)
        rows = []
        for segment in find_segments(
            index, tokens, ends, low=low, window=options.boundary_window, shortest=shortest
        ):
            blocks = index.read(segment.source, segment.at, segment.at + len(segment))
            if blocks is not None:
                rows.append((segment, blocks))
        return rows

    def refresh(self, identity: Identity) -> DonorIndex:
        """Index new entries and return all donors."""
        index = self._indexes.pop(identity.digest, None)
        if index is None:
            sizes = {"chunk_size": self._options.chunk_size, "max_donors": self._options.max_donors}
            index = DonorIndex(self._store, identity, **sizes)
            while len(self._indexes) >= _INDEXES:
                del self._indexes[next(iter(self._indexes))]
        self._indexes[identity.digest] = index  # the last one used comes last
        index.refresh()
        return index


def _head(ends: npt.NDArray[np.int8], options: ChunkOptions) -> int:
    """Return how many first tokens are always exact: the sinks, and the first chunk up to the end of a
    sentence.
    """
    size = options.chunk_size
    near = ends[size - 1 : size + options.boundary_window]
    return size + (int(np.argmax(near == near.max())) if near.any() else 0)


def _unsupported(llm: Llama) -> dict[Repair, str]:
    """Return the repairs that this cache cannot serve, and why."""
    errors: dict[Repair, str] = {}
    for repair in REPAIRS:
        try:
            check_method(llm, Method(repair=repair))
        except UnsupportedModelError as error:
            errors[repair] = str(error)
    return errors


def check_memory(llm: Llama) -> None:
    """Refuse a context whose rows cannot be put together.

    Raises:
        UnsupportedModelError: the context keeps more than rows of tokens.
    """
    if not llm.kv.can_cut:
        raise UnsupportedModelError(
            "chunks: recurrent and hybrid models keep a state of the whole sequence, of which no part can be "
            "used elsewhere. Reuse prefixes"
        )


def check_model(llm: Llama, identity: Identity, chunk_size: int) -> None:
    """Refuse a model whose rows cannot be moved.

    Raises:
        UnsupportedModelError: rows of this model, or of this context, cannot be moved.
    """
    window = identity.sliding_window
    if window and window < chunk_size:
        raise UnsupportedModelError(
            f"chunks: the sliding window of {window} tokens is shorter than chunk_size={chunk_size}: its "
            f"layers read little of a chunk from within it. Reuse prefixes, or set a smaller chunk_size"
        )
    if not llm.kv.can_shift:
        raise UnsupportedModelError(
            "chunks: positions cannot be moved here. Sliding-window layers keep the rows of a whole chunk "
            "with swa_full=True; a quantised uniform cache turns whole heads only, use a mixed one or f16"
        )


def check_method(llm: Llama, method: Method) -> None:
    """Refuse a repair method that the context's attention cannot serve.

    Raises:
        UnsupportedModelError: the method needs attention weights, which only the fused attention shows.
    """
    layers = llm.kv.stats(by_layer=True).layers or ()
    if method.repair == "cacheblend" and not all(layer.head_size_v for layer in layers):
        raise UnsupportedModelError(
            "repair='cacheblend' compares values, and latent attention (MLA) stores none: use repair='query' "
            "or repair='seam'"
        )
    fused = all(layer.fused for layer in layers)
    if method.repair in ("query", "cacheblend") and not fused:
        raise UnsupportedModelError(
            f"repair={method.repair!r} watches the fused attention, which this cache does not have "
            f"({llm.kv.config}). Use a mixed cache in CPU memory, or repair='seam'"
        )
