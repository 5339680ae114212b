"""Says what a sequence holds besides rows of all tokens, and where it can be cut: its cells are asked."""

from __future__ import annotations

import ctypes
import struct
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.config.cut_rule import CutRule
from mixedkv.errors import CLOSED, ClosedError, UnsupportedModelError
from mixedkv.kv.block import KVBlock
from mixedkv.kv.checkpoint import Checkpoint, joined
from mixedkv.kv.row_setting import name_of_model
from mixedkv.kv.rows import APPROXIMATE, RowGroup, from_native, pick_rows, to_native
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.context_lock import exclusive, present
from mixedkv.native.memory import memory_room
from mixedkv.sizes import format_bytes


class WindowSettings:
    """The context of a `KVCache`, the settings that it was made with, and its window as it is now."""

    def __init__(self, llama: llama_cpp.Llama, setting: KVSetting, busy: _core.Gate) -> None:
        self._owner, self._setting, self.busy = weakref.ref(llama), setting, busy

    @property
    def _llama(self) -> llama_cpp.Llama:
        """The `Llama`, which is freed with its last reference: this is none."""
        if (llama := self._owner()) is None:
            raise ClosedError(CLOSED)
        return llama

    @property
    def _address(self) -> int:
        return _llama_cpp.address(_llama_cpp.context(self._llama))

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(_llama_cpp.context(self._llama))

    @property
    def config(self) -> KVSetting:
        """The setting, a mixed one with its window as it is now. Any thread may ask."""
        return self._setting

    @property
    def quantization_threshold(self) -> int:
        """F16 tokens at most in the recent window of a sequence.

        Can be set while the cache lives. A smaller window takes effect at once, and its memory goes back to
        the system where the cache lies in that of the CPU. A larger one fills from new tokens only, since
        what has left it stays quantised; beyond `KVStats.threshold_capacity` it allocates F16 rows, whose
        memory stays with the cache.
        """
        return self._setting.window.threshold

    @quantization_threshold.setter
    def quantization_threshold(self, value: int) -> None:
        self.set_window(quantization_threshold=value)

    @property
    def group_size(self) -> int:
        """Tokens that leave the window together. Can be set, to the threshold at most."""
        return self._setting.window.group_size

    @group_size.setter
    def group_size(self, value: int) -> None:
        self.set_window(group_size=value)

    @property
    def sink_tokens(self) -> int:
        """First tokens of a sequence, kept in F16 for good. Can be set, as far as there is room."""
        return self._setting.window.sink_tokens

    @sink_tokens.setter
    def sink_tokens(self, value: int) -> None:
        self.set_window(sink_tokens=value)

    @exclusive
    def set_window(
        self,
        *,
        quantization_threshold: int | None = None,
        group_size: int | None = None,
        sink_tokens: int | None = None,
    ) -> None:
        """Set several of the window's settings at once; None leaves a setting unchanged.

        Raises:
            ValueError: a value is out of range, the cache is uniform, or it was made without F16 rows.
            MemoryError: a larger window takes more memory than there is. The window stays as it was.
        """
        now = self._setting
        if not isinstance(now, MixedKVConfig):
            raise ValueError(f"kv={str(now)!r} is a uniform cache: it has no window to set")
        window = (
            now.quantization_threshold if quantization_threshold is None else quantization_threshold,
            now.group_size if group_size is None else group_size,
            now.sink_tokens if sink_tokens is None else sink_tokens,
        )
        after = replace(now, quantization_threshold=window[0], group_size=window[1], sink_tokens=window[2])
        self._check_room(after)
        _core.set_window(self._address, *window)
        self._setting = after

    def _check_room(self, wanted: MixedKVConfig) -> None:
        """Raise MemoryError if the F16 rows of a wider window have no room in memory."""
        now, room = _core.stats(self._address), memory_room()
        if room is None or not now["hot_slots"] or wanted.quantization_threshold <= now["threshold_capacity"]:
            return
        rows = min(wanted.quantization_threshold, now["n_ctx_seq"]) * now["n_stream"]
        n_bytes = now["bytes_hot"] * rows // now["hot_slots"]  # beside those of now, until they have moved
        if n_bytes > room:
            raise MemoryError(
                f"quantization_threshold={wanted.quantization_threshold} takes {format_bytes(n_bytes)} of "
                f"F16 rows, and {format_bytes(room)} of memory are left: set a smaller window"
            )


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


