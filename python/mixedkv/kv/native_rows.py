"""Groups of rows between `_core` and Python."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from mixedkv import _core
from mixedkv.config.row_types import ggml_type, type_name
from mixedkv.kv.rows import LayerRows, RowGroup


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
