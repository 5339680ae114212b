"""Types that rows of K and V are kept in."""

from __future__ import annotations

from functools import cache

COLD_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "lm4", "tc3", "q5_0", "q5_1")
CPU_TYPES = ("lm4", "tc3")  # that no GPU writes
UNIFORM_TYPES = ("f16", "bf16", "f32", *COLD_TYPES)

_OURS = {
    "lm4": (38, 64, 34),  # the patched ggml's: cpp/attention/lm4.h
    "tc3": (36, 64, 26),  # cpp/attention/tc3.h
}
_REPLACED = {"lm3": "tc3"}  # of earlier versions


@cache
def _sizes() -> dict[str, tuple[int, int, int]]:
    """Return ggml's id of each type, and the elements and bytes of a block. Importing gguf takes a while."""
    import gguf

    return {kind.name.lower(): (int(kind), *size) for kind, size in gguf.GGML_QUANT_SIZES.items()} | _OURS


@cache
def _names() -> dict[int, str]:
    return {ggml_id: name for name, (ggml_id, *_) in _sizes().items()}


def ggml_type(name: str) -> int:
    """Return the ggml type id of a type name, e.g. 8 for "q8_0"."""
    return _sizes()[name][0]


def type_name(ggml_id: int) -> str:
    """Return the name of a ggml type id, e.g. "q8_0" for 8."""
    return _names()[ggml_id]


def type_block(name: str) -> tuple[int, int]:
    """Return the elements and bytes of a block of a type: 32 and 18 for "q4_0", 1 and 2 for "f16"."""
    return _sizes()[name][1:]


def type_bits(name: str) -> float:
    """Return the bits per element, scales included: 16 for "f16", 8.5 for "q8_0", 4.5 for "q4_0"."""
    elements, size = type_block(name)
    return 8 * size / elements


def replacement(name: str) -> str:
    """Return what to say of a type that an earlier version had, and "" for any other name."""
    other = _REPLACED.get(name)
    return f"; {name!r} was taken out, {other!r} replaces it and needs no calibration" if other else ""
