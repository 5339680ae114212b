"""Rows of layers as a cache stores them, what each is worth, and their description from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config.mixed import UNIFORM_TYPES, ggml_type, type_block, type_name
from mixedkv.limits import INT32_MAX, check_int

_SIZE_MAX = 2**20  # heads, head sizes and layers above this are not a model's
_TEXT_MAX = 2**16


def row_bytes(kind: str, n: int) -> int:
    """Return the number of bytes of a row of `n` elements of a ggml type; ValueError if its blocks do not
    divide the row.
    """
    block, size = type_block(kind)
    if n % block:
        raise ValueError(f"rows of {n} elements do not fit {kind}, which packs {block}")
    return n // block * size


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """One layer's rows, in order of position.

    Args:
        il: index of the layer in the model.
        type_k, type_v: ggml types of `k` and `v`, e.g. "q4_0".
        rotation_k, rotation_v: edge of the Hadamard blocks that K and V are rotated by; 0: they are not.
        n_head_kv, head_size_k, head_size_v: of the layer; a row holds all its KV heads.
        equalization: tells apart the scales that K was stored times; 0: K is as the model computes it.
        k, v: rows as the cache stores them, uint8 [n_rows, bytes of a row]. Where a layer stores no values
            (MLA) head_size_v is 0.
        k_hot, v_hot: F16 copies of the rows that attention read in F16, [n_hot, n_head_kv * head size].
    """

    il: int
    type_k: str
    type_v: str
    rotation_k: int
    rotation_v: int
    n_head_kv: int
    head_size_k: int
    head_size_v: int
    k: npt.NDArray[np.uint8]
    v: npt.NDArray[np.uint8]
    k_hot: npt.NDArray[np.float16]
    v_hot: npt.NDArray[np.float16]
    equalization: int = 0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in _LAYER_ARRAYS}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Layers that hold the same positions: all of them, or those with a sliding window and those without.

    Args:
        positions: int32 [n_rows], ascending; with `xy` several rows may share one.
        hot: which of the rows have an F16 copy, int32 [n_hot], ascending.
        slots: where in the F16 ring each of these lay, int32 [n_hot]. Attention sums in this order.
        layers: their rows.
        xy: the other parts of M-RoPE positions, int32 [n_rows, 2]: a token's column and row in an image,
            counted on from its position; for text the position itself. None for other models.
    """

    positions: npt.NDArray[np.int32]
    hot: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    layers: tuple[LayerRows, ...]
    xy: npt.NDArray[np.int32] | None = None

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {name: getattr(self, name) for name in _GROUP_ARRAYS}
        return arrays if self.xy is None else {**arrays, "xy": self.xy}

    @property
    def ends(self) -> npt.NDArray[np.int32]:
        """The position behind what each row covers, int32 [n_rows]: behind an image's last column or row goes
        text.
        """
        last = self.positions
        if self.xy is not None:
            last = np.maximum(last, self.xy.max(axis=1, initial=-1))
        return (last + 1).astype(np.int32)

    def named(self, prefix: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Yield the arrays of the group and its layers by name."""
        yield from ((prefix + name, array) for name, array in self.arrays().items())
        for layer in self.layers:
            yield from ((f"{prefix}{layer.il}.{name}", array) for name, array in layer.arrays().items())


_LAYER_ARRAYS = ("k", "v", "k_hot", "v_hot")
_GROUP_ARRAYS = ("positions", "hot", "slots")
_LAYER_FIELDS = tuple(field.name for field in fields(LayerRows) if field.name not in _LAYER_ARRAYS)


def _describe_layer(layer: LayerRows) -> dict[str, Any]:
    values = {name: getattr(layer, name) for name in _LAYER_FIELDS}
    return values if layer.equalization else {name: values[name] for name in values if name != "equalization"}


def describe_group(group: RowGroup) -> dict[str, Any]:
    """Describe all but the arrays, as JSON can hold it."""
    return {"layers": [_describe_layer(layer) for layer in group.layers]}


def pick_rows(group: RowGroup, rows: Any, copies: Any) -> RowGroup:
    """Return some rows of a group and some of its F16 copies, whose rows are among them.

    Args:
        rows, copies: slices (for views) or ascending indexes, of the rows and of the copies.
    """
    layers = tuple(
        replace(layer, k=layer.k[rows], v=layer.v[rows], k_hot=layer.k_hot[copies], v_hot=layer.v_hot[copies])
        for layer in group.layers
    )
    at = np.arange(len(group.positions))[rows]
    return RowGroup(
        positions=group.positions[rows],
        hot=np.searchsorted(at, group.hot[copies]).astype(np.int32),
        slots=group.slots[copies],
        layers=layers,
        xy=None if group.xy is None else group.xy[rows],
    )


def slice_group(group: RowGroup, p0: int, p1: int) -> RowGroup:
    """Return the rows at positions [p0, p1), as views."""
    begin, end = np.searchsorted(group.positions, [p0, p1])
    return pick_rows(group, slice(begin, end), slice(*np.searchsorted(group.hot, [begin, end])))


def read_group(
    prefix: str, description: Any, arrays: dict[str, npt.NDArray[Any]], p0: int, p1: int
) -> RowGroup:
    positions = take(arrays, prefix + "positions", np.int32, (None,))
    hot = take(arrays, prefix + "hot", np.int32, (None,))
    slots = take(arrays, prefix + "slots", np.int32, (len(hot),))
    xy = take(arrays, prefix + "xy", np.int32, (len(positions), 2)) if prefix + "xy" in arrays else None
    _check_ascending(prefix + "positions", positions, p0, p1, step=1 if xy is None else 0)
    if xy is not None and xy.size and not 0 <= xy.min() <= xy.max() < INT32_MAX:
        raise ValueError(f"{prefix}xy: a part of a position is out of range")
    _check_ascending(prefix + "hot", hot, 0, len(positions))
    if len(slots) and (slots.min() < 0 or len(np.unique(slots)) != len(slots)):
        raise ValueError(f"{prefix}slots: each row needs a slot of its own, from 0")
    layers = tuple(
        _read_layer(prefix, layer, arrays, len(positions), len(hot))
        for layer in take_list(description, "layers", at_least=1)
    )
    return RowGroup(positions=positions, hot=hot, slots=slots, layers=layers, xy=xy)


def _read_layer(
    prefix: str, description: Any, arrays: dict[str, npt.NDArray[Any]], n_rows: int, n_hot: int
) -> LayerRows:
    _check_mapping("layer", description)
    il = take_int(description, "il", 0, _SIZE_MAX)
    n_head_kv = take_int(description, "n_head_kv", 1, _SIZE_MAX)
    equalization = take_int({"equalization": 0, **description}, "equalization", 0, 2**32 - 1)
    values: dict[str, Any] = {"il": il, "n_head_kv": n_head_kv, "equalization": equalization}
    for which in ("k", "v"):
        head_size = take_int(description, f"head_size_{which}", 1 if which == "k" else 0, _SIZE_MAX)
        kind = description.get(f"type_{which}")
        if not isinstance(kind, str) or kind not in UNIFORM_TYPES:
            known = ", ".join(UNIFORM_TYPES)
            raise ValueError(
                f"layer {il}: type_{which}={kind!r} is not one of {known}: evaluate its tokens anew"
            )
        n = n_head_kv * head_size
        rotation = take_int(description, f"rotation_{which}", 0, _SIZE_MAX)
        if rotation and (rotation & (rotation - 1) or n % rotation):
            raise ValueError(f"layer {il}: rotation_{which}={rotation} is not a power of 2 that divides {n}")
        name = f"{prefix}{il}.{which}"
        values |= {
            f"head_size_{which}": head_size,
            f"type_{which}": kind,
            f"rotation_{which}": rotation,
            which: take(arrays, name, np.uint8, (n_rows, row_bytes(kind, n))),
            f"{which}_hot": take(arrays, name + "_hot", np.float16, (n_hot, n)),
        }
    return LayerRows(**values)


def take(
    arrays: dict[str, npt.NDArray[Any]], name: str, dtype: Any, shape: tuple[int | None, ...]
) -> npt.NDArray[Any]:
    array = arrays.pop(name, None)
    if array is None:
        raise ValueError(f"array {name!r} is missing")
    if array.dtype != dtype or array.ndim != len(shape):
        raise ValueError(f"array {name!r} is {array.dtype} of {array.ndim} dimensions, not {np.dtype(dtype)}")
    if any(want is not None and have != want for have, want in zip(array.shape, shape, strict=True)):
        raise ValueError(f"array {name!r} has the shape {array.shape}, not {shape}")
    return array


def _check_ascending(name: str, values: npt.NDArray[np.int32], low: int, high: int, step: int = 1) -> None:
    """Check that an array ascends by at least `step` and lies within [low, high)."""
    if len(values) and (
        values[0] < low or values[-1] >= high or (np.diff(values.astype(np.int64)) < step).any()
    ):
        raise ValueError(f"array {name!r} must ascend, with values in [{low}, {high})")


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: not an object")


def take_int(description: Any, field: str, low: int, high: int) -> int:
    _check_mapping(field, description)
    try:
        return check_int(field, description.get(field), low, high)
    except TypeError as error:  # from outside: what is described is damaged
        raise ValueError(str(error)) from None


def take_list(description: Any, field: str, at_least: int) -> list[Any]:
    _check_mapping(field, description)
    value = description.get(field)
    if not isinstance(value, list) or not at_least <= len(value) <= _SIZE_MAX:
        raise ValueError(f"{field}: a list of at least {at_least} is missing")
    return value


def read_setting(description: Mapping[str, Any]) -> str:
    """Return the setting that a description names; "" where it is not known.

    Raises:
        ValueError: it is missing, or no such text.
    """
    setting = description.get("setting")
    if not isinstance(setting, str) or len(setting) > _TEXT_MAX or not setting.isprintable():
        raise ValueError(f"setting: it is no line of text of up to {_TEXT_MAX} characters")
    if setting and not all("=" in part for part in setting.split(" ")):
        raise ValueError("setting: it is no line of parts as 'window=64/16/4'")
    return setting


NAMES = ("computed", "approximate", "incomplete", "foreign", "doubted")
COMPUTED, APPROXIMATE, INCOMPLETE, FOREIGN, UNVERIFIED = range(5)

Validities = npt.NDArray[np.uint8]


def extend_past(past: int, tokens: npt.NDArray[np.int32]) -> int:
    """Return the hash of what rows behind `tokens` are computed from."""
    return _core.extend_past(past, tokens)


def all_of(n: int, validity: int) -> Validities:
    return np.full(n, validity, np.uint8)


def runs(validity: Validities) -> list[tuple[int, int, int]]:
    """Return what rows are in runs (validity, begin, end), ascending."""
    ends = [*(np.flatnonzero(np.diff(validity)) + 1).tolist(), len(validity)]
    return [(int(validity[begin]), begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def describe_validity(validity: Validities) -> list[list[Any]]:
    """Describe what rows are, as JSON can hold it: `[["computed", 120], ["approximate", 80]]`."""
    return [[NAMES[kind], end - begin] for kind, begin, end in runs(validity)]


def read_validity(value: object, n: int) -> Validities:
    """Return what `describe_validity` was called on, of `n` rows.

    Raises:
        ValueError: it is something else.
    """
    parts: list[Any] = value if isinstance(value, list) else [None]
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2 and part[0] in NAMES and type(part[1]) is int):
            raise ValueError(f"truth: {str(part)[:64]} is not one of {', '.join(NAMES)} and a number of rows")
    kinds, counts = [NAMES.index(part[0]) for part in parts], [part[1] for part in parts]
    if min(counts, default=0) < 1 or sum(counts) != n:
        raise ValueError(f"truth: it is not of {n} rows")
    return np.repeat(np.array(kinds, np.uint8), counts)


def from_native(group: _core.RowGroup) -> RowGroup:
    """Return a group as `_core` exports it."""
    layers = []
    for layer in group["layers"]:
        names = {"type_k": type_name(layer["type_k"]), "type_v": type_name(layer["type_v"])}
        values: dict[str, Any] = {**layer, **names}
        layers.append(LayerRows(**values))
    arrays: dict[str, Any] = {**group, "layers": tuple(layers)}
    return RowGroup(**arrays)


def to_native(group: RowGroup) -> dict[str, Any]:
    """Return a group as `_core` imports it."""
    layers = []
    for layer in group.layers:
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        values |= {"type_k": ggml_type(layer.type_k), "type_v": ggml_type(layer.type_v)}
        layers.append({name: _packed(value) for name, value in values.items()})
    arrays = {name: _packed(array) for name, array in group.arrays().items()}
    return {**arrays, "layers": layers}


def _packed(value: Any) -> Any:
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value