class SequenceState(WindowSettings):
    """The part of a `KVCache` that says where sequences can be cut, keeps what they hold besides rows of all
    tokens, and copies rows out and in.
    """

    def __init__(self, llama: llama_cpp.Llama, setting: KVSetting, busy: _core.Gate) -> None:
        super().__init__(llama, setting, busy)
        self._doubted: set[int] = set()  # sequences, see `Evaluating._is_doubted`
        self._model_name = ""

    # --- what rows are computed under ---

    @property
    @present
    def row_setting(self) -> str:
        """The setting that rows are computed under now, as text: all that shapes them besides their tokens.

        The model's file, overridden metadata, adapters and their scales, RoPE, the window as it is now, and
        by layer the types of the rows, their rotation, scales and kind of attention. Rows of two contexts are
        the same, but for rounding, where their settings are. Threads, batches, and where layers run are left
        out. Any thread may ask.
        """
        self._name_model()
        return _core.get_setting(self._address, 0, -1)

    @exclusive
    def setting_of(self, seq: int, p: int) -> str:
        """Return what the row of a sequence at position `p` was computed under; "" if that is not known."""
        self._name_model()
        return _core.get_setting(self._address, seq, p)

    def _name_model(self) -> None:
        if not self._model_name:
            llama = self._llama
            stamp, overrides = getattr(llama, "_model_stamp", None), llama.kv_overrides
            name = name_of_model(llama.model_path, stamp, overrides)
            _core.name_model(self._address, name)
            self._model_name = name

    def _past(self, seq: int, p: int) -> int:
        """Return the hash of the tokens of a sequence before position `p`, see `KVBlock.past`."""
        return int(_core.get_past(self._address, seq, p, 1)[0])

    # --- where a sequence can be cut ---

    @exclusive
    def positions(self, seq: int = 0) -> tuple[int, int]:
        """Return the lowest and highest position that all layers still hold of a sequence; (-1, -1) when it
        is empty.
        """
        memory = self._memory
        self._check_sequence("seq", seq)
        low = llama_cpp.llama_memory_seq_pos_min(memory, seq)
        return int(low), int(llama_cpp.llama_memory_seq_pos_max(memory, seq))

    @property
    def can_cut(self) -> bool:
        """True if part of a sequence can be removed: not where recurrent layers keep a state of all of it."""
        return not (_llama_cpp.is_recurrent(self._llama) or _llama_cpp.is_hybrid(self._llama))

    @property
    @present
    def cut_rule(self) -> CutRule:
        """The rule that says where a sequence can be cut."""
        n_swa, rows = self.sliding_window, self._setting.window
        # without drafts: a sequence that was resumed has the rows of its window only
        window = _core.HotWindow(rows.threshold, rows.group_size, rows.sink_tokens)
        sliding = 0 if self._llama.context_params.swa_full else n_swa
        return CutRule(window=window, sliding=sliding, recurrent=not self.can_cut, slides=n_swa > 0)

    @property
    @present
    def sliding_window(self) -> int:
        """Tokens that layers with a sliding window see, 0 if there are none."""
        if not self._slides:
            return 0
        return max((layer["n_swa"] for layer in self._native_layers()), default=0)

    @property
    def _slides(self) -> bool:
        return int(llama_cpp.llama_model_n_swa(_llama_cpp.model(self._llama))) > 0

    @exclusive
    def holds(self, seq: int, n: int) -> bool:
        """Return whether the sequence, cut at n tokens, has all that the token there reads as it was
        evaluated.
        """
        cut = self._find_cut(seq, n)
        return cut.n == n and cut.hot

    @exclusive
    def longest_cut(self, seq: int, n: int) -> int:
        """Return where the sequence can be cut at most, up to `n` tokens: the next token then finds all rows
        and states that it reads, in every layer. F16 rows of a mixed window may be missing, see `holds`.

        The cells and states are asked. Layers with a sliding window let go of rows, whatever swa_full says.
        """
        return self._find_cut(seq, n).n

    @exclusive
    def n_rows(self, seq: int, n: int) -> int:
        """Return how many leading positions, up to `n`, layers have that keep all rows."""
        return self._find_cut(seq, n).full

    def has_rows(self, seq: int, n: int) -> bool:
        """Return whether the sequence can be cut at `n` tokens, see `longest_cut`."""
        return self.longest_cut(seq, n) == n

    def _find_cut(self, seq: int, n: int) -> Cut:
        return Cut(*_core.find_cut(self._address, seq, n))

    def _check_sequence(self, field: str, seq: int) -> None:
        n_seq_max = self._llama.context_params.n_seq_max
        if not 0 <= seq < n_seq_max:
            raise ValueError(f"{field}={seq}: this context has the sequences 0 to {n_seq_max - 1}")

    # --- checkpoints ---

    @exclusive
    def checkpoint(self, seq: int = 0) -> Checkpoint | None:
        """Copy the state of a sequence besides the rows of all its tokens: F16 copies of recent rows, rows of
        sliding windows, the state of recurrent layers. `resume` continues from it later.

        None where there is nothing of the kind, or not all of it any more.
        """
        rule, n = self.cut_rule, int(llama_cpp.llama_memory_seq_pos_max(self._memory, seq)) + 1
        if n == 0 or rule.anywhere or not self.holds(seq, n):
            return None
        try:
            groups = self._groups(rule, seq, n)
        except UnsupportedModelError:  # its rows are not taken out
            return None
        state = self._state(seq) if rule.recurrent else np.empty(0, np.uint8)
        before = self._find_cut(seq, n - 1)
        first = rule.saved_from(n) if before.window == n - 1 and before.hot else n
        pasts = _core.get_past(self._address, seq, first, n - first + 1) if self._native_layers() else None
        known = {} if pasts is None else {"pasts": pasts}
        return Checkpoint(n=n, first=first, groups=groups, state=state, setting=self.row_setting, **known)

    @exclusive
    def resume(self, point: Checkpoint, n: int, source: int, target: int) -> None:
        """Set sequence `target` to the first `n` tokens of `source`, from its rows and the checkpoint. Both
        may be the same sequence.

        The `Llama` does not notice a change of its sequence 0. If the checkpoint was taken under another
        setting (`row_setting`), its rows are approximate, and so is what is evaluated behind them.

        Raises:
            ValueError: the checkpoint does not serve this cut or this model or is of other tokens than the
                rows, rows are missing, or there is no room. The target is empty then.
        """
        self._check_sequence("source", source)
        self._check_sequence("target", target)
        self._doubt(target, source in self._doubted)
        memory = self._memory
        try:
            if not point.serves(n):
                raise ValueError(f"n={n}: this checkpoint serves {point.first} to {point.n} tokens")
            self._check_tokens(point, n, source)
            if source != target:
                llama_cpp.llama_memory_seq_rm(memory, target, -1, -1)
                llama_cpp.llama_memory_seq_cp(memory, source, target, 0, n)
            self._put(point.cut(n), target)
            if self._find_cut(target, n).n < n:
                raise ValueError(f"rows of the first {n} tokens are missing: evaluate them again")
            self._judge(point, n, target)
        except ValueError:
            llama_cpp.llama_memory_seq_rm(memory, target, -1, -1)
            raise

    def _check_tokens(self, point: Checkpoint, n: int, seq: int) -> None:
        """Raise ValueError if a checkpoint is of other tokens than the first `n` of a sequence."""
        past = point.past_at(n)
        if past is None or not self._native_layers() or self._find_cut(seq, n).full < n:
            return  # rows that are missing are found when it is put back
        if past != self._past(seq, n):
            raise ValueError(
                f"n={n}: this checkpoint was taken behind other tokens than sequence {seq} has there: take "
                f"one of this sequence, or evaluate its tokens again"
            )

    def _judge(self, point: Checkpoint, n: int, seq: int) -> None:
        """Note that the rows of a checkpoint, which is now in a sequence, are approximate where it was taken
        under another setting or behind unknown tokens.
        """
        if point.setting == self.row_setting and (point.past_at(n) is not None or not self._native_layers()):
            return
        self._doubt(seq, True)
        begin = min(
            (int(group.positions[0]) for group in point.groups if len(group.positions)), default=n - 1
        )
        _core.limit_truth(self._address, seq, min(begin, n - 1), n, APPROXIMATE)

    def _doubt(self, seq: int, doubted: bool) -> None:
        (self._doubted.add if doubted else self._doubted.discard)(seq)

    def _put(self, point: Checkpoint, seq: int) -> None:
        """Restore a checkpoint into a sequence that has rows of its tokens; later rows are removed.

        Raises:
            ValueError: it does not fit this model, or there is no room.
        """
        if len(point.state):  # first: a state that is ahead of the cut could not be cut
            self._put_state(point, seq)
        elif not self.can_cut:
            raise ValueError("the checkpoint has no state of recurrent layers, which this model has")
        llama_cpp.llama_memory_seq_rm(self._memory, seq, point.n, -1)
        if point.groups:
            _core.restore_window(self._address, seq, [to_native(group) for group in point.groups])

    def _groups(self, rule: CutRule, seq: int, n: int) -> tuple[RowGroup, ...]:
        """Return the rows with F16 copies; of sliding-window layers all that the token at n - 1 has seen."""
        layers, window = self._native_layers(), rule.window
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

    def _native_layers(self) -> list[_core.Layer]:
        """Return the layers that have rows."""
        return [] if _llama_cpp.is_recurrent(self._llama) else _core.layers(self._address)

    def _state(self, seq: int) -> npt.NDArray[np.uint8]:
        context = _llama_cpp.context(self._llama)
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
        if not self._slides and (len(head) < _HEAD.size or _HEAD.unpack(head)[2:] != (1, point.n - 1, 0)):
            raise ValueError("the state of recurrent layers belongs to a sequence of another length")
        context = _llama_cpp.context(self._llama)
        n = llama_cpp.llama_state_seq_set_data_ext(context, _pointer(state), len(state), seq, _STATE_ONLY)
        if int(n) != len(state):
            raise ValueError("the state of recurrent layers does not fit this model")

    # --- rows out and in ---

    def _export(self, seq: int, p0: int, p1: int) -> list[RowGroup]:
        return [from_native(group) for group in _core.export_rows(self._address, seq, p0, p1)]

    def _rows_out(self, seq: int, p0: int, p1: int, end: int) -> tuple[RowGroup, ...]:
        """Return the rows at [p0, p1) of a sequence of `end` tokens; none where no layer keeps any.

        Raises:
            LookupError, ValueError, UnsupportedModelError: as `KVCache.export`.
        """
        if _llama_cpp.is_recurrent(self._llama):
            if not 0 <= p0 < p1 <= end:
                raise LookupError(f"sequence {seq} has no positions [{p0}, {p1})")
            return ()
        if not (groups := self._export(seq, p0, p1)):
            raise UnsupportedModelError(
                "rows cannot be exported from the kind of cache that this model has: save its whole state"
            )
        return tuple(groups)

    def _rows_in(
        self, block: KVBlock, seq: int, shift: int, drop_from: int, more: bool, point: Checkpoint | None
    ) -> None:
        """Put rows, and the checkpoint that serves their end, into a sequence.

        Raises:
            ValueError: as `KVCache.load`; nothing has changed.
            StateRefusedError: the checkpoint cannot be put back.
        """
        if not self.can_cut and shift:
            raise ValueError(
                "the state of recurrent layers stays at its positions: load the block where it was"
            )
        if not self.can_cut and point is None and not more:
            raise ValueError(
                "the block has no state of the recurrent layers at its end: export it where its sequence ends"
            )
        groups = [to_native(group) for group in block.groups]
        if groups and not more and point is None:
            _core.import_rows(self._address, seq, groups, shift, drop_from)
        elif groups:
            if drop_from >= 0 and not llama_cpp.llama_memory_seq_rm(self._memory, seq, drop_from, -1):
                raise ValueError(
                    f"the state of recurrent layers is ahead of {drop_from}: remove the sequence first"
                )
            _core.import_part(self._address, seq, groups)
        if point is not None:
            try:
                self._put(point, seq)
            except ValueError as error:
                raise StateRefusedError(str(error)) from error


def _pointer(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
