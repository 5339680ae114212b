"""Contents of a KV cache at one moment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from mixedkv.config.mixed import type_name
from mixedkv.sizes import format_bytes

if TYPE_CHECKING:
    from mixedkv import _core

_F16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStats:
    """One layer of the cache. Bytes are what is allocated."""

    il: int
    mixed: bool
    fused: bool
    on_device: bool
    in_place: bool
    n_head_kv: int
    head_size_k: int
    head_size_v: int
    n_cells: int
    type_k: str
    type_v: str
    equalization: int  # tells scales of K apart, 0: none
    bytes_cold: int
    bytes_hot: int

    @classmethod
    def of(cls, layer: _core.Layer) -> LayerStats:
        """Make the stats from what the context reports."""
        types = {"type_k": type_name(layer["type_k"]), "type_v": type_name(layer["type_v"])}
        sizes = {"head_size_k": layer["n_embd_head_k"], "head_size_v": layer["n_embd_head_v"]}
        values: dict[str, Any] = {**layer, **types, **sizes}
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def __str__(self) -> str:
        heads = f"{self.n_head_kv} heads of {self.head_size_k}"
        if self.head_size_v != self.head_size_k:
            heads += f"/{self.head_size_v}"
        types = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        hot = f" + F16 {format_bytes(self.bytes_hot)}" if self.mixed else ""
        scales = ", equalised" if self.equalization else ""
        cold = f"{types} {format_bytes(self.bytes_cold)}"
        return f"layer {self.il:<3} {heads:<16} {cold}{hot}, {self.attention}{scales}"

    @property
    def attention(self) -> str:
        """Names who reads the rows: "fused", "fused (cuda)", "in place (vulkan)", "merged" or "llama.cpp"."""
        if self.in_place:
            return "in place (vulkan)"
        if self.fused:
            return "fused (cuda)" if self.on_device else "fused"
        return "merged" if self.mixed else "llama.cpp"


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceStats:
    """One sequence, as the query at its last position sees it; positions are -1 when it is empty.

    `hot_begin` is the first position of the recent window. `n_hot` rows are read in F16, sinks included,
    `n_cold` in the cold type. `short_from` is the first position that was evaluated without an F16 row of
    its window, -1 if there is none.
    """

    seq_id: int
    pos_min: int
    pos_max: int
    hot_begin: int
    n_hot: int
    n_cold: int
    short_from: int

    def __str__(self) -> str:
        tiers = f"{self.n_hot} hot, {self.n_cold} cold"
        if self.short_from >= 0:
            tiers += f", window not whole at {self.short_from}"
        return f"seq {self.seq_id:<5} positions {self.pos_min} to {self.pos_max}, {tiers}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStats:
    """A snapshot of a cache. Bytes are what is allocated, tokens are what is in it now.

    Attributes:
        kv: the setting, as a spec.
        n_ctx: tokens that fit each of the `n_seq_max` sequences.
        n_layer: layers with a KV cache.
        quantization_threshold: the window as set.
        threshold_capacity: the most that it can be set to without allocating F16 rows.
        tokens_hot, tokens_cold: tokens that hold an F16 row, and those that do not.
        hot_budget: F16 rows that all sequences share.
        hot_shared: they are fewer than a window for every sequence.
        hot_evicted: F16 rows that made room for others before their window had let go of them.
        pages_read: share of the pages of older keys that decoding so far has read, by query, layer with pages
            and KV head (`sparse`); 1 where it reads all.
        bytes_total: from llama.cpp's own memory breakdown; the cold and the hot rows are parts of it, and
            `bytes_view`, which a merged layer takes of the compute buffers for its F16 view of all rows.
        bytes_given_back: beside the hot rows, what the system has back while windows are shorter.
        bytes_compute: all compute buffers of the context, the view among them.
        n_elements: K and V elements of all cells, what `bits_per_element` divides by.
        bits_problem: why an exact answer may have other bits when its prompt is evaluated in other steps,
            lies in other cells or beside others, the first reason. Empty: it has the same, see `same_bits`.
        layers: one entry per layer, or None if not asked for.
    """

    kv: str
    mixed: bool
    n_ctx: int
    n_seq_max: int
    n_layer: int
    quantization_threshold: int
    threshold_capacity: int
    group_size: int
    sink_tokens: int
    tokens_hot: int
    tokens_cold: int
    hot_budget: int
    hot_shared: bool
    hot_evicted: int
    pages_read: float
    bytes_total: int
    bytes_cold: int
    bytes_hot: int
    bytes_given_back: int
    bytes_view: int
    bytes_compute: int
    n_elements: int
    bits_problem: str
    sequences: tuple[SequenceStats, ...]
    layers: tuple[LayerStats, ...] | None

    @classmethod
    def of(
        cls,
        kv: str,
        now: _core.Stats,
        bits_problem: str,
        sequences: tuple[SequenceStats, ...],
        layers: tuple[LayerStats, ...] | None,
    ) -> KVStats:
        """Make the stats from what the context reports."""
        numbers: dict[str, Any] = {**now}
        named = {name: numbers[_NATIVE_NAMES.get(name, name)] for name in _NUMBERS}
        named["tokens_cold"] -= named["tokens_hot"]
        read = now["n_pages_read"] / now["n_pages"] if now["n_pages"] else 1.0
        named |= {"kv": kv, "pages_read": read, "bits_problem": bits_problem}
        return cls(sequences=sequences, layers=layers, **named)

    @classmethod
    def without_rows(cls, n_ctx: int, n_seq_max: int, by_layer: bool) -> KVStats:
        """Return the stats of a context whose layers all keep a state instead."""
        numbers: dict[str, Any] = {field.name: 0 for field in fields(cls)}
        numbers |= {"kv": "none", "mixed": False, "n_ctx": n_ctx, "n_seq_max": n_seq_max, "sequences": ()}
        numbers |= {"pages_read": 1.0, "bits_problem": "layers that keep a state are llama.cpp's"}
        return cls(**{**numbers, "layers": () if by_layer else None})

    @property
    def tokens(self) -> int:
        """Number of tokens that the cache holds, hot and cold."""
        return self.tokens_hot + self.tokens_cold

    @property
    def bits_per_element(self) -> float:
        """Allocated bits per K or V element; 16 for an F16 cache."""
        return 8 * self.bytes_total / self.n_elements if self.n_elements else 0.0

    @property
    def same_bits(self) -> bool:
        """True if an exact answer has the bits of a fresh context's, however its prompt was cut and whatever
        else is in the cache. It depends on the processor, the types of the rows and those of the weights.
        """
        return not self.bits_problem

    @property
    def bytes_f16(self) -> int:
        """Bytes that llama.cpp's F16 cache of the same size takes."""
        return _F16_BYTES * self.n_elements

    @property
    def saving(self) -> float:
        """Share of `bytes_f16` that is not taken: 0.7 when 30% are."""
        return 1 - self.bytes_total / self.bytes_f16 if self.n_elements else 0.0

    def __str__(self) -> str:
        lines = [
            f"cache     {self.kv}, {self.n_layer} layers, {self.n_ctx} tokens"
            + (f" x {self.n_seq_max} sequences" if self.n_seq_max > 1 else ""),
            f"tokens    {self._tokens_text()}",
            f"bytes     {self._bytes_text()}",
            f"bits      {self.bits_per_element:.2f} per element, {format_saving(self.saving)}",
            *wrap(f"answers   {self._answers_text()}", 80, subsequent_indent=" " * 10),
        ]
        filled = (sequence for sequence in self.sequences if sequence.pos_max >= 0)
        return "\n".join([*lines, *map(str, filled), *map(str, self.layers or ())])

    def _answers_text(self) -> str:
        if self.same_bits:
            return "the same bits for any cut of a prompt"
        return f"other bits for other cuts of a prompt: {self.bits_problem}"

    def _tokens_text(self) -> str:
        if not self.mixed:
            return str(self.tokens)
        window = f"window {self.quantization_threshold}, group {self.group_size}, sinks {self.sink_tokens}"
        if self.hot_shared:
            window += f", room for {self.hot_budget} F16 tokens, {self.hot_evicted} made room"
        return f"{self.tokens} = {self.tokens_hot} hot + {self.tokens_cold} cold ({window})"

    def _bytes_text(self) -> str:
        total = format_bytes(self.bytes_total)
        if not self.mixed:
            return total
        view = f" + {format_bytes(self.bytes_view)} merged view" if self.bytes_view else ""
        back = f" ({format_bytes(self.bytes_given_back)} given back)" if self.bytes_given_back else ""
        return (
            f"{total} = {format_bytes(self.bytes_hot)} hot{back} + {format_bytes(self.bytes_cold)} cold{view}"
        )


_NUMBERS = tuple(
    field.name
    for field in fields(KVStats)
    if field.name not in ("kv", "pages_read", "bits_problem", "sequences", "layers")
)
_NATIVE_NAMES = {  # where the library calls them otherwise
    "n_ctx": "n_ctx_seq",
    "quantization_threshold": "threshold",
    "tokens_hot": "n_cells_hot",
    "tokens_cold": "n_cells_used",  # all, see `KVStats.of`
    "hot_budget": "hot_slots",
    "hot_evicted": "n_evicted",
}


def format_saving(saving: float) -> str:
    """Format a share of F16's bytes to read: "71% below F16"."""
    return f"{abs(saving):.0%} {'below' if saving >= 0 else 'above'} F16"
