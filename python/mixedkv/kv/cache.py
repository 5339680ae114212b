"""The live KV cache of a `Llama`: its contents, its sequences, and the window's settings."""

from __future__ import annotations

import logging

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import MixedKVConfig
from mixedkv.config.mixed import did_you_mean
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.block import KVBlock
from mixedkv.kv.evaluating import Evaluating
from mixedkv.kv.layer_view import LayerView
from mixedkv.kv.row_setting import difference
from mixedkv.kv.rows import APPROXIMATE, COMPUTED, runs
from mixedkv.kv.sequence_state import StateRefusedError
from mixedkv.kv.stats import KVStats, LayerStats, SequenceStats
from mixedkv.limits import INT32_MAX
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.context_lock import exclusive, present
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
_LOG = logging.getLogger("mixedkv.kv")
_BY_AN_ADAPTER = "products of single columns with a LoRA adapter round otherwise than those of several"


class KVCache(Evaluating):
    """The cache of one `Llama`, as its property `kv`. Use it on the thread that decodes.

    The `Llama` evaluates into sequence 0 and knows its tokens: n_tokens and input_ids follow what is done to
    it here. Sequences are numbered from 0 to n_seq_max - 1; where p1 < 0 a range of positions [p0, p1) ends
    at the sequence's end. Every method raises ClosedError once the `Llama` is closed, and those that touch
    rows ContextBusyError while another thread evaluates or touches them.
    """

    def __repr__(self) -> str:
        return f"<KVCache {self._setting}>"

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

    @exclusive
    def stats(self, by_layer: bool = False) -> KVStats:
        """Return what the cache holds now; `by_layer` adds one entry per layer."""
        address = self._address
        if _llama_cpp.is_recurrent(self._llama):
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
        layers = self._layers()
        if il not in layers:
            known = ", ".join(map(str, layers)) or "none"
            raise IndexError(f"layer {il} has no KV cache; layers that have one: {known}")
        return LayerView(lambda: self._address, layers[il], self.busy)

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
        groups = self._rows_out(seq, p0, end, last)
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
            truth=self.truth(seq, ids, p0),
            past=self._past(seq, p0),
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
            self._rows_in(block, seq, shift, drop_from, more, point)
        except StateRefusedError as error:
            self.remove(seq)
            raise ValueError(str(error)) from error
        if follows:
            self._append_tokens(block.tokens)
        changed = shift != 0 or not self._has_types_of(block)
        self._say(block, seq, block.p0 + shift, APPROXIMATE if changed else COMPUTED)
        if point is not None and (past is None or point.setting != block.setting):
            self._judge(point, block.p1, seq)

    def _say(self, block: KVBlock, seq: int, at: int, best: int) -> None:
        """Note what the rows of a block are that were put into a sequence, `best` at best, and under which
        setting they were computed: while that is not the present one they are approximate.
        """
        known = np.maximum(block.truth, np.uint8(best))
        reason = difference(block.setting, self.row_setting)
        if reason:
            _LOG.info("rows at [%d, %d) are approximate here: %s", block.p0, block.p1, reason)
        self._doubt(seq, bool(known.any() or reason) or (at > 0 and seq in self._doubted))
        for kind, begin, end in runs(known):
            past, ids = block.past_at(block.p0 + begin), block.tokens[begin:end]
            _core.set_truth(self._address, seq, at + begin, past, ids, kind, block.setting)

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
        self._rows_in(block, seq, 0, -1, False, block.checkpoint_at(block.p1))
        self._say(block, seq, block.p0, APPROXIMATE)

    # --- sequences ---

    @property
    @exclusive
    def used(self) -> int:
        """Cells that hold a token; one that several sequences share counts once. 0 where all layers keep a
        state instead.
        """
        if _llama_cpp.is_recurrent(self._llama):
            return 0
        return int(_core.stats(self._address)["n_cells_used"])

    @property
    @present
    def can_shift(self) -> bool:
        """True if positions can be moved: not with recurrent layers, with sliding-window layers only where
        swa_full=True, and not in a quantised uniform cache where RoPE turns a part of each head.
        """
        memory = self._memory
        return bool(memory) and self.can_cut and bool(llama_cpp.llama_memory_can_shift(memory))

    @exclusive
    def remove(self, seq: int = 0, p0: int = 0, p1: int = -1) -> None:
        """Remove the positions [p0, p1) of a sequence; those behind stay where they are: see `shift`.

        Raises:
            UnsupportedModelError: only the whole sequence can be removed (see `can_cut`). Nothing changed.
            ValueError: there is no such sequence, or no such range.
        """
        self._check_range(seq, p0, p1)
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, p0, p1):
            raise UnsupportedModelError(
                f"[{p0}, {p1}) of seq={seq} cannot be removed, since this model keeps a state of the whole "
                f"sequence: remove all of it"
            )
        if p0 == 0 and p1 < 0:
            self._doubt(seq, False)
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
        self._check_sequence("target", target)
        if source == target:
            return
        if not (self._llama.context_params.kv_unified and self.can_cut):
            self._check_whole(source, p0, p1)
            p0 = p1 = -1  # all: llama.cpp aborts on anything that looks like a part
        if self.positions(target)[1] >= 0:  # llama.cpp would have some positions twice
            self.remove(target, max(0, p0), p1)
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, p0, p1)
        self._doubt(target, source in self._doubted)

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
        llama_cpp.llama_memory_seq_add(self._memory, seq, p0, p1, by)
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
    def close_gap(self, seq: int, begin: int, end: int, *, shared: npt.ArrayLike | None = None) -> None:
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
        one_each = {layer["group"]: layer["il"] for layer in _core.layers(self._address)}
        return [_core.read_tiers(self._address, il, 0, 0, -1)[0].tolist() for il in one_each.values()]

    @exclusive
    def keep(self, seq: int) -> None:
        """Remove all other sequences.

        Raises:
            ValueError: there is no such sequence.
        """
        self._check_sequence("seq", seq)
        for other in range(self._llama.context_params.n_seq_max):  # llama.cpp's seq_keep is of one stream
            if other != seq:
                self.remove(other)

    @exclusive
    def clear(self) -> None:
        """Remove all sequences."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._llama.n_tokens = 0

    def _check_range(self, seq: int, p0: int, p1: int) -> None:
        self._check_sequence("seq", seq)
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

    @exclusive
    def rest(self, seq: int = 0) -> None:
        """Allow F16 rows of an idle sequence to be evicted for others. A `checkpoint` that was taken before
        restores them.
        """
        if isinstance(self._setting, MixedKVConfig):
            _core.rest(self._address, seq)

    @exclusive
    def wake(self, seq: int = 0) -> None:
        """Take back `rest`: the sequence goes on, though others may be evaluated before it."""
        if isinstance(self._setting, MixedKVConfig):
            _core.wake(self._address, seq)

    @exclusive
    def drop_window(self, seq: int) -> None:
        """Have layers with a sliding window let go of a sequence, whose other rows stay. A `checkpoint` that
        was taken before restores them.
        """
        _core.drop_sliding(self._address, seq)

    def _known_tokens(self, seq: int, p0: int, p1: int) -> npt.NDArray[np.int32]:
        if seq != 0 or self._llama.n_tokens < p1:
            raise ValueError(
                f"tokens: give the ids at [{p0}, {p1}) of seq={seq}: this Llama did not see them"
            )
        return self._llama.input_ids[p0:p1]

    @present
    def _layers(self) -> dict[int, LayerStats]:
        return {layer["il"]: LayerStats.of(layer) for layer in self._native_layers()}
