"""The live KV cache of a `Llama`: what it holds, what attention reads, and the window's settings."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig, check_window, ggml_type, type_name
from mixedkv.kv.block import KVBlock, LayerRows, RowGroup
from mixedkv.kv.stats import KVStats, LayerStats, SequenceStats
from mixedkv.limits import INT32_MAX

if TYPE_CHECKING:
    from mixedkv.llama import Llama

Basis = Literal["attention", "model"]


class KVCache:
    """The cache of one `Llama`, as its property `kv`. Use it on the thread that decodes.

    Every method raises RuntimeError once the `Llama` is closed.
    """

    def __init__(self, llama: Llama, setting: KVSetting) -> None:
        self._llama = llama
        self._setting = setting

    def __repr__(self) -> str:
        return f"<KVCache {self._setting}>"

    @property
    def _address(self) -> int:
        context = getattr(self._llama, "_ctx", None)
        if context is None or context.ctx is None:
            raise RuntimeError("this Llama is closed: its KV cache is gone")
        return int(context.ctx)

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
            self._llama._exact.limit(0)

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
        return self._llama._exact.count(self._llama.n_tokens)

    def limit_exact(self, p: int) -> None:
        """Say that rows of sequence 0 from `p` on are not exact. For whoever moves rows through llama_cpp."""
        self._llama._exact.limit(p)

    def layer(self, il: int) -> LayerView:
        """One layer's rows.

        Raises:
            IndexError: the layer has no KV cache; the message lists those that have one.
        """
        layers = self._layers()
        if il not in layers:
            known = ", ".join(map(str, layers)) or "none"
            raise IndexError(f"layer {il} has no KV cache; layers that have one: {known}")
        return LayerView(self, layers[il])

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
            self._llama._append_tokens(block.tokens)
        if seq == 0 and not (follows and shift == 0 and self._has_types_of(block)):
            self.limit_exact(block.p0 + shift)

    def _has_types_of(self, block: KVBlock) -> bool:
        """The block's rows need no conversion here."""
        layers = self._layers()
        return all(
            (layer.type_k, layer.type_v) == (layers[layer.il].type_k, layers[layer.il].type_v)
            for group in block.groups
            for layer in group.layers
        )

    def _window_is_whole(self, n: int) -> bool:
        """The query at position n of sequence 0 finds in F16 what a sequence that was never cut has there."""
        config = self.config
        if not isinstance(config, MixedKVConfig):
            return True
        self._llama._ctx.kv_cache_seq_rm(0, n, -1)  # as the evaluation that follows does
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
        return {layer["il"]: _layer_stats(layer) for layer in _core.layers(self._address)}


class LayerView:
    """The rows of one layer, in order of position, as the query at the last position reads them. Copies."""

    def __init__(self, cache: KVCache, info: LayerStats) -> None:
        self._cache = cache
        self.info = info

    def __repr__(self) -> str:
        return f"<LayerView {self.info}>"

    def k(
        self, seq: int = 0, p0: int = 0, p1: int = -1, basis: Basis = "attention"
    ) -> npt.NDArray[np.float32]:
        """Keys of positions [p0, p1) of a sequence, float32 [n_tokens, n_head_kv, head_size_k].

        p1 < 0 means the end. llama.cpp rotates a quantised cache by a Hadamard matrix, which changes no
        score. `basis` is "attention" for rows as attention reads them, "model" for rows turned back to
        what the model computed.

        Raises:
            LookupError: the cache has no such sequence.
        """
        return self._rows("k", seq, p0, p1, basis)

    def v(
        self, seq: int = 0, p0: int = 0, p1: int = -1, basis: Basis = "attention"
    ) -> npt.NDArray[np.float32]:
        """Values, float32 [n_tokens, n_head_kv, head_size_v]; otherwise as `k`."""
        return self._rows("v", seq, p0, p1, basis)

    def positions(self, seq: int = 0, p0: int = 0, p1: int = -1) -> npt.NDArray[np.int32]:
        """Positions of the rows, int32 [n_tokens]."""
        return _core.read_tiers(self._cache._address, self.info.il, seq, p0, p1)[0]

    def hot(self, seq: int = 0, p0: int = 0, p1: int = -1) -> npt.NDArray[np.bool_]:
        """Which of the rows are read in F16, bool [n_tokens]."""
        return _core.read_tiers(self._cache._address, self.info.il, seq, p0, p1)[1]

    def _rows(
        self, which: Literal["k", "v"], seq: int, p0: int, p1: int, basis: Basis
    ) -> npt.NDArray[np.float32]:
        if basis not in ("attention", "model"):
            raise ValueError(f"basis={basis!r} is unknown: use 'attention' or 'model'")
        unrotate = basis == "model"
        return _core.read_rows(self._cache._address, self.info.il, seq, which, p0, p1, unrotate)[0]


def _row_group(group: _core.RowGroup) -> RowGroup:
    layers = (
        LayerRows(**{**layer, "type_k": type_name(layer["type_k"]), "type_v": type_name(layer["type_v"])})
        for layer in group["layers"]
    )
    return RowGroup(**{**group, "layers": tuple(layers)})


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


def _layer_stats(layer: _core.Layer) -> LayerStats:
    return LayerStats(
        il=layer["il"],
        mixed=layer["mixed"],
        fused=layer["fused"],
        n_head_kv=layer["n_head_kv"],
        head_size_k=layer["n_embd_head_k"],
        head_size_v=layer["n_embd_head_v"],
        n_cells=layer["n_cells"],
        type_k=type_name(layer["type_k"]),
        type_v=type_name(layer["type_v"]),
        bytes_cold=layer["bytes_cold"],
        bytes_hot=layer["bytes_hot"],
    )
