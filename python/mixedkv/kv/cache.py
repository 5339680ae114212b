"""The live KV cache of a `Llama`: what it holds, what attention reads, and the window's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core, _llama_cpp
from mixedkv.config import KVSetting, MixedKVConfig, check_window, ggml_type, type_name
from mixedkv.errors import UnsupportedModelError
from mixedkv.kv.block import KVBlock, LayerRows, RowGroup
from mixedkv.kv.busy import BusyGuard, exclusive
from mixedkv.kv.exactness import ExactRows
from mixedkv.kv.layer_view import LayerView, layer_stats
from mixedkv.kv.stats import KVStats, LayerStats, SequenceStats
from mixedkv.limits import INT32_MAX


class KVCache:
    """The cache of one `Llama`, as its property `kv`. Use it on the thread that decodes.

    The `Llama` evaluates into sequence 0 and knows its tokens: n_tokens and input_ids follow what is done to
    it here. Sequences are numbered from 0 to n_seq_max - 1; where p1 < 0 a range of positions [p0, p1) ends
    at the sequence's end. Every method raises RuntimeError once the `Llama` is closed, and those that touch
    rows ContextBusyError while another thread evaluates or touches them.
    """

    def __init__(self, llama: llama_cpp.Llama, setting: KVSetting) -> None:
        self._llama = llama
        self._setting = setting
        self._exact = ExactRows()
        self.busy = BusyGuard()

    def __repr__(self) -> str:
        return f"<KVCache {self._setting}>"

    @property
    def _address(self) -> int:
        return _llama_cpp.address(_llama_cpp.context(self._llama))

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(_llama_cpp.context(self._llama))

    @property
    def config(self) -> KVSetting:
        """The setting, a mixed one with its window as it is now."""
        if not isinstance(self._setting, MixedKVConfig):
            return self._setting
        return replace(
            self._setting,
            quantization_threshold=self.quantization_threshold,
            group_size=self.group_size,
            sink_tokens=self.sink_tokens,
        )

    @property
    def quantization_threshold(self) -> int:
        """F16 tokens at most in the recent window of a sequence.

        Can be set up to the value the cache was made with. A smaller window takes effect at once; a larger
        one fills from new tokens only, since what has left it stays quantised.
        """
        return _core.stats(self._address)["threshold"]

    @quantization_threshold.setter
    def quantization_threshold(self, value: int) -> None:
        self.set_window(quantization_threshold=value)

    @property
    def group_size(self) -> int:
        """Tokens that leave the window together. Can be set, to the threshold at most."""
        return _core.stats(self._address)["group_size"]

    @group_size.setter
    def group_size(self, value: int) -> None:
        self.set_window(group_size=value)

    @property
    def sink_tokens(self) -> int:
        """First tokens of a sequence, kept in F16 for good. Can be set, to the value at creation at most."""
        return _core.stats(self._address)["sink_tokens"]

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
        """Set several of the window's settings at once; what is None stays.

        Raises:
            ValueError: a value is out of range, above what the cache was made with, or the cache is uniform.
        """
        now = _core.stats(self._address)
        if not isinstance(self._setting, MixedKVConfig):
            raise ValueError(f"kv={str(self._setting)!r} is a uniform cache: it has no window to set")
        window = (
            now["threshold"] if quantization_threshold is None else quantization_threshold,
            now["group_size"] if group_size is None else group_size,
            now["sink_tokens"] if sink_tokens is None else sink_tokens,
        )
        check_window(*window)
        _check_capacity("quantization_threshold", window[0], now["threshold_capacity"])
        _check_capacity("sink_tokens", window[2], self._setting.sink_tokens)
        _core.set_window(self._address, *window)
        if window != (now["threshold"], now["group_size"], now["sink_tokens"]):
            self.limit_exact(0)

    def stats(self, by_layer: bool = False) -> KVStats:
        """What the cache holds now; `by_layer` adds one entry per layer."""
        address = self._address
        now = _core.stats(address)
        return KVStats(
            kv=str(self.config),
            mixed=now["mixed"],
            n_ctx=now["n_ctx_seq"],
            n_seq_max=now["n_seq_max"],
            n_layer=now["n_layer"],
            quantization_threshold=now["threshold"],
            threshold_capacity=now["threshold_capacity"],
            group_size=now["group_size"],
            sink_tokens=now["sink_tokens"],
            tokens_hot=now["n_cells_hot"],
            tokens_cold=now["n_cells_used"] - now["n_cells_hot"],
            bytes_total=now["bytes_total"],
            bytes_cold=now["bytes_cold"],
            bytes_hot=now["bytes_hot"],
            n_elements=now["n_elements"],
            sequences=tuple(SequenceStats(**seq) for seq in _core.sequences(address)),
            layers=tuple(self._layers().values()) if by_layer else None,
        )

    @property
    def exact_tokens(self) -> int:
        """How many leading tokens of sequence 0 have the rows that evaluating them from the start would give.

        All of n_tokens, unless tokens were evaluated behind a mixed window that had lost F16 rows (after a
        rollback, or a block cut short), rows were loaded at another place or converted, the window was
        changed, or a state was loaded.
        """
        return self._exact.count(self._llama.n_tokens)

    def limit_exact(self, p: int) -> None:
        """Say that rows of sequence 0 from `p` on are not exact. For whoever moves rows through llama_cpp."""
        self._exact.limit(p)

    def layer(self, il: int) -> LayerView:
        """One layer's rows.

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
        """Copy the rows at positions [p0, p1) of a sequence out of the cache, which keeps them.

        Args:
            seq: the sequence.
            p0, p1: the range; p1 < 0 means the end.
            tokens: their ids, [p1 - p0]; None where the `Llama` itself evaluated them (sequence 0).

        Raises:
            LookupError: the sequence does not have all of these positions.
            ValueError: the range is empty, or `tokens` has another length.
            UnsupportedModelError: the model keeps more than rows of tokens (recurrent layers, M-RoPE).
        """
        groups = tuple(map(_row_group, _core.export_rows(self._address, seq, p0, p1)))
        end = int(groups[0].positions[-1]) + 1
        if tokens is None:
            tokens = self._known_tokens(seq, p0, end)
        ids = np.array(tokens, np.int32)
        if ids.shape != (end - p0,):
            raise ValueError(f"tokens has the shape {ids.shape}: give the {end - p0} at [{p0}, {end})")
        return KVBlock(p0=p0, p1=end, tokens=ids, groups=groups)

    @exclusive
    def load(self, block: KVBlock, seq: int = 0, at: int | None = None) -> None:
        """Put a block into a sequence, which must not have these positions.

        Blocks of consecutive ranges, loaded in order into an empty sequence, leave the cache as if they had
        never left it. Rows of other types than the cache's are converted. A block that goes where the
        `Llama` stands, at n_tokens of sequence 0, takes the place of leftovers there, as in `Llama.eval`, and
        n_tokens then covers it.

        Args:
            block: from `export`, of this or another context of the same model.
            seq: the sequence.
            at: position of the block's first token; None is where it was. Another one turns K (RoPE).

        Raises:
            ValueError: the block does not fit the model, the sequence or the room there is. Nothing changed.
            UnsupportedModelError: the model keeps more than rows of tokens (recurrent layers, M-RoPE).
        """
        address = self._address
        block = KVBlock.from_arrays(block.describe(), block.to_arrays())
        shift = 0 if at is None else at - block.p0
        if not -block.p0 <= shift <= INT32_MAX - block.p1:
            raise ValueError(f"at={at}: use a position from 0 to {INT32_MAX - len(block)}")
        follows = seq == 0 and block.p0 + shift == self._llama.n_tokens
        drop_from = self._llama.n_tokens if follows else -1
        groups = [_native_group(group) for group in block.groups]
        _core.import_rows(address, seq, groups, shift, drop_from)
        if follows:
            self._append_tokens(block.tokens)
        if seq == 0 and not (follows and shift == 0 and self._has_types_of(block)):
            self.limit_exact(block.p0 + shift)

    # --- sequences ---

    @property
    def used(self) -> int:
        """Cells that hold a token; one that several sequences share counts once. 0 where all layers keep a
        state instead.
        """
        if _llama_cpp.is_recurrent(self._llama):
            return 0
        return int(_core.stats(self._address)["n_cells_used"])

    @property
    def can_cut(self) -> bool:
        """Whether part of a sequence can be removed: not where recurrent layers keep a state of all of it."""
        return not (_llama_cpp.is_recurrent(self._llama) or _llama_cpp.is_hybrid(self._llama))

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved: not with recurrent layers nor M-RoPE, and with sliding-window
        layers only where swa_full=True.
        """
        memory = self._memory
        return bool(memory) and self.can_cut and bool(llama_cpp.llama_memory_can_shift(memory))

    def positions(self, seq: int = 0) -> tuple[int, int]:
        """Lowest and highest position that all layers still hold of a sequence; (-1, -1) when it is empty."""
        memory = self._memory
        self._check_sequence("seq", seq)
        low = llama_cpp.llama_memory_seq_pos_min(memory, seq)
        return int(low), int(llama_cpp.llama_memory_seq_pos_max(memory, seq))

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
        n = self._llama.n_tokens
        if seq == 0 and p0 < n:
            if p1 < 0 or p1 >= n:
                self._llama.n_tokens = p0
            elif p1 > p0:
                self.limit_exact(p0)

    @exclusive
    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        """Let sequence `target` have the positions [p0, p1) of `source`, instead of its own there. In a
        unified cache both share the cells; otherwise the rows are copied, of whole sequences only.

        The `Llama` does not follow what is copied into its sequence 0.

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
        if target == 0:
            self.limit_exact(0)

    @exclusive
    def shift(self, seq: int, p0: int, p1: int, by: int) -> None:
        """Add `by` to the positions [p0, p1) of a sequence; K is turned accordingly before the next decode.

        Cells have one position: those that sequences share (see `copy`) move in all of them. Where sequence 0
        is one of the others, the `Llama` begins anew: its n_tokens is 0.

        Raises:
            UnsupportedModelError: positions cannot be moved (see `can_shift`).
            ValueError: there is no such sequence or range, or it would begin below 0 or end too high.
        """
        self._check_range(seq, p0, p1)
        if not self.can_shift:
            raise UnsupportedModelError(
                "this model's positions cannot be moved (recurrent, M-RoPE or sliding-window layers; with "
                "the last set swa_full=True)"
            )
        end = self.positions(seq)[1] + 1 if p1 < 0 else p1
        if p0 + by < 0 or end + by > INT32_MAX:
            raise ValueError(f"by={by} moves [{p0}, {end}) out of the range of positions")
        if seq == 0:
            self._shift_tokens(p0, min(end, self._llama.n_tokens), by)
        before = self.positions(0)
        llama_cpp.llama_memory_seq_add(self._memory, seq, p0, p1, by)
        if seq != 0 and self.positions(0) != before:
            self._llama.n_tokens = 0

    @exclusive
    def keep(self, seq: int) -> None:
        """Remove all other sequences.

        Raises:
            ValueError: there is no such sequence.
        """
        self._check_sequence("seq", seq)
        llama_cpp.llama_memory_seq_keep(self._memory, seq)
        if seq != 0:
            self._llama.n_tokens = 0

    @exclusive
    def clear(self) -> None:
        """Remove all sequences."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._llama.n_tokens = 0

    def _check_sequence(self, field: str, seq: int) -> None:
        n_seq_max = self._llama.context_params.n_seq_max
        if not 0 <= seq < n_seq_max:
            raise ValueError(f"{field}={seq}: this context has the sequences 0 to {n_seq_max - 1}")

    def _check_range(self, seq: int, p0: int, p1: int) -> None:
        self._check_sequence("seq", seq)
        if not 0 <= p0 <= INT32_MAX or p1 > INT32_MAX or 0 <= p1 < p0:
            raise ValueError(f"[{p0}, {p1}) is no range of positions")

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
        """The `Llama`'s tokens of sequence 0 move as the rows do."""
        llama = self._llama
        if p0 >= end:
            return
        if end + by > len(llama.input_ids):
            raise ValueError(f"by={by} moves position {end - 1} beyond the context of {len(llama.input_ids)}")
        llama.input_ids[p0 + by : end + by] = llama.input_ids[p0:end].copy()
        if end == llama.n_tokens:
            llama.n_tokens = end + by
        self.limit_exact(min(p0, p0 + by))

    # --- which rows are exact ---

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation of tokens behind n_tokens, on one thread: what it does to the exact rows."""
        with self.busy.waiting():
            self._exact.before_eval(self._llama.n_tokens, self.window_is_whole)
            try:
                yield
            finally:
                self._exact.after_eval(self._llama.n_tokens)

    def _append_tokens(self, tokens: npt.NDArray[np.int32]) -> None:
        """The KV of these tokens was loaded behind what is there: go on after them."""
        llama = self._llama
        end = min(llama.n_tokens + len(tokens), len(llama.input_ids))
        llama.input_ids[llama.n_tokens : end] = tokens[: end - llama.n_tokens]
        self._exact.loaded(llama.n_tokens, end)
        llama.n_tokens = end

    def _has_types_of(self, block: KVBlock) -> bool:
        """The block's rows need no conversion here."""
        layers = self._layers()
        return all(
            (layer.type_k, layer.type_v, layer.equalization)
            == (layers[layer.il].type_k, layers[layer.il].type_v, layers[layer.il].equalization)
            for group in block.groups
            for layer in group.layers
        )

    @exclusive
    def window_is_whole(self, n: int) -> bool:
        """Cut sequence 0 at position n; whether the query there then finds in F16 what a sequence that was
        never longer has.
        """
        config = self.config
        if not isinstance(config, MixedKVConfig):
            return True
        llama_cpp.llama_memory_seq_rm(self._memory, 0, n, -1)  # as the evaluation that follows does
        for layer in {layer["group"]: layer for layer in _core.layers(self._address)}.values():
            positions, hot = _core.read_tiers(self._address, layer["il"], 0, 0, n)
            wanted = (positions >= config.window.begin(n)) | (positions < config.sink_tokens)
            if not hot[wanted].all():
                return False
        return True

    def _known_tokens(self, seq: int, p0: int, p1: int) -> npt.NDArray[np.int32]:
        if seq != 0 or self._llama.n_tokens < p1:
            raise ValueError(
                f"tokens: give the ids at [{p0}, {p1}) of seq={seq}: this Llama did not see them"
            )
        return self._llama.input_ids[p0:p1]

    def _layers(self) -> dict[int, LayerStats]:
        return {layer["il"]: layer_stats(layer) for layer in _core.layers(self._address)}


def _row_group(group: _core.RowGroup) -> RowGroup:
    layers = []
    for layer in group["layers"]:
        names = {"type_k": type_name(layer["type_k"]), "type_v": type_name(layer["type_v"])}
        values: dict[str, Any] = {**layer, **names}
        layers.append(LayerRows(**values))
    arrays: dict[str, Any] = {**group, "layers": tuple(layers)}
    return RowGroup(**arrays)


def _native_group(group: RowGroup) -> dict[str, Any]:
    layers = []
    for layer in group.layers:
        values = {field.name: getattr(layer, field.name) for field in fields(layer)}
        values |= {"type_k": ggml_type(layer.type_k), "type_v": ggml_type(layer.type_v)}
        layers.append({name: _packed(value) for name, value in values.items()})
    arrays = {name: _packed(array) for name, array in group.arrays().items()}
    return {**arrays, "layers": layers}


def _packed(value: Any) -> Any:
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


def _check_capacity(field: str, value: int, capacity: int) -> None:
    if value > capacity:
        raise ValueError(
            f"{field}={value} is more than the {capacity} this cache was made with: "
            f"make the Llama with a larger {field}"
        )
