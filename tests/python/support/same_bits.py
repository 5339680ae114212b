"""Where this cache attends, a prompt has the same bits however it is cut and wherever its rows lie."""

from __future__ import annotations

from mixedkv import _core

_ISA = _core.version()["isa"]


def has_same_bits(kv: str) -> bool:
    """Return whether that holds on this processor, of a cache whose attention is ours (docs/decisions/049):
    not on NEON, whose prefill has sums of its own, nor on AMX with 16 bits.
    """
    return _ISA != "neon" and not (_ISA == "amx" and ("q8_0" in kv or "f16" in kv))
