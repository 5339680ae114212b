"""Fills a cache to a depth at once, for measurements of time.

How long attention takes depends on how many rows a query sees and in which types they are, not on what is
in them. So a few tokens are decoded, the state of their sequence is read, its rows are repeated up to the
depth, and the result is restored as a state: "synthetic". A cache whose state has another layout (sliding
window, recurrent) is filled by decoding: "real". docs/bench-schema.md tells the two apart in a row.

Layout: llama_kv_cache::state_write in llama.cpp's src/llama-kv-cache.cpp, and for a mixed cache what
cpp/llama/llama-kv-cache-mixed-state.cpp adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mixedkv.bench.engine import Context
from mixedkv.config import MixedKVConfig, type_bits, type_name

FILLS = ("auto", "synthetic", "real")

_PREFIX = 64  # tokens decoded for their rows
_CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])
_RING_MAGIC, _RING_VERSION = 0x31564B4D, 1

Bytes = npt.NDArray[np.uint8]


class UnknownLayoutError(ValueError):
    """The state is not one of a plain KV cache."""


def make_fill(context: Context, depth: int, how: str = "auto") -> Fill:
    """A way to put `context` at `depth`, again and again. Leaves the context there.

    Raises:
        CannotRunError: the cache cannot be filled that far.
        UnknownLayoutError: a synthetic fill was asked for, and this cache has another layout.
    """
    if depth <= _PREFIX:
        return Fill(context, depth, _decoded(context, depth))
    if how != "real":
        try:
            template = _Template.read(_decoded(context, _PREFIX), context)
            fill = Fill(context, depth, None, template)
            fill.restore()
            return fill
        except UnknownLayoutError:
            if how == "synthetic":
                raise
    return Fill(context, depth, _decoded(context, depth))


@dataclass
class Fill:
    """A state of `depth` tokens, kept or built anew each time."""

    context: Context
    depth: int
    state: Bytes | None
    template: _Template | None = None

    @property
    def kind(self) -> str:
        return "synthetic" if self.template else "real"

    def restore(self) -> None:
        self.context.clear()
        if self.depth:
            state = self.template.build(self.depth) if self.template else self.state
            assert state is not None
            self.context.restore(state, self.depth)


def _decoded(context: Context, n: int) -> Bytes | None:
    context.clear()
    if n == 0:
        return None
    context.feed(context.model.random_tokens(n))
    return context.save()


class _Reader:
    """Takes values off the front of a state."""

    def __init__(self, data: Bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> Bytes:
        if n < 0 or self.at + n > self.data.size:
            raise UnknownLayoutError("the state ends early")
        self.at += n
        return self.data[self.at - n : self.at]

    def value(self, kind: str = "<u4") -> int:
        return int(self.take(np.dtype(kind).itemsize).view(kind)[0])

    def expect(self, value: int) -> None:
        if self.value() != value:
            raise UnknownLayoutError("the state has another layout")


@dataclass
class _Rows:
    """Rows of one layer: bytes before them, and the rows [n_cells, size], transposed for some V."""

    head: Bytes
    rows: Bytes
    transposed: bool = False

    def repeat(self, n: int) -> Bytes:
        again = np.arange(n) % self.rows.shape[0]
        rows = self.rows[again]
        return rows.transpose(1, 0, 2).reshape(-1) if self.transposed else rows.reshape(-1)


@dataclass
class _Template:
    head: Bytes  # magic, sequence, streams
    middle: Bytes  # whether V is transposed, and the number of layers
    layers: list[_Rows] = field(default_factory=list)
    window: MixedKVConfig | None = None
    ring_head: Bytes | None = None
    ring: list[Bytes] = field(default_factory=list)  # per layer K and V, [n_hot, size]

    @classmethod
    def read(cls, state: Bytes | None, context: Context) -> _Template:
        """Take a state apart.

        Raises:
            UnknownLayoutError: its layout is not that of a plain cache of one sequence.
        """
        assert state is not None
        reader = _Reader(state)
        head = reader.take(8)
        reader.expect(1)
        n = context.n_past
        reader.expect(n)
        cells = reader.take(n * _CELL.itemsize).view(_CELL)
        if not (
            (cells["pos"] == range(n)).all() and (cells["n_seq"] == 1).all() and (cells["seq"] == 0).all()
        ):
            raise UnknownLayoutError("its cells are not those of a plain cache")
        start = reader.at
        transposed, n_layer = reader.value(), reader.value()
        if transposed > 1 or not 0 < n_layer < 10_000:
            raise UnknownLayoutError("the state has another layout")
        template = cls(head, state[start : reader.at])
        template.layers = [_read_rows(reader, n) for _ in range(n_layer)]
        read_v = _read_transposed if transposed else _read_rows
        template.layers += [read_v(reader, n) for _ in range(n_layer)]
        if isinstance(context.setting.kv, MixedKVConfig):
            template._read_ring(reader, n, n_layer, context.setting.kv)
        if reader.at != state.size:
            raise UnknownLayoutError("the state holds more than one plain cache")
        return template

    def _read_ring(self, reader: _Reader, n: int, n_layer: int, kv: MixedKVConfig) -> None:
        start = reader.at
        reader.expect(_RING_MAGIC)
        reader.expect(_RING_VERSION)
        reader.expect(n_layer)
        self.ring_head, self.window = reader.data[start : reader.at], kv
        n_hot = reader.value()
        ordinals = reader.take(4 * n_hot).view("<u4")
        if ordinals.tolist() != _hot_positions(kv, n).tolist():
            raise UnknownLayoutError("its F16 rows are not those of the window")
        for rows in _interleave(self.layers[:n_layer], self.layers[n_layer:]):
            size = _f16_size(rows)
            self.ring.append(reader.take(n_hot * size).reshape(n_hot, size))

    def build(self, depth: int) -> Bytes:
        """A state of `depth` tokens."""
        cells = np.zeros(depth, _CELL)
        cells["pos"], cells["n_seq"] = np.arange(depth), 1
        parts = [self.head, _u4(1), _u4(depth), cells.view(np.uint8), self.middle]
        for rows in self.layers:
            parts += [rows.head, rows.repeat(depth)]
        if self.window is not None and self.ring_head is not None:
            hot = _hot_positions(self.window, depth).astype("<u4")
            parts += [self.ring_head, _u4(hot.size), hot.view(np.uint8)]
            for ring in self.ring:
                parts.append(np.resize(ring, (hot.size, ring.shape[1])).reshape(-1))
        return np.concatenate(parts)


def _read_rows(reader: _Reader, n: int) -> _Rows:
    start = reader.at
    reader.value("<i4")
    size = reader.value("<u8")
    head = reader.data[start : reader.at]
    return _Rows(head, reader.take(n * size).reshape(n, size))


def _read_transposed(reader: _Reader, n: int) -> _Rows:
    start = reader.at
    reader.value("<i4")
    element, width = reader.value(), reader.value()
    head = reader.data[start : reader.at]
    rows = reader.take(width * n * element).reshape(width, n, element)
    return _Rows(head, rows.transpose(1, 0, 2), transposed=True)


def _f16_size(rows: _Rows) -> int:
    kind = type_name(int(rows.head[:4].view("<i4")[0]))
    return int(rows.rows.shape[1] * 16 / type_bits(kind))


def _interleave(k: list[_Rows], v: list[_Rows]) -> list[_Rows]:
    return [rows for pair in zip(k, v, strict=True) for rows in pair]


def _hot_positions(kv: MixedKVConfig, n: int) -> npt.NDArray[np.int64]:
    """Positions in F16 after n tokens: cpp/cache/hot_window.h for the query at n - 1."""
    threshold, group = kv.quantization_threshold, kv.group_size
    begin = 0 if n <= threshold else -(-(n - threshold) // group) * group
    positions = np.arange(n)
    return positions[(positions < kv.sink_tokens) | (positions >= begin)]


def _u4(value: int) -> Bytes:
    return np.array([value], "<u4").view(np.uint8)
