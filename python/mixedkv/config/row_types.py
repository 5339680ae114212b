"""Types that rows of K and V are kept in."""

from __future__ import annotations

from mixedkv import _core

COLD_TYPES = _core.COLD_TYPES
OWN_TYPES = ("lm4", "tc3")  # that CPUs and CUDA write, and no other GPU
UNIFORM_TYPES = _core.UNIFORM_TYPES

_TYPES = _core.row_types()
_NAMES = {ggml_id: name for name, (ggml_id, *_) in _TYPES.items()}


def ggml_type(name: str) -> int:
    """Return the ggml type id of a type name, e.g. 8 for "q8_0"."""
    return _TYPES[name][0]


def type_name(ggml_id: int) -> str:
    """Return the name of a ggml type id, e.g. "q8_0" for 8, or its digits if no cache has such rows."""
    return _NAMES.get(ggml_id, str(ggml_id))


def type_block(name: str) -> tuple[int, int]:
    """Return the elements and bytes of a block of a type: 32 and 18 for "q4_0", 1 and 2 for "f16"."""
    return _TYPES[name][1:]


def type_bits(name: str) -> float:
    """Return the bits per element, scales included: 16 for "f16", 8.5 for "q8_0", 4.5 for "q4_0"."""
    elements, size = type_block(name)
    return 8 * size / elements
