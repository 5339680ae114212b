"""Copies the rows of a block out of a cache and into one."""

from __future__ import annotations

import llama_cpp

from mixedkv import _core
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv import sequence_state
from mixedkv.kv.block import KVBlock
from mixedkv.kv.native_rows import from_native, to_native
from mixedkv.kv.rows import RowGroup
from mixedkv.native import llama_cpp as _llama_cpp


class StateRefusedError(Exception):
    """A checkpoint does not fit, which is found after the rows were loaded."""


def out(llm: llama_cpp.Llama, seq: int, p0: int, p1: int, end: int) -> tuple[RowGroup, ...]:
    """Return the rows at [p0, p1) of a sequence of `end` tokens; none where no layer keeps any.

    Raises:
        LookupError, ValueError, UnsupportedModelError: as `KVCache.export`.
    """
    if _llama_cpp.is_recurrent(llm):
        if not 0 <= p0 < p1 <= end:
            raise LookupError(f"sequence {seq} has no positions [{p0}, {p1})")
        return ()
    address = _llama_cpp.address(_llama_cpp.context(llm))
    groups = tuple(map(from_native, _core.export_rows(address, seq, p0, p1)))
    if not groups:
        raise UnsupportedModelError(
            "rows cannot be exported from the kind of cache that this model has: save its whole state"
        )
    return groups


def into(llm: llama_cpp.Llama, block: KVBlock, seq: int, shift: int, drop_from: int, more: bool) -> None:
    """Put rows, and the checkpoint that serves their end, into a sequence.

    Raises:
        ValueError: as `KVCache.load`; nothing has changed.
        StateRefusedError: the checkpoint cannot be put back.
    """
    has_state = _llama_cpp.is_recurrent(llm) or _llama_cpp.is_hybrid(llm)
    point = None if more or shift else block.checkpoint_at(block.p1)
    if has_state and shift:
        raise ValueError("the state of recurrent layers stays at its positions: load the block where it was")
    if has_state and point is None and not more:
        raise ValueError(
            "the block has no state of the recurrent layers at its end: export it where its sequence ends"
        )
    if block.groups:
        _import(llm, block, seq, shift, drop_from, whole=not more and point is None)
    if point is not None:
        try:
            sequence_state.put(llm, point, seq)
        except ValueError as error:
            raise StateRefusedError(str(error)) from error


def _import(llm: llama_cpp.Llama, block: KVBlock, seq: int, shift: int, drop_from: int, whole: bool) -> None:
    context = _llama_cpp.context(llm)
    address, groups = _llama_cpp.address(context), [to_native(group) for group in block.groups]
    if whole:
        _core.import_rows(address, seq, groups, shift, drop_from)
        return
    memory = llama_cpp.llama_get_memory(context)
    if drop_from >= 0 and not llama_cpp.llama_memory_seq_rm(memory, seq, drop_from, -1):
        raise ValueError(f"the state of recurrent layers is ahead of {drop_from}: remove the sequence first")
    _core.import_part(address, seq, groups)
