"""The live KV cache of a `Llama`: its contents, its sequences, and the window's settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import KVSetting
from mixedkv.config.cut_rule import CutRule
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.block import KVBlock
from mixedkv.kv.cache_context import CacheContext
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.kv.evaluation import Evaluation
from mixedkv.kv.layer_view import LayerView
from mixedkv.kv.rows import APPROXIMATE, COMPUTED, UNVERIFIED
from mixedkv.kv.sequence_state import SequenceStates, StateRefusedError
from mixedkv.kv.stats import KVStats, LayerStats, SequenceStats
from mixedkv.kv.validity import Validity
from mixedkv.kv.window import LiveWindow
from mixedkv.limits import INT32_MAX
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.context_lock import ContextGate, exclusive, present
from mixedkv.nearest_word import did_you_mean
from mixedkv.tokens import as_tokens

_TUNABLE = ("quantization_threshold", "group_size", "sink_tokens")
_SET_ONCE = ("busy",)
_FOR_USERS = (
    "can_cut",
    "can_shift",
    "checkpoint",
    "clear",
    "config",
    "copy",
    "exact_tokens",
    "export",
    "fill",
    "keep",
    "layer",
    "layers",
    "load",
    "positions",
    "remove",
    "replace",
    "resume",
    "row_setting",
    "set_window",
    "setting_of",
    "shift",
    "stats",
    "used",
)
_BY_AN_ADAPTER = "products of single columns with a LoRA adapter round otherwise than those of several"


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _held(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Return a method that calls one of a part which the object holds, with its types and docstring."""

    @wraps(method)
    def called(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return method(getattr(self, part), *args, **kwargs)

    return called


class KVCache:
    """The cache of one `Llama`, as its property `kv`. Use it on the thread that decodes.

    The `Llama` evaluates into sequence 0 and knows its tokens: n_tokens and input_ids follow what is done to
    it here. Sequences are numbered from 0 to n_seq_max - 1; where p1 < 0 a range of positions [p0, p1) ends
    at the sequence's end. Every method raises ClosedError once the `Llama` is closed, and those that touch
    rows ContextBusyError while another thread evaluates or touches them.

    It holds its parts: the window's settings, what rows are worth, what sequences hold besides rows, and the
    evaluation. Each of them has a file of its own.

    Args:
        check: returns what raises the reason why an evaluation ended early, see `Evaluation`.
        busy: the context's lock.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        setting: KVSetting,
        check: Callable[[], Callable[[], None] | None],
        busy: ContextGate,
    ) -> None:
        self.busy = busy
        self._context = context = CacheContext(llama, busy)
        self._window = LiveWindow(context, setting)
        self._validity = Validity(context)
        self._states = SequenceStates(context, self._window, self._validity)
        self._evaluation = Evaluation(context, self._states, self._validity, check)

    @property
    def _llama(self) -> llama_cpp.Llama:
        return self._context.llama

    def __repr__(self) -> str:
        return f"<KVCache {self.config}>"

    def __setattr__(self, name: str, value: object) -> None:
        """Set what can be tuned.

        Raises:
            AttributeError: there is no such setting: a misspelt one would have no effect.
        """
        if not (name.startswith("_") or name in _SET_ONCE or hasattr(type(self), name)):
            known = ", ".join(_TUNABLE)
            raise AttributeError(
                f"llm.kv has no setting {name!r}{did_you_mean(name, _TUNABLE)}: these can be set: {known}"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Return what a caller needs; the engine and the store use more, which may change."""
        return [*_FOR_USERS, *_TUNABLE]

    @property
    def config(self) -> KVSetting:
        """The setting, a mixed one with its window as it is now. Any thread may ask."""
        return self._window.setting

    @property
    def quantization_threshold(self) -> int:
        """F16 tokens at most in the recent window of a sequence.

        Can be set while the cache lives. A smaller window takes effect at once, and its memory goes back to
        the system where the cache lies in that of the CPU. A larger one fills from new tokens only, since
        what has left it stays quantised; beyond `KVStats.threshold_capacity` it allocates F16 rows, whose
        memory stays with the cache.
        """
        return self._window.setting.window.threshold

    @quantization_threshold.setter
    def quantization_threshold(self, value: int) -> None:
        self.set_window(quantization_threshold=value)

    @property
    def group_size(self) -> int:
        """Tokens that leave the window together. Can be set, to the threshold at most."""
        return self._window.setting.window.group_size

    @group_size.setter
    def group_size(self, value: int) -> None:
        self.set_window(group_size=value)

    @property
    def sink_tokens(self) -> int:
        """First tokens of a sequence, kept in F16 for good. Can be set, as far as there is room."""
        return self._window.setting.window.sink_tokens

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
        self._window.set(quantization_threshold, group_size, sink_tokens)

    @exclusive
    def stats(self, by_layer: bool = False) -> KVStats:
        """Return what the cache holds now; `by_layer` adds one entry per layer."""
        address = self._context.address
        if self._context.is_recurrent:
            return KVStats.without_rows(self._llama.n_ctx(), self._llama.context_params.n_seq_max, by_layer)
        sequences = tuple(SequenceStats(**seq) for seq in _core.sequences(address))
        layers = self.layers if by_layer else None
        problem = _core.bits_problem(address) or (_BY_AN_ADAPTER if self._llama.lora_path else "")
        return KVStats.of(str(self.config), _core.stats(address), problem, sequences, layers)

    @property
    @present
    def has_experts(self) -> bool:
        """True if each token is computed by a few of many experts, whose choice depends on rounding."""
        return _llama_cpp.has_experts(self._llama)

    @property
    def layers(self) -> tuple[LayerStats, ...]:
        """Allocated rows of each layer that has a KV cache, in order. Any thread may ask."""
        return tuple(self._layers().values())

    def layer(self, il: int) -> LayerView:
        """Return a view of one layer's rows.

        Raises:
            IndexError: the layer has no KV cache; the message lists those that have one.
        """
        layers = {view.info.il: view for view in self.layer_views()}
        if il not in layers:
            known = ", ".join(map(str, layers)) or "none"
            raise IndexError(f"layer {il} has no KV cache; layers that have one: {known}")
        return layers[il]

    def layer_views(self) -> tuple[LayerView, ...]:
        """Return views of the rows of all layers that have a KV cache, in order."""
        return tuple(LayerView(lambda: self._context.address, each, self.busy) for each in self.layers)

    @exclusive
    def export(self, seq: int = 0, p0: int = 0, p1: int = -1, tokens: npt.ArrayLike | None = None) -> KVBlock:
        """Copy the rows at positions [p0, p1) of a sequence out of the cache, which keeps them. At the end of
        the sequence the state of recurrent layers comes along.

        Args:
            seq: the sequence.
            p0, p1: the range; p1 < 0 means the end.
            tokens: their ids, [p1 - p0], see `KVBlock`; None where the `Llama` itself evaluated them
                (sequence 0).

        Raises:
            LookupError: the sequence does not have all of these positions.
            ValueError: the range is empty, or `tokens` has another length.
            UnsupportedModelError: the model keeps more than rows of tokens and a state.
        """
        last = self.positions(seq)[1] + 1
        end = last if p1 < 0 else p1
        groups = self._states.rows_out(seq, p0, end, last)
        if tokens is None:
            tokens = self._known_tokens(seq, p0, end)
        ids = as_tokens(tokens)
        if ids.shape != (end - p0,):
            raise ValueError(f"tokens has the shape {ids.shape}: give the {end - p0} at [{p0}, {end})")
        point = self.checkpoint(seq) if end == last and not self.can_cut else None
        points = (point,) if point else ()
        return KVBlock(
            p0=p0,
            p1=end,
            tokens=ids,
            groups=groups,
            checkpoints=points,
            validity=self._validity.validity(seq, ids, p0),
            past=self._validity.past(seq, p0),
            setting=self.row_setting,
        )

    @exclusive
    def load(self, block: KVBlock, seq: int = 0, at: int | None = None, *, more: bool = False) -> None:
        """Put a block into a sequence, which must not have these positions.

        Blocks of consecutive ranges, loaded in order into an empty sequence, restore the cache as it was.
        Rows of other types than the cache's are converted. Rows that were computed under another setting
        (`row_setting`: other types, another window, RoPE, adapter, kind of attention) are approximate here,
        see `exact_tokens`; the logger `mixedkv.kv` says at level INFO in what they differ. A block that
        begins at n_tokens of sequence 0 replaces leftovers there, as `Llama.eval` does, and n_tokens then
        covers it.

        Args:
            block: from `export`, of this or another context of the same model.
            seq: the sequence.
            at: position of the block's first token; None for the one it had. K is rotated (RoPE) for another
                one.
            more: another block follows, so rows that the next token would read may be missing.

        Raises:
            ValueError: the block does not fit the model, the sequence or the room there is, or lacks what the
                token behind it reads. Nothing changed, or, where a state is refused, the sequence is empty.
            UnsupportedModelError: the model keeps more than rows of tokens and a state.
        """
        block = KVBlock.from_arrays(block.describe(), block.to_arrays())
        shift = 0 if at is None else at - block.p0
        if not -block.p0 <= shift <= INT32_MAX - block.p1:
            raise ValueError(f"at={at}: use a position from 0 to {INT32_MAX - len(block)}")
        point = None if more or shift else block.checkpoint_at(block.p1)
        past = point.past_at(block.p1) if point is not None else None
        # images may have any ids, also those before the block
        is_known = past is not None and block.groups and block.p0 == 0 and block.is_text
        if is_known and past != block.past_at(block.p1):
            raise ValueError("block: its checkpoint was taken behind other tokens than it has")
        follows = seq == 0 and block.p0 + shift == self._llama.n_tokens
        drop_from = self._llama.n_tokens if follows else -1
        try:
            self._states.rows_in(block, seq, shift, drop_from, more, point)
        except StateRefusedError as error:
            self.remove(seq)
            raise ValueError(str(error)) from error
        if follows:
            self._append_tokens(block.tokens)
        changed = shift != 0 or not self._has_types_of(block)
        self._validity.record(block, seq, block.p0 + shift, APPROXIMATE if changed else COMPUTED)
        if point is not None and (past is None or point.setting != block.setting):
            self._validity.record_checkpoint(point, block.p1, seq)

    @exclusive
    def replace(self, block: KVBlock, seq: int = 0) -> None:
        """Put a block's rows in the place of those that a sequence has at its positions. What is behind them
        stays. Rows of other types than the cache's are converted.

        Args:
            block: as `export` gave it, but for its layers' types and rows.
            seq: the sequence.

        Raises:
            ValueError: the block does not fit the model, or is not a range of positions of the sequence.
            UnsupportedModelError: rows cannot be removed from this cache (see `can_cut`).
        """
        n = self._llama.n_tokens
        self.remove(seq, block.p0, block.p1)
        if seq == 0:
            self._llama.n_tokens = n  # the tokens are still the same
        self._states.rows_in(block, seq, 0, -1, False, block.checkpoint_at(block.p1))
        self._validity.record(block, seq, block.p0, APPROXIMATE)

    # --- what rows are ---

    @property
    @present
    def row_setting(self) -> str:
        """The setting that rows are computed under now, as text: all that shapes them besides their tokens.

        The model's file, overridden metadata, adapters and their scales, RoPE, the window as it is now, and
        by layer the types of the rows, their rotation, scales and kind of attention. Rows of two contexts are
        the same, but for rounding, where their settings are. Threads, batches, and where layers run are left
        out. Any thread may ask.
        """
        return self._validity.setting

    @exclusive
    def setting_of(self, seq: int, p: int) -> str:
        """Return what the row of a sequence at position `p` was computed under; "" if that is not known."""
        return self._validity.setting_of(seq, p)

    @property
    def exact_tokens(self) -> int:
        """Number of leading tokens of sequence 0 that have the rows which evaluating them from the start
        would give.

        All of n_tokens, unless tokens were evaluated behind a mixed window that had lost F16 rows (after a
        rollback, a block cut short, or where other sequences needed the room) or behind rows that are not
        exact, rows were loaded at another place or converted, a state was loaded, or rows were computed under
        another setting than the present one: they came so, or the window or an adapter was changed.
        """
        n = self._llama.n_tokens
        return min(n, self._validity.exact(0, self._llama.input_ids[:n]))

    @exclusive
    def limit_exact(self, p: int) -> None:
        """Mark rows of sequence 0 from `p` on as inexact, after llama_cpp's own functions moved rows."""
        self._validity.limit(0, p, -1, UNVERIFIED)

    @exclusive
    def assume(self, tokens: npt.ArrayLike, n_exact: int) -> None:
        """Set the tokens that sequence 0 holds from position 0 on; the first `n_exact` of them have exact
        rows.

        Raises:
            ValueError: the sequence has another length.
        """
        ids = as_tokens(tokens)
        if self.positions(0) != (0, len(ids) - 1):
            raise ValueError(f"tokens: {len(ids)} do not describe positions {self.positions(0)}")
        self._llama.input_ids[: len(ids)] = ids
        self._llama.n_tokens = len(ids)
        if n_exact < len(ids):
            self.limit_exact(n_exact)

    # --- evaluation ---

    @exclusive
    def fill(
        self,
        tokens: npt.ArrayLike,
        positions: npt.ArrayLike,
        seq: int = 0,
        *,
        logits: bool = False,
        last_layer: int | None = None,
        watch: int = 0,
    ) -> npt.NDArray[np.float32]:
        """Evaluate tokens at positions that a sequence lacks, between others that it has: they see what is
        before them, and each other. The `Llama` does not follow it: see `assume`.

        Args:
            tokens: token ids, [n]; n_batch at most.
            positions: theirs, ascending, [n].
            seq: the sequence.
            logits: compute those of the last token, where `llama_get_logits_ith(context, -1)` finds them.
            last_layer: compute rows up to this layer only; the tokens must then be removed again.
            watch: positions [0, watch) whose attention is watched.

        Returns:
            float32 [watch]: attention that the tokens pay to the quantised row at each position, summed over
            tokens, heads and the deeper half of the layers.

        Raises:
            ValueError: the sequence has one of the positions, they do not ascend, or a token is none; or
                attention is watched, or evaluation cut short, where a layer does not have the fused
                attention, or the last layer keeps no rows.
            LookupError: there is no such sequence, or no room.
            UnsupportedModelError: the model keeps more than rows of tokens (recurrent layers).
            NotFiniteError, ModelReadError, KeyboardInterrupt: as `step`; the sequence then lacks all of the
                positions.
        """
        return self._evaluation.fill(tokens, positions, seq, logits, last_layer, watch)

    # --- sequences ---

    @property
    @exclusive
    def used(self) -> int:
        """Cells that hold a token; one that several sequences share counts once. 0 where all layers keep a
        state instead.
        """
        if self._context.is_recurrent:
            return 0
        return int(_core.stats(self._context.address)["n_cells_used"])

    @property
    @present
    def can_shift(self) -> bool:
        """True if positions can be moved: not with recurrent layers, with sliding-window layers only where
        swa_full=True, and not in a quantised uniform cache where RoPE turns a part of each head.
        """
        memory = self._context.memory
        return bool(memory) and self.can_cut and bool(llama_cpp.llama_memory_can_shift(memory))

    @exclusive
    def remove(self, seq: int = 0, p0: int = 0, p1: int = -1) -> None:
        """Remove the positions [p0, p1) of a sequence; those behind stay where they are: see `shift`.

        Raises:
            UnsupportedModelError: only the whole sequence can be removed (see `can_cut`). Nothing changed.
            ValueError: there is no such sequence, or no such range.
        """
        self._check_range(seq, p0, p1)
        if not self._context.remove(seq, p0, p1):
            raise UnsupportedModelError(
                f"[{p0}, {p1}) of seq={seq} cannot be removed, since this model keeps a state of the whole "
                f"sequence: remove all of it"
            )
        if p0 == 0 and p1 < 0:
            self._validity.mark(seq, False)
        n = self._llama.n_tokens
        if seq == 0 and p0 < n and (p1 < 0 or p1 >= n):
            self._llama.n_tokens = p0

    @exclusive
    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        """Copy positions [p0, p1) of sequence `source` to `target`, replacing what `target` has there. In a
        unified cache both share the cells; otherwise rows are copied, of whole sequences only.

        The `Llama` does not notice a copy into its sequence 0.

        Raises:
            UnsupportedModelError: this model keeps a state of the whole sequence, and this is a part of it.
            ValueError: there is no such sequence or range, or part of one in a cache that is not unified.
        """
        self._check_range(source, p0, p1)
        self._context.check_sequence("target", target)
        if source == target:
            return
        if not (self._llama.context_params.kv_unified and self.can_cut):
            self._check_whole(source, p0, p1)
            p0 = p1 = -1  # all: llama.cpp aborts on anything that looks like a part
        if self.positions(target)[1] >= 0:  # llama.cpp would have some positions twice
            self.remove(target, max(0, p0), p1)
        llama_cpp.llama_memory_seq_cp(self._context.memory, source, target, p0, p1)
        self._validity.mark_copy(source, target)

    @exclusive
    def shift(self, seq: int, p0: int, p1: int, by: int) -> None:
        """Add `by` to the positions [p0, p1) of a sequence; K is rotated accordingly before the next decode.

        A cell has one position, so cells that sequences share (see `copy`) move in all of them. If one of the
        others is sequence 0, the `Llama` starts again with n_tokens 0.

        Raises:
            UnsupportedModelError: positions cannot be moved (see `can_shift`).
            ValueError: there is no such sequence or range, or it would begin below 0 or end too high.
        """
        self._check_range(seq, p0, p1)
        if not self.can_shift:
            raise UnsupportedModelError(
                "positions cannot be moved: recurrent layers, sliding-window layers without swa_full=True, "
                "or a quantised uniform cache where RoPE turns a part of each head (use a mixed one, or f16)"
            )
        end = self.positions(seq)[1] + 1 if p1 < 0 else p1
        if p0 + by < 0 or end + by > INT32_MAX:
            raise ValueError(f"by={by} moves [{p0}, {end}) out of the range of positions")
        if seq == 0:
            self._shift_tokens(p0, min(end, self._llama.n_tokens), by)
        before = self._at()
        llama_cpp.llama_memory_seq_add(self._context.memory, seq, p0, p1, by)
        if seq != 0 and self._at() != before:
            self._llama.n_tokens = 0

    def check_can_shift(self) -> None:
        """Refuse a full context whose positions cannot be moved.

        Raises:
            UnsupportedModelError: see `can_shift`.
        """
        if not self.can_shift:
            raise UnsupportedModelError(
                "the context is full, and this model's memory cannot drop tokens (recurrent or "
                "sliding-window layers): raise n_ctx, shorten the conversation, or, with sliding-window "
                "layers, set swa_full=True"
            )

    @exclusive
    def remove_and_shift(
        self, seq: int, begin: int, end: int, *, shared: npt.ArrayLike | None = None
    ) -> None:
        """Drop positions [begin, end) of a sequence; the rows behind them move down, turned by RoPE.

        Args:
            shared: where other sequences have some of these rows too, the tokens of the rows behind; these
                are then copied, since a cell has one position.

        Raises:
            ValueError: the range is empty or negative; or there is no room for copies, and the rows behind
                `begin` are gone.
            UnsupportedModelError: positions cannot be moved.
        """
        if not 0 <= begin < end:
            raise ValueError(f"[{begin}, {end}) is not a valid range of positions to drop")
        self.check_can_shift()
        if shared is None:
            self.remove(seq, begin, end)
            self.shift(seq, end, -1, begin - end)
            return
        block = self.export(seq, end, -1, shared)
        self.remove(seq, begin)
        self.load(block, seq, begin)

    def _at(self) -> list[list[int]]:
        """Return the positions that layers have of sequence 0, once for each group of layers."""
        one_each = {layer["group"]: layer["il"] for layer in _core.layers(self._context.address)}
        return [_core.read_tiers(self._context.address, il, 0, 0, -1)[0].tolist() for il in one_each.values()]

    @exclusive
    def keep(self, seq: int) -> None:
        """Remove all other sequences.

        Raises:
            ValueError: there is no such sequence.
        """
        self._context.check_sequence("seq", seq)
        for other in range(self._llama.context_params.n_seq_max):  # llama.cpp's seq_keep is of one stream
            if other != seq:
                self.remove(other)

    @exclusive
    def clear(self) -> None:
        """Remove all sequences."""
        llama_cpp.llama_memory_clear(self._context.memory, True)
        self._llama.n_tokens = 0

    def _check_range(self, seq: int, p0: int, p1: int) -> None:
        self._context.check_sequence("seq", seq)
        if not 0 <= p0 <= INT32_MAX or p1 > INT32_MAX or 0 <= p1 < p0:
            raise ValueError(f"[{p0}, {p1}) is not a valid range of positions")

    def _check_whole(self, seq: int, p0: int, p1: int) -> None:
        low, high = self.positions(seq)
        if not self.can_cut:  # the state is at the highest position, however many rows there are
            low = 0
        if p0 <= max(0, low) and not 0 <= p1 <= high:
            return
        part = f"[{p0}, {p1}) is part of seq={seq}"
        if not self.can_cut:
            raise UnsupportedModelError(f"{part}, and this model keeps a state of the whole: copy all of it")
        raise ValueError(f"{part}: without kv_unified=True copy whole sequences only")

    def _shift_tokens(self, p0: int, end: int, by: int) -> None:
        """Move the `Llama`'s tokens of sequence 0 as its rows were moved."""
        llama = self._llama
        if p0 >= end:
            return
        if end + by > len(llama.input_ids):
            raise ValueError(f"by={by} moves position {end - 1} beyond the context of {len(llama.input_ids)}")
        llama.input_ids[p0 + by : end + by] = llama.input_ids[p0:end].copy()
        if end == llama.n_tokens:
            llama.n_tokens = end + by

    def _has_types_of(self, block: KVBlock) -> bool:
        """Return whether the block's rows need no conversion here."""
        layers = self._layers()
        return all(
            (layer.type_k, layer.type_v, layer.equalization)
            == (layers[layer.il].type_k, layers[layer.il].type_v, layers[layer.il].equalization)
            for group in block.groups
            for layer in group.layers
        )

    # --- where a sequence can be cut, and how it continues ---

    @exclusive
    def positions(self, seq: int = 0) -> tuple[int, int]:
        """Return the lowest and highest position that all layers still hold of a sequence; (-1, -1) when it
        is empty.
        """
        return self._context.positions(seq)

    @property
    def can_cut(self) -> bool:
        """True if part of a sequence can be removed: not where recurrent layers keep a state of all of it."""
        return self._context.can_cut

    @property
    @present
    def cut_rule(self) -> CutRule:
        """The rule that says where a sequence can be cut."""
        return self._states.cut_rule

    @property
    @present
    def sliding_window(self) -> int:
        """Tokens that layers with a sliding window see, 0 if there are none."""
        return self._states.sliding_window

    @exclusive
    def checkpoint(self, seq: int = 0) -> Checkpoint | None:
        """Copy the state of a sequence besides the rows of all its tokens: F16 copies of recent rows, rows of
        sliding windows, the state of recurrent layers. `resume` continues from it later.

        None where there is nothing of the kind, or not all of it any more.
        """
        return self._states.checkpoint(seq)

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
        self._states.resume(point, n, source, target)

    # --- what the engine and the store ask of the parts ---

    step = _held("_evaluation", Evaluation.step)
    decode = _held("_evaluation", Evaluation.decode)
    causal = _held("_evaluation", Evaluation.causal)
    refused = _held("_evaluation", Evaluation.refused)
    take_not_finite = _held("_evaluation", Evaluation.take_not_finite)
    clear_unused = _held("_evaluation", Evaluation.clear_unused)

    validity = _held("_validity", Validity.validity)
    exact = _held("_validity", Validity.exact)

    holds = _held("_states", SequenceStates.holds)
    longest_cut = _held("_states", SequenceStates.longest_cut)
    n_rows = _held("_states", SequenceStates.n_rows)
    has_rows = _held("_states", SequenceStates.has_rows)

    short_from = _held("_window", LiveWindow.short_from)
    release_hot_rows = _held("_window", LiveWindow.release_hot_rows)
    hold_hot_rows = _held("_window", LiveWindow.hold_hot_rows)
    drop_window = _held("_window", LiveWindow.drop_window)

    def _known_tokens(self, seq: int, p0: int, p1: int) -> npt.NDArray[np.int32]:
        if seq != 0 or self._llama.n_tokens < p1:
            raise ValueError(
                f"tokens: give the ids at [{p0}, {p1}) of seq={seq}: this Llama did not see them"
            )
        return self._llama.input_ids[p0:p1]

    @present
    def _layers(self) -> dict[int, LayerStats]:
        return {layer["il"]: LayerStats.of(layer) for layer in self._context.layers()}

    def _append_tokens(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append tokens whose KV was loaded behind what is there, so that evaluation goes on after them."""
        llama = self._llama
        end = min(llama.n_tokens + len(tokens), len(llama.input_ids))
        llama.input_ids[llama.n_tokens : end] = tokens[: end - llama.n_tokens]
        llama.n_tokens = end
