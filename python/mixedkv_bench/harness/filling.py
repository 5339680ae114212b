"""Fills a cache to a depth at once, for measurements of time.

How long attention takes depends on how many rows a query sees and in which types they are, not on what is
in them. So a few tokens are decoded, the state of their sequence is read, its rows are repeated up to the
depth, and the result is restored as a state: "synthetic". The F16 window of a mixed cache is then filled by
decoding as many tokens as it holds. A cache whose state has another layout (sliding window, recurrent) is
filled by decoding all of them: "real". docs/bench-schema.md tells them apart in a row.

Made-up rows have no structure: a query attends to all of them alike. "peaked" is "synthetic" with keys that
are ten times as large in every tenth run of 64 cells and a twentieth as large elsewhere, so that a tenth of
the cache holds the attention.

Layout: llama_kv_cache::state_write in llama.cpp's src/llama-kv-cache.cpp, and for a mixed cache what
cpp/llama/cache/mixed-state.cpp adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mixedkv_bench.harness.contexts import CannotRunError, Context

FILLS = ("auto", "synthetic", "real", "peaked")

_PREFIX = 64  # tokens decoded for their rows
_RUN, _EVERY, _LARGE, _SMALL = 64, 10, 10.0, 0.05  # of peaked keys
_BLOCKS = {"f16": 2, "q4_0": 18, "q8_0": 34}  # bytes of a block, which begins with its scale, of 2
_CELL = np.dtype([("pos", "<i4"), ("n_seq", "<u4"), ("seq", "<i4")])
_RING_MAGIC = 0x31564B4D
_RING_HEAD = 12  # magic, version, layers; then each layer's scales of K, and how many F16 rows

Bytes = npt.NDArray[np.uint8]


class UnknownLayoutError(ValueError):
    """The state is not one of a plain KV cache."""


def make_fill(context: Context, depth: int, how: str = "auto") -> Fill:
    """Return a way to put `context` at `depth`, again and again. Leaves the context somewhere.

    Raises:
        CannotRunError: the cache cannot be filled that far.
        UnknownLayoutError: a synthetic fill was asked for, and this cache has another layout.
    """
    window = context.setting.window or 0
    if how != "real" and depth - window > _PREFIX:
        try:
            return _synthetic(context, depth, window, how == "peaked")
        except UnknownLayoutError:
            if how != "auto":
                raise
    return Fill(context, depth, _decoded(context, depth))


@dataclass
class Fill:
    """A state of `depth` tokens, kept or built anew each time."""

    context: Context
    depth: int
    state: Bytes | None
    template: _Template | None = None
    kind: str = "real"

    def restore(self) -> None:
        """Restore the saved state into every sequence of the context."""
        self.context.clear()
        if self.depth:
            state = self.template.build(self.depth) if self.template else self.state
            assert state is not None
            for seq in range(self.context.n_seq):
                self.context.restore(state, self.depth, seq)


def _synthetic(context: Context, depth: int, window: int, peaked: bool) -> Fill:
    template = _Template.read(_decoded(context, _PREFIX), context)
    if peaked:
        template.type_k = context.setting.kv.type_k
        if template.type_k not in _BLOCKS:
            raise CannotRunError(f"keys in {template.type_k} cannot be peaked: only {', '.join(_BLOCKS)}")
    kind = "peaked" if peaked else "synthetic"
    fill = Fill(context, depth - window, None, template, kind)
    try:
        fill.restore()
    except CannotRunError as error:
        raise UnknownLayoutError(str(error)) from None
    if window == 0:
        return fill  # the rows are many: they are repeated at each restore rather than kept
    context.feed(context.model.random_tokens(window))
    return Fill(context, depth, context.save(), kind=kind)


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
        flat: Bytes = (rows.transpose(1, 0, 2) if self.transposed else rows).reshape(-1)
        return flat


@dataclass
class _Template:
    head: Bytes  # magic, sequence, streams
    middle: Bytes  # whether V is transposed, and the number of layers
    layers: list[_Rows] = field(default_factory=list)
    tail: Bytes | None = None  # of a mixed cache: that it has no F16 rows
    type_k: str = ""  # of keys that are to be peaked

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
        if context.setting.window is not None:
            ring = reader.take(_RING_HEAD + 4 * n_layer)
            if ring[:4].view("<u4")[0] != _RING_MAGIC:
                raise UnknownLayoutError("its F16 rows have another layout")
            template.tail = np.concatenate([ring, _u4(0)])
        elif reader.at != state.size:
            raise UnknownLayoutError("the state holds more than one plain cache")
        return template

    def build(self, depth: int) -> Bytes:
        """Return a state of `depth` tokens."""
        cells = np.zeros(depth, _CELL)
        cells["pos"], cells["n_seq"] = np.arange(depth), 1
        parts = [self.head, _u4(1), _u4(depth), cells.view(np.uint8), self.middle]
        for i, rows in enumerate(self.layers):
            is_k = i < len(self.layers) // 2
            parts += [rows.head, self._peaked(rows.repeat(depth), depth) if is_k else rows.repeat(depth)]
        if self.tail is not None:
            parts.append(self.tail)
        return np.concatenate(parts)

    def _peaked(self, keys: Bytes, depth: int) -> Bytes:
        """Return keys of two sizes, by the scales of their blocks."""
        if self.type_k:
            blocks = keys.reshape(depth, -1, _BLOCKS[self.type_k])
            scales = blocks[:, :, :2].copy().view(np.float16)
            large = np.arange(depth) // _RUN % _EVERY == 0
            scales *= np.where(large, _LARGE, _SMALL).astype(np.float16)[:, None, None]
            blocks[:, :, :2] = scales.view(np.uint8)
        return keys


def _read_rows(reader: _Reader, n: int) -> _Rows:
    """Read K or V of one layer: its type, the bytes of a row, and the rows of `n` cells one after another."""
    start = reader.at
    reader.value("<i4")
    size = reader.value("<u8")
    head = reader.data[start : reader.at]
    return _Rows(head, reader.take(n * size).reshape(n, size))


def _read_transposed(reader: _Reader, n: int) -> _Rows:
    """Read V of one layer that is stored by element: its type, the bytes of an element, the elements of a
    row, and for each of these the values of `n` cells.
    """
    start = reader.at
    reader.value("<i4")
    element, width = reader.value(), reader.value()
    head = reader.data[start : reader.at]
    rows = reader.take(width * n * element).reshape(width, n, element)
    return _Rows(head, rows.transpose(1, 0, 2), transposed=True)


def _u4(value: int) -> Bytes:
    return np.array([value], "<u4").view(np.uint8)
