"""Chooses which layers of a model stay in memory, and which are read for each pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from mixedkv.errors import UnsupportedModelError
from mixedkv.model.gguf_file import ModelFile, n_layers
from mixedkv.sizes import format_bytes

RING_LAYERS = 3  # in memory at a time: one in use, one there, one on its way
StreamLayers = Literal["auto", "all", "ffn"] | int | Mapping[str, int]

_MATRIX = re.compile(r"blk\.(\d+)\.(.+)\.weight")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of the matrices of each layer, of routed experts, which no layer counts, and of all else:
    embeddings, head, norms, biases."""

    layers: tuple[int, ...]
    rest: int
    matrices: frozenset[str]
    routed: int = 0

    @classmethod
    def of(cls, file: ModelFile, part: str = "") -> LayerSizes:
        """Return the sizes of a model's layers, or of the matrices alone whose names in a layer begin with
        `part`; the others then count as `rest`.

        Raises:
            UnsupportedModelError: the model has no layers, or none with such matrices.
        """
        n_layer = n_layers(file)
        sizes: Counter[int] = Counter()
        names: set[str] = set()
        rest = routed = 0
        for tensor in file.tensors:
            match = _MATRIX.fullmatch(tensor.name)
            if match is not None and int(match[1]) >= n_layer:
                continue  # MTP layers, which are not loaded
            if match is None or len(tensor.shape) < 2 or not match[2].startswith(part):
                rest += tensor.n_bytes
                continue
            if "_exps" in match[2]:
                routed += tensor.n_bytes
                continue
            sizes[int(match[1])] += tensor.n_bytes
            names.add(match[2])
        if not sizes:
            what = f"layers with matrices {part}*" if part else "layers"
            raise UnsupportedModelError(f"{file.path} has no {what} to stream")
        return cls(tuple(sizes[il] for il in range(n_layer)), rest, frozenset(names), routed)

    def pattern(self, streamed: Sequence[int]) -> str:
        """Return a regular expression for the names of these layers' matrices."""
        names = "|".join(re.escape(name) for name in sorted(self.matrices))
        return rf"^blk\.({'|'.join(str(il) for il in streamed)})\.({names})\.weight$"

    def in_memory(self, streamed: Sequence[int]) -> int:
        """Return the number of bytes that weights take: those that stay, and the ring."""
        read = [self.layers[il] for il in streamed]
        ring = min(RING_LAYERS, len(read)) * max(read, default=0)
        return self.rest + sum(self.layers) - sum(read) + ring


def choose_layers(sizes: LayerSizes, requested: StreamLayers, room: int) -> list[int]:
    """Return the layers to stream, ascending.

    Args:
        asked: "auto": as few as `room` allows, spread evenly so that reading goes on while others are
            evaluated, the first and the last layer only if need be; a number of layers, spread likewise;
            {"keep_first": n, "keep_last": n}: all between; or "all", also of sizes of "ffn" alone.
        room: bytes for weights.

    Raises:
        ValueError: what was asked is no such thing, or does not fit into `room`.
    """
    n_layer = len(sizes.layers)
    if requested == "auto":
        for n in range(n_layer + 1):
            if sizes.in_memory(streamed := _spread(n, n_layer)) <= room:
                return streamed
    else:
        streamed = _named(requested, n_layer)
    if (needed := sizes.in_memory(streamed)) > room:
        what = f"the weights that stay in memory, and {RING_LAYERS} layers of those that do not,"
        raise ValueError(no_room(what, needed, room))
    return streamed


def no_room(what: str, needed: int, room: int) -> str:
    """Explain why some weights cannot be in memory."""
    left = max(0, room)
    return (
        f"{what} are {format_bytes(needed, enough=True)}; there is room for {format_bytes(left)}: "
        "raise memory, or lower n_ctx or n_ubatch"
    )


def parse_layers(text: str) -> StreamLayers:
    """Parse "auto", "all", "ffn", "12" or "keep_first=8,keep_last=2", as `Llama` takes it.

    Raises:
        ValueError: it is none of these.
    """
    if text in ("auto", "all", "ffn"):
        return cast(StreamLayers, text)
    if text.isascii() and text.isdigit():
        return int(text)
    pairs = dict(re.findall(r"(keep_first|keep_last)=(\d{1,6})", text))
    if text == ",".join(f"{name}={value}" for name, value in pairs.items()) and pairs:
        return {name: int(value) for name, value in pairs.items()}
    raise ValueError(
        f"{text!r} is not a choice of layers: use auto, all, ffn, a number, or keep_first=8,keep_last=2"
    )


def _named(requested: int | str | Mapping[str, int], n_layer: int) -> list[int]:
    if requested in ("all", "ffn"):
        return list(range(n_layer))
    if isinstance(requested, int) and not isinstance(requested, bool) and 0 <= requested <= n_layer:
        return _spread(requested, n_layer)
    if isinstance(requested, Mapping) and requested.keys() <= {"keep_first", "keep_last"}:
        first, last = requested.get("keep_first", 0), requested.get("keep_last", 0)
        if all(isinstance(n, int) and n >= 0 for n in (first, last)) and first + last <= n_layer:
            return list(range(first, n_layer - last))
    raise ValueError(
        f"stream_layers={requested!r}: use 'auto', 'all', 'ffn', a number up to the model's {n_layer} "
        f"layers, or {{'keep_first': 8, 'keep_last': 2}} with as many at most"
    )


def _spread(n: int, n_layer: int) -> list[int]:
    """Choose `n` of the layers, evenly; the last and the first layer are the last to go."""
    inner = max(0, n_layer - 2)
    if n > inner:
        return list(range(n_layer - n, n_layer))
    return [1 + (2 * i + 1) * inner // (2 * n) for i in range(n)]
