"""Says what a sequence holds besides rows of all tokens, and where it can be cut: its cells are asked."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config.cut_rule import CutRule
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.block import KVBlock
from mixedkv.kv.cache_context import CacheContext
from mixedkv.kv.checkpoint import Checkpoint, joined
from mixedkv.kv.rows import RowGroup, from_native, pick_rows, to_native
from mixedkv.kv.validity import Validity
from mixedkv.kv.window import LiveWindow
from mixedkv.native.context_lock import exclusive

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


class StateRefusedError(Exception):
    """A checkpoint does not fit, which is found after the rows were loaded."""


class SequenceStates:
    """Says where the sequences of a context can be cut, keeps what they hold besides rows of all tokens, and
    copies rows out and in.
    """

    def __init__(self, context: CacheContext, window: LiveWindow, validity: Validity) -> None:
        self._context, self.busy = context, context.busy
        self._window, self._validity = window, validity

    # --- where a sequence can be cut ---

    @property
    def cut_rule(self) -> CutRule:
        """The rule that says where a sequence can be cut."""
        n_swa, rows = self.sliding_window, self._window.setting.window
        # without drafts: a sequence that was resumed has the rows of its window only
        window = _core.HotWindow(rows.threshold, rows.group_size, rows.sink_tokens)
        sliding = 0 if self._context.llama.context_params.swa_full else n_swa
        return CutRule(window=window, sliding=sliding, recurrent=not self._context.can_cut, slides=n_swa > 0)

    @property
    def sliding_window(self) -> int:
        """Tokens that layers with a sliding window see, 0 if there are none."""
        if not self._context.slides:
            return 0
        return max((layer["n_swa"] for layer in self._context.layers()), default=0)

    def find_cut(self, seq: int, n: int) -> Cut:
        """Return where a sequence can be cut at most, up to `n` tokens. The cells and states are asked:
        layers with a sliding window let go of rows, whatever swa_full says.
        """
        return Cut(*_core.find_cut(self._context.address, seq, n))

    @exclusive
    def holds(self, seq: int, n: int) -> bool:
        """Return whether the sequence, cut at n tokens, has all that the token there reads as it was
        evaluated.
        """
        cut = self.find_cut(seq, n)
        return cut.n == n and cut.hot

    @exclusive
    def longest_cut(self, seq: int, n: int) -> int:
        """Return where the sequence can be cut at most, up to `n` tokens: the next token then finds all rows
        and states that it reads, in every layer. F16 rows of a mixed window may be missing, see `holds`.
        """
        return self.find_cut(seq, n).n

    @exclusive
    def n_rows(self, seq: int, n: int) -> int:
        """Return how many leading positions, up to `n`, layers have that keep all rows."""
        return self.find_cut(seq, n).full

    @exclusive
    def has_rows(self, seq: int, n: int) -> bool:
        """Return whether the sequence can be cut at `n` tokens, see `longest_cut`."""
        return self.find_cut(seq, n).n == n

    # --- checkpoints ---

    def checkpoint(self, seq: int) -> Checkpoint | None:
        rule, n = self.cut_rule, int(llama_cpp.llama_memory_seq_pos_max(self._context.memory, seq)) + 1
        if n == 0 or rule.anywhere or not self.holds(seq, n):
            return None
        try:
            groups = self._groups(rule, seq, n)
        except UnsupportedModelError:  # its rows are not taken out
            return None
        state = self._state(seq) if rule.recurrent else np.empty(0, np.uint8)
        before = self.find_cut(seq, n - 1)
        first = rule.saved_from(n) if before.window == n - 1 and before.hot else n
        known = {}
        if self._context.layers():
            known["pasts"] = _core.get_past(self._context.address, seq, first, n - first + 1)
        setting = self._validity.setting
        return Checkpoint(n=n, first=first, groups=groups, state=state, setting=setting, **known)

    def resume(self, point: Checkpoint, n: int, source: int, target: int) -> None:
        context = self._context
        context.check_sequence("source", source)
        context.check_sequence("target", target)
        self._validity.mark_copy(source, target)
        try:
            if not point.serves(n):
                raise ValueError(f"n={n}: this checkpoint serves {point.first} to {point.n} tokens")
            self._check_tokens(point, n, source)
            if source != target:
                context.remove(target)
                llama_cpp.llama_memory_seq_cp(context.memory, source, target, 0, n)
            self._put(point.cut(n), target)
            if self.find_cut(target, n).n < n:
                raise ValueError(f"rows of the first {n} tokens are missing: evaluate them again")
            self._validity.record_checkpoint(point, n, target)
        except ValueError:
            context.remove(target)
            raise

    def _check_tokens(self, point: Checkpoint, n: int, seq: int) -> None:
        """Raise ValueError if a checkpoint is of other tokens than the first `n` of a sequence."""
        past = point.past_at(n)
        if past is None or not self._context.layers() or self.find_cut(seq, n).full < n:
            return  # rows that are missing are found when it is put back
        if past != self._validity.past(seq, n):
            raise ValueError(
                f"n={n}: this checkpoint was taken behind other tokens than sequence {seq} has there: take "
                f"one of this sequence, or evaluate its tokens again"
            )

    def _put(self, point: Checkpoint, seq: int) -> None:
        """Restore a checkpoint into a sequence that has rows of its tokens; later rows are removed.

        Raises:
            ValueError: it does not fit this model, or there is no room.
        """
        if len(point.state):  # first: a state that is ahead of the cut could not be cut
            self._put_state(point, seq)
        elif not self._context.can_cut:
            raise ValueError("the checkpoint has no state of recurrent layers, which this model has")
        self._context.remove(seq, point.n)
        if point.groups:
            _core.restore_window(self._context.address, seq, [to_native(group) for group in point.groups])

    def _groups(self, rule: CutRule, seq: int, n: int) -> tuple[RowGroup, ...]:
        """Return the rows with F16 copies; of sliding-window layers all that the token at n - 1 has seen."""
        layers, window = self._context.layers(), rule.window
        if not layers or not (window.threshold or window.sink_tokens or rule.sliding):
            return ()
        sinks = min(window.sink_tokens, n)
        begin = min(window.begin(n - 1), n - rule.sliding if rule.sliding else n)
        begin = max(0, min(begin, n - 1))
        slides = {layer["group"]: layer["n_swa"] > 0 and rule.sliding > 0 for layer in layers}
        groups = self._export(seq, begin, n)
        if 0 < sinks <= begin:
            groups = [joined(a, b) for a, b in zip(self._export(seq, 0, sinks), groups, strict=True)]
        return tuple(
            group if slides[i] else pick_rows(group, group.hot, slice(None)) for i, group in enumerate(groups)
        )

    def _state(self, seq: int) -> npt.NDArray[np.uint8]:
        context = self._context.handle
        size = int(llama_cpp.llama_state_seq_get_size_ext(context, seq, _STATE_ONLY))
        state = np.empty(size, np.uint8)
        n_written = llama_cpp.llama_state_seq_get_data_ext(context, _pointer(state), size, seq, _STATE_ONLY)
        if int(n_written) != size:
            raise RuntimeError(
                "llama.cpp did not write the state of a sequence: this is a bug, please report it"
            )
        return state

    def _put_state(self, point: Checkpoint, seq: int) -> None:
        """Put a state into the context. One from a file is checked first: for some errors llama.cpp ends the
        process.
        """
        state = np.ascontiguousarray(point.state)
        head = state[: _HEAD.size].tobytes()
        # with a sliding window rows of that come first
        if not self._context.slides and (
            len(head) < _HEAD.size or _HEAD.unpack(head)[2:] != (1, point.n - 1, 0)
        ):
            raise ValueError("the state of recurrent layers belongs to a sequence of another length")
        context = self._context.handle
        n = llama_cpp.llama_state_seq_set_data_ext(context, _pointer(state), len(state), seq, _STATE_ONLY)
        if int(n) != len(state):
            raise ValueError("the state of recurrent layers does not fit this model")

    # --- rows out and in ---

    def _export(self, seq: int, p0: int, p1: int) -> list[RowGroup]:
        return [from_native(group) for group in _core.export_rows(self._context.address, seq, p0, p1)]

    def rows_out(self, seq: int, p0: int, p1: int, end: int) -> tuple[RowGroup, ...]:
        """Return the rows at [p0, p1) of a sequence of `end` tokens; none where no layer keeps any.

        Raises:
            LookupError, ValueError, UnsupportedModelError: as `KVCache.export`.
        """
        if self._context.is_recurrent:
            if not 0 <= p0 < p1 <= end:
                raise LookupError(f"sequence {seq} has no positions [{p0}, {p1})")
            return ()
        if not (groups := self._export(seq, p0, p1)):
            raise UnsupportedModelError(
                "rows cannot be exported from the kind of cache that this model has: save its whole state"
            )
        return tuple(groups)

    def rows_in(
        self, block: KVBlock, seq: int, shift: int, drop_from: int, more: bool, point: Checkpoint | None
    ) -> None:
        """Put rows, and the checkpoint that serves their end, into a sequence.

        Raises:
            ValueError: as `KVCache.load`; nothing has changed.
            StateRefusedError: the checkpoint cannot be put back.
        """
        if not self._context.can_cut and shift:
            raise ValueError(
                "the state of recurrent layers stays at its positions: load the block where it was"
            )
        if not self._context.can_cut and point is None and not more:
            raise ValueError(
                "the block has no state of the recurrent layers at its end: export it where its sequence ends"
            )
        groups = [to_native(group) for group in block.groups]
        if groups and not more and point is None:
            _core.import_rows(self._context.address, seq, groups, shift, drop_from)
        elif groups:
            if drop_from >= 0 and not self._context.remove(seq, drop_from):
                raise ValueError(
                    f"the state of recurrent layers is ahead of {drop_from}: remove the sequence first"
                )
            _core.import_part(self._context.address, seq, groups)
        if point is not None:
            try:
                self._put(point, seq)
            except ValueError as error:
                raise StateRefusedError(str(error)) from error


def _pointer(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
