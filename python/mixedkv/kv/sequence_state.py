"""Copies the rows of a block out of a cache and into one, and saves and restores what a sequence has besides
rows of all its tokens: see `Checkpoint`.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import KVSetting
from mixedkv.config.cut_rule import CutRule
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.block import KVBlock
from mixedkv.kv.checkpoint import Checkpoint, joined, only_hot
from mixedkv.kv.rows import RowGroup, from_native, to_native
from mixedkv.native import llama_cpp as _llama_cpp

_STATE_ONLY = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_HEAD = struct.Struct("<IiIiI")  # magic, sequence, cells, position, sequences of the cell


class Cut(NamedTuple):
    """Holds where a sequence can be cut at most, up to some number of tokens, as its cells and states are.

    Args:
        n: so that the next token finds all that it reads in every layer; 0 where it must begin anew.
        full: the same of layers that keep all rows.
        window: of layers with a sliding window.
        state: of recurrent layers.
        hot: the next token finds every row of its window in F16 where the cut was asked for.
    """

    n: int
    full: int
    window: int
    state: int
    hot: bool


def find_cut(llm: llama_cpp.Llama, seq: int, n: int) -> Cut:
    """Ask the cache where a sequence can be cut, at `n` tokens or before."""
    return Cut(*_core.find_cut(_address(llm), seq, n))


def cut_rule(llm: llama_cpp.Llama, setting: KVSetting) -> CutRule:
    """Return where sequences of this model and cache can be cut.

    Args:
        setting: of the cache, with its window as it is now.
    """
    recurrent = _llama_cpp.is_recurrent(llm) or _llama_cpp.is_hybrid(llm)
    n_swa = sliding_window(llm)
    rows = setting.window
    # without drafts: a sequence that was resumed has the rows of its window only
    window = _core.HotWindow(rows.threshold, rows.group_size, rows.sink_tokens)
    sliding = 0 if llm.context_params.swa_full else n_swa
    return CutRule(window=window, sliding=sliding, recurrent=recurrent, slides=n_swa > 0)


def sliding_window(llm: llama_cpp.Llama) -> int:
    """Return the number of tokens that layers with a sliding window see, 0 if there are none."""
    if int(llama_cpp.llama_model_n_swa(_llama_cpp.model(llm))) <= 0:
        return 0
    return max((layer["n_swa"] for layer in _layers(llm)), default=0)


def take(llm: llama_cpp.Llama, rule: CutRule, seq: int) -> Checkpoint | None:
    n = int(llama_cpp.llama_memory_seq_pos_max(_memory(llm), seq)) + 1
    if n == 0 or rule.anywhere or not holds(llm, seq, n):
        return None
    try:
        groups = _groups(llm, rule, seq, n)
    except UnsupportedModelError:  # its rows are not taken out
        return None
    state = _state(llm, seq) if rule.recurrent else np.empty(0, np.uint8)
    before = find_cut(llm, seq, n - 1)
    first = rule.saved_from(n) if before.window == n - 1 and before.hot else n
    return Checkpoint(n=n, first=first, groups=groups, state=state)


def resume(llm: llama_cpp.Llama, point: Checkpoint, n: int, source: int, target: int) -> None:
    """Restore a checkpoint into a sequence.

    Raises:
        ValueError: as `KVCache.resume`.
    """
    if not point.serves(n):
        raise ValueError(f"n={n}: this checkpoint serves {point.first} to {point.n} tokens")
    memory = _memory(llm)
    if source != target:
        llama_cpp.llama_memory_seq_rm(memory, target, -1, -1)
        llama_cpp.llama_memory_seq_cp(memory, source, target, 0, n)
    put(llm, point.cut(n), target)
    if find_cut(llm, target, n).n < n:
        raise ValueError(f"rows of the first {n} tokens are missing: evaluate them again")


def put(llm: llama_cpp.Llama, point: Checkpoint, seq: int) -> None:
    """Restore a checkpoint into a sequence with rows of at least `point.n` tokens; later rows are removed.

    Raises:
        ValueError: it does not fit this model, or there is no room.
    """
    if len(point.state):  # first: a state that is ahead of the cut could not be cut
        _put_state(llm, point, seq)
    elif _llama_cpp.is_recurrent(llm) or _llama_cpp.is_hybrid(llm):
        raise ValueError("the checkpoint has no state of recurrent layers, which this model has")
    llama_cpp.llama_memory_seq_rm(_memory(llm), seq, point.n, -1)
    if point.groups:
        _core.restore_window(_address(llm), seq, [to_native(group) for group in point.groups])


def holds(llm: llama_cpp.Llama, seq: int, n: int) -> bool:
    """Return whether the sequence, cut at n tokens, has all that the token there reads as it was
    evaluated.
    """
    cut = find_cut(llm, seq, n)
    return cut.n == n and cut.hot


def _groups(llm: llama_cpp.Llama, rule: CutRule, seq: int, n: int) -> tuple[RowGroup, ...]:
    """Return the rows with F16 copies; of sliding-window layers all that the token at n - 1 has seen."""
    layers, window = _layers(llm), rule.window
    if not layers or not (window.threshold or window.sink_tokens or rule.sliding):
        return ()
    address, sinks = _address(llm), min(window.sink_tokens, n)
    begin = min(window.begin(n - 1), n - rule.sliding if rule.sliding else n)
    begin = max(0, min(begin, n - 1))
    slides = {layer["group"]: layer["n_swa"] > 0 and rule.sliding > 0 for layer in layers}
    groups = _rows(address, seq, begin, n)
    if 0 < sinks <= begin:
        groups = [joined(a, b) for a, b in zip(_rows(address, seq, 0, sinks), groups, strict=True)]
    return tuple(group if slides[i] else only_hot(group) for i, group in enumerate(groups))


def _rows(address: int, seq: int, p0: int, p1: int) -> list[RowGroup]:
    return [from_native(group) for group in _core.export_rows(address, seq, p0, p1)]


def _state(llm: llama_cpp.Llama, seq: int) -> npt.NDArray[np.uint8]:
    context = _llama_cpp.context(llm)
    size = int(llama_cpp.llama_state_seq_get_size_ext(context, seq, _STATE_ONLY))
    state = np.empty(size, np.uint8)
    if int(llama_cpp.llama_state_seq_get_data_ext(context, _pointer(state), size, seq, _STATE_ONLY)) != size:
        raise RuntimeError("llama.cpp did not write the state of a sequence: this is a bug, please report it")
    return state


def _put_state(llm: llama_cpp.Llama, point: Checkpoint, seq: int) -> None:
    """Put a state into the context. One from a file is checked first, since llama.cpp ends the process for
    some errors.
    """
    state = np.ascontiguousarray(point.state)
    slides = int(llama_cpp.llama_model_n_swa(_llama_cpp.model(llm))) > 0  # then rows of these come first
    if not slides and (
        len(state) < _HEAD.size or _HEAD.unpack_from(state.tobytes()[: _HEAD.size])[2:] != (1, point.n - 1, 0)
    ):
        raise ValueError("the state of recurrent layers belongs to a sequence of another length")
    context = _llama_cpp.context(llm)
    n_read = llama_cpp.llama_state_seq_set_data_ext(context, _pointer(state), len(state), seq, _STATE_ONLY)
    if int(n_read) != len(state):
        raise ValueError("the state of recurrent layers does not fit this model")


def _pointer(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _layers(llm: llama_cpp.Llama) -> list[_core.Layer]:
    """Return the layers that have rows."""
    return [] if _llama_cpp.is_recurrent(llm) else _core.layers(_address(llm))


def _address(llm: llama_cpp.Llama) -> int:
    return _llama_cpp.address(_llama_cpp.context(llm))


def _memory(llm: llama_cpp.Llama) -> Any:
    return llama_cpp.llama_get_memory(_llama_cpp.context(llm))


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
            put(llm, point, seq)
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
