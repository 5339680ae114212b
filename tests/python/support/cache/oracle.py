"""What the cache promises, computed independently in double precision for the zoo's muted models.

Every row is kept twice, rounded to F16 and quantised, with a flag that says whether its F16 copy is still
held; each query picks one of the two by the hot-set rule. No code is shared with the library but the file
of weights.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from support.cache.harness import Ctx, Mixed, Uniform
from support.models.zoo import Gguf

QUANTS = {
    name: getattr(gguf.GGMLQuantizationType, name.upper())
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
}
QUANTISED = (*QUANTS, "lm4", "tc3")
LEVELS = np.array([-127, -97, -77, -60, -46, -33, -21, -10, 1, 13, 24, 37, 50, 66, 84, 109], dtype=np.float32)


@functools.cache
def hadamard(n: int) -> np.ndarray:
    """Orthonormal Walsh-Hadamard matrix in Sylvester's order; its own inverse."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def rotate(x: np.ndarray, n: int) -> np.ndarray:
    """x [..., head], each run of n elements rotated; n = 0: as it is."""
    return (x.reshape(*x.shape[:-1], -1, n) @ hadamard(n)).reshape(x.shape) if n else x


def lm4(x: np.ndarray) -> np.ndarray:
    """x [n, 64] F32 as lm4 has it: of several scales that whose levels, best scaled, have the least error."""
    top = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    best, gain = np.zeros_like(x), np.zeros((len(x), 1), np.float32)
    for times in np.array([0.85, 0.9, 0.95, 1, 1.05], np.float32):
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = np.rint(np.clip(x * (1 / (times * (top / -127))), -127, 127))
            level = LEVELS[np.searchsorted(np.floor((LEVELS[1:] + LEVELS[:-1]) / 2), np.nan_to_num(whole))]
        xy = (x * level).reshape(len(x), 4, 16).sum(axis=1, dtype=np.float64).sum(axis=1, keepdims=True)
        yy = (level * level).sum(axis=1, keepdims=True)
        better = xy * xy / yy > gain
        gain = np.where(better, xy * xy / yy, gain)
        best = np.where(better, (xy / yy).astype(np.float16) * level.astype(np.float64), best)
    return best


# of tc3: levels, scales that are tried, where the t-th element of a path lies, and the set of levels that
# a state's next element has if its bit is 0 and 1
TRELLIS = np.array([-126, -92, -71, -54, -41, -28, -17, -5, 5, 17, 28, 41, 54, 71, 92, 126], np.float32)
TRIES = np.array([0.84, 0.95, 1.06, 1.2], np.float32)
ORDER = [4 * (t & 4 | (t & 1) << 1 | (t & 2) >> 1) + t // 8 for t in range(32)]
SETS = [[(bit ^ state >> 1) << 1 | state & 1 for bit in (0, 1)] for state in range(4)]


def tc3(x: np.ndarray) -> np.ndarray:
    """x [n, 64] F32 as tc3 has it: for each scale the best path through the trellis, then the best scale."""
    usual = np.sqrt(np.add.accumulate(x * x, axis=1)[:, -1] / np.float32(64)) / np.float32(51)
    inverse = 1 / (TRIES * np.where(usual > 0, usual, 1)[:, None])
    halves = [_best_paths(half[:, ORDER, None] * inverse[:, None]) for half in (x[:, :32], x[:, 32:])]
    best = ((halves[0][1] + halves[1][1]) * TRIES * TRIES).argmin(axis=1)
    level = np.empty_like(x)
    for first, (index, _) in zip((0, 32), halves, strict=True):
        level[:, first + np.array(ORDER)] = TRELLIS[np.take_along_axis(index, best[:, None, None], 2)[..., 0]]
    xy, yy = (np.add.accumulate(product, axis=1)[:, -1:] for product in (x * level, level * level))
    return np.where(usual[:, None] > 0, (xy / yy).astype(np.float16) * level.astype(np.float64), 0)


def _best_paths(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of levels for y [n, 32, tries], in the order of the path, and squared errors [n, tries]."""
    away = np.square(y[..., None] - TRELLIS).reshape(*y.shape, 4, 4)  # by a level's set in the last axis
    nearest, away = away.argmin(axis=3) * 4 + np.arange(4), away.min(axis=3)
    cost = np.full((y.shape[0], y.shape[2], 4), 1e30, np.float32)
    cost[..., 0] = 0
    steps = []
    for t in range(32):
        ends = [
            np.stack([cost[..., old] + away[:, t, :, SETS[old][new & 1]] for old in (new >> 1, new // 2 + 2)])
            for new in range(4)
        ]
        steps.append(np.stack([(end[1] < end[0]) for end in ends], axis=-1))
        cost = np.stack([end.min(axis=0) for end in ends], axis=-1)
    state, least = cost.argmin(axis=-1), cost.min(axis=-1)
    index = np.empty(y.shape, np.int64)
    for t in reversed(range(32)):
        old = state // 2 + 2 * np.take_along_axis(steps[t], state[..., None], -1)[..., 0]
        level = np.array(SETS)[old, state & 1]
        index[:, t] = np.take_along_axis(nearest[:, t], level[..., None], -1)[..., 0]
        state = old
    return index, least


# of Q4_0 and Q5_0: the greatest integer, and what the largest element becomes in the scales that are tried
INTEGERS = {"q4_0": (7, [-8.45, -8.15, -7.85, -7.55]), "q5_0": (15, [-16.45, -16.15, -15.85, -15.55])}


def least_error(x: np.ndarray, kind: str, margin: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """x [n, 32] F32 as attention=fused stores it in Q4_0 or Q5_0: in the scale of least error.

    Returns:
        The values, and for each block whether another integer or scale was within `margin` steps.
    """
    high, tries = INTEGERS[kind]
    most, least = x.max(axis=1, initial=0), (-x).max(axis=1, initial=0)
    largest = np.where(most > least, most, -least)[:, None, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.array(tries, np.float32)[:, None] / largest  # [n, tries, 1]
        y = np.nan_to_num(inverse * x[:, None], nan=high)
        integers = np.rint(np.minimum(y, high))
        xy, yy = _sum_by_halves(integers * x[:, None]), _sum_by_halves(integers * integers)
        gains = np.nan_to_num(xy * xy / yy)
        best = gains.argmax(axis=1)[:, None]
        scales = _sum_by_halves(x * x)[:, None] / xy
        scale = np.where(gains.max(axis=1, keepdims=True) > 0, np.take_along_axis(scales, best, 1), 0)
    values = np.take_along_axis(integers, best[..., None], 1)[:, 0] * scale.astype(np.float16).astype(float)
    y = np.take_along_axis(np.minimum(y, high), best[..., None], 1)[:, 0]
    second = np.sort(gains, axis=1)[:, -2]
    close = (np.abs(y + 0.5 - np.round(y + 0.5)) < margin).any(axis=1)
    return values, close | (second > (1 - margin / 100) * gains.max(axis=1))


def _sum_by_halves(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, of 32, in the order of the kernels."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def stored(x: np.ndarray, kind: str, fused: bool = False) -> np.ndarray:
    """x [n_head, head] as it comes back from a cache of type `kind`; rows are quantised over all heads.

    Args:
        fused: attention=fused has stored it, not llama.cpp's SET_ROWS.
    """
    if kind == "f32":
        return x.astype(np.float32).astype(np.float64)
    if kind == "f16":
        return x.astype(np.float32).astype(np.float16).astype(np.float64)
    flat = np.ascontiguousarray(x, dtype=np.float32).reshape(1, -1)
    if kind == "lm4":
        return lm4(flat.reshape(-1, 64)).reshape(x.shape)
    if kind == "tc3":
        return tc3(flat.reshape(-1, 64)).reshape(x.shape)
    if fused and kind in INTEGERS:
        return least_error(flat.reshape(-1, 32), kind)[0].reshape(x.shape)
    return (
        gguf.quants.dequantize(gguf.quants.quantize(flat, QUANTS[kind]), QUANTS[kind])
        .reshape(x.shape)
        .astype(float)
    )


def on_a_step(x: np.ndarray, kind: str, fused: bool, margin: float = 1e-4) -> bool:
    """Whether an element lies within `margin` steps of where Q4_0 or Q5_0 changes its level."""
    blocks = x.reshape(-1, 32)
    if fused:
        return bool(least_error(blocks.astype(np.float32), kind, margin)[1].any())
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    middle = INTEGERS[kind][0] + 1
    level = blocks / (top / -middle) + middle + 0.5
    return bool((np.abs(level - np.round(level)) < margin).any())


def rope(x: np.ndarray, pos: int, kind: str, base: float = 10000.0) -> np.ndarray:
    """x [n_head, head] turned to position `pos`."""
    if kind == "none":
        return x
    half = x.shape[-1] // 2
    angle = pos * base ** (-np.arange(half) / half)
    c, s = np.cos(angle), np.sin(angle)
    out = np.empty_like(x)
    a, b = (x[:, 0::2], x[:, 1::2]) if kind == "norm" else (x[:, :half], x[:, half:])
    first, second = a * c - b * s, a * s + b * c
    if kind == "norm":
        out[:, 0::2], out[:, 1::2] = first, second
    else:
        out[:, :half], out[:, half:] = first, second
    return out


def rms_norm(x: np.ndarray, w: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w


@dataclass
class Row:
    pos: int
    seqs: set[int]
    held: bool
    k_hot: np.ndarray
    v_hot: np.ndarray
    k_cold: np.ndarray
    v_cold: np.ndarray
    shift: int = 0  # positions moved since K was last turned


class Oracle:
    """One layer's attention over a cache of rows; the interface of harness.Ctx as far as it goes."""

    parts = "kv"  # that the cache stores

    def __init__(
        self, model: Gguf, il: int, kv: Uniform | Mixed, *, n_seq_max: int = 1, unified: bool = False
    ) -> None:
        self.shape, self.il, self.kv = model.shape, il, kv
        self.n_stream = 1 if unified else n_seq_max
        self.streams: list[list[Row]] = [[] for _ in range(self.n_stream)]
        self.w = {name: data.astype(np.float64) for name, data in model.tensors.items()}
        self.keys = model.keys
        head = self.shape.head
        self.rot_k = (
            next(n for n in (256, 128, 64, 1) if head % n == 0) if kv.k in QUANTISED and head % 64 == 0 else 0
        )
        self.fused = isinstance(kv, Mixed) and kv.attention != "merged" and kv.slots > 0  # what stores rows
        self.scales = np.ones((1, head))  # of K, as the cache has them
        self.rot_v = 64 if kv.v in QUANTISED and head % 64 == 0 else 0

    def take_scales(self, ctx: Ctx) -> None:
        """Those that the context's cache stores K times; test_equalization.py says whether they are right."""
        if isinstance(self.kv, Mixed) and (scales := ctx.scales(self._kv_layer())) is not None:
            self.scales = scales.astype(np.float64)

    def copy(self) -> Oracle:
        other = copy.copy(self)
        other.streams = copy.deepcopy(self.streams)
        return other

    # --- the model ---

    def _embed(self, token: int) -> np.ndarray:
        x = self.w["token_embd.weight"][token]
        return x * np.sqrt(self.shape.n_embd) if self.shape.arch.startswith("gemma") else x

    def _part(self, name: str, il: int) -> np.ndarray | None:
        return self.w.get(f"blk.{il}.{name}")

    def _heads(self, name: str, x: np.ndarray, il: int) -> np.ndarray:
        return (self.w[f"blk.{il}.{name}.weight"] @ x).reshape(-1, self.shape.head)

    def _kv_layer(self) -> int:
        """The layer whose K and V layer `il` reads: itself, or the one whose rows it shares (gemma4)."""
        shared = int(self.keys.get("attention.shared_kv_layers", 0))  # type: ignore[call-overload]
        return self.il if self.il < self.shape.n_layer - shared else self.shape.n_layer - shared - 1

    def _new_kv(self, x: np.ndarray, pos: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V [n_head_kv, head] of a token, in the basis of the cache."""
        il = self._kv_layer()
        x = rms_norm(x, self._part("attn_norm.weight", il))
        k, v = self._heads("attn_k", x, il), self._heads("attn_v", x, il)
        if (norm := self._part("attn_k_norm.weight", il)) is not None:
            k = rms_norm(k, norm)
        if self.shape.arch == "gemma4":
            v = rms_norm(v)
        k = rope(k, pos, self.shape.rope) * self.scales
        return rotate(k, self.rot_k), rotate(v, self.rot_v)

    def _new_row(self, x: np.ndarray, pos: int, seqs: Sequence[int]) -> Row:
        k, v = self._new_kv(x, pos)
        hot = stored(k, "f16"), stored(v, "f16")
        cold = stored(k, self.kv.k, self.fused), stored(v, self.kv.v, self.fused)
        return Row(pos, set(seqs), True, *hot, *cold)

    def _turned(self, k: np.ndarray, pos: int) -> np.ndarray:
        return rope(k, pos, self.shape.rope)

    def _query(self, x: np.ndarray, pos: int) -> np.ndarray:
        q = self._heads("attn_q", rms_norm(x, self._part("attn_norm.weight", self.il)), self.il)
        if (norm := self._part("attn_q_norm.weight", self.il)) is not None:
            q = rms_norm(q, norm)
        q = rope(q, pos, self.shape.rope)
        return rotate(q / np.repeat(self.scales, len(q) // len(self.scales), axis=0), self.rot_k)

    def _attend(self, q: np.ndarray, pos: int, rows: list[Row]) -> np.ndarray:
        """q [n_head, head] over the rows it sees -> [n_head * head]."""
        s = self.shape
        k, v = (np.stack([getattr(r, f"{part}_{self._tier(pos, r)}") for r in rows]) for part in "kv")
        group = s.n_head // k.shape[1]
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        score = np.einsum("hd,jhd->hj", q, k) * (1.0 if s.arch == "gemma4" else s.head**-0.5)
        if (cap := self.keys.get("attn_logit_softcapping")) is not None:
            score = cap * np.tanh(score / cap)  # type: ignore[operator]
        if s.arch == "refact":
            slope = 2.0 ** (-8.0 * np.arange(1, s.n_head + 1) / s.n_head)
            score = score - slope[:, None] * np.array([abs(pos - r.pos) for r in rows])
        sinks = self._part("attn_sinks.weight", self.il)
        top = score.max(axis=1) if sinks is None else np.maximum(score.max(axis=1), sinks)
        p = np.exp(score - top[:, None])
        total = p.sum(axis=1) + (0.0 if sinks is None else np.exp(sinks - top))
        out = np.einsum("hj,jhd->hd", p / total[:, None], v)
        return rotate(out, self.rot_v).reshape(-1)

    def _tier(self, q: int, row: Row) -> str:
        return "hot" if isinstance(self.kv, Mixed) and row.held and self.kv.is_hot(q, row.pos) else "cold"

    def _logits(self, x: np.ndarray, attn: np.ndarray) -> np.ndarray:
        y = self.w[f"blk.{self.il}.attn_output.weight"] @ attn
        for il in range(self.shape.n_layer):  # biases of muted layers are muted too
            if (bias := self._part("attn_output.bias", il)) is not None and il == self.il:
                y = y + bias
        if self.shape.arch.startswith("gemma"):
            y = rms_norm(y, self._part("post_attention_norm.weight", self.il))
        norm = "token_embd_norm" if self.shape.arch == "lfm2" else "output_norm"
        x = rms_norm(x + y, self.w[f"{norm}.weight"])
        logits = self.w.get("output.weight", self.w["token_embd.weight"]) @ x
        if (cap := self.keys.get("final_logit_softcapping")) is not None:
            logits = cap * np.tanh(logits / cap)  # type: ignore[operator]
        return logits

    # --- tokens whose rows F32 rounding cannot move to another step of Q4_0 or Q5_0 ---

    def safe(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """The tokens; one whose row has an element next to a step is exchanged for the next that has none."""
        out = []
        for token, pos in zip(tokens, positions, strict=True):
            while any(
                on_a_step(x, kind, self.fused) for x, kind in self._unrounded(token, pos) if kind in INTEGERS
            ):
                token = 3 + (token - 2) % 256
            out.append(token)
        return out

    def _unrounded(self, token: int, pos: int) -> list[tuple[np.ndarray, str]]:
        k, v = self._new_kv(self._embed(token), pos)
        return [(k, self.kv.k), (v, self.kv.v)]

    # --- decoding and sequence operations, as harness.Ctx ---

    def _index(self, seq: int) -> int:
        return seq if self.n_stream > 1 else 0

    def _stream(self, seq: int) -> list[Row]:
        return self.streams[self._index(seq)]

    def rows(self, seq: int = 0) -> list[Row]:
        return sorted((r for r in self._stream(seq) if seq in r.seqs), key=lambda r: r.pos)

    def pos_max(self, seq: int = 0) -> int:
        return max((r.pos for r in self.rows(seq)), default=-1)

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int] | int | None = None,
        seq_ids: Sequence[Sequence[int]] | int = 0,
    ) -> np.ndarray:
        seqs = [[seq_ids]] * len(tokens) if isinstance(seq_ids, int) else [list(s) for s in seq_ids]
        if positions is None:
            positions = self.pos_max(seqs[0][0]) + 1
        if isinstance(positions, int):
            positions = range(positions, positions + len(tokens))
        self.settle()
        out = []
        for token, pos, ids in zip(tokens, positions, seqs, strict=True):
            x = self._embed(token)
            self._stream(ids[0]).append(self._new_row(x, pos, ids))
            seen = [r for r in self._stream(ids[0]) if ids[0] in r.seqs and r.pos <= pos]
            out.append(self._logits(x, self._attend(self._query(x, pos), pos, seen)))
        self.release({self._index(ids[0]) for ids in seqs})
        return np.stack(out)

    def release(self, streams: Iterable[int], drafts: bool = True) -> None:
        """Lets go of the F16 copies that no sequence holds, seen from its last token."""
        if not isinstance(self.kv, Mixed):
            return
        keeps = self.kv.is_held if drafts else self.kv.is_hot
        for stream in (self.streams[s] for s in streams):
            last = {seq: self.pos_max(seq) for r in stream for seq in r.seqs}
            for r in stream:
                r.held = r.held and any(keeps(last[seq], r.pos) for seq in r.seqs)

    def restored(self, seq: int = -1) -> None:
        """What a state brings back: of the rows still held, those in the hot set of the sequence's last
        token.
        """
        streams = range(self.n_stream) if seq < 0 else [self._index(seq)]
        others = [r for s in streams for r in self.streams[s] if r.held and seq >= 0 and seq not in r.seqs]
        self.release(streams)
        for r in others:
            r.held = True

    def cut_out(self, seq: int, p0: int, p1: int) -> None:
        """What a block takes along: of the rows in its range, those in the hot set of the last token."""
        assert isinstance(self.kv, Mixed)
        last = self.pos_max(seq)
        for r in self._range(seq, p0, p1):
            r.held = r.held and self.kv.is_hot(last, r.pos)

    def set_window(self, threshold: int, group: int, sinks: int) -> None:
        assert isinstance(self.kv, Mixed)
        self.kv = self.kv.with_(threshold=threshold, group=group, sinks=sinks)
        self.release(range(self.n_stream), drafts=False)

    def settle(self) -> None:
        """Turns the keys of moved rows and quantises them again: at the next decode, or when the cache
        is read.
        """
        for r in (r for stream in self.streams for r in stream if r.shift):
            for tier, kind in (("k_hot", "f16"), ("k_cold", self.kv.k)):
                k = self._turned(rotate(getattr(r, tier), self.rot_k), r.shift)
                if self.shape.rope != "none":
                    setattr(r, tier, stored(rotate(k, self.rot_k), kind))
            r.shift = 0

    def rm(self, seq: int, p0: int = -1, p1: int = -1) -> None:
        for stream in self.streams if seq < 0 else [self._stream(seq)]:
            for r in stream:
                if p0 <= r.pos and (p1 < 0 or r.pos < p1):
                    r.seqs -= r.seqs if seq < 0 else {seq}
            stream[:] = [r for r in stream if r.seqs]

    def cp(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        if self.n_stream == 1:
            for r in self._range(src, p0, p1):
                r.seqs.add(dst)
        else:
            rows = copy.deepcopy(self.streams[src])
            for r in rows:
                r.seqs = {dst}
            self.streams[dst][:] = rows

    def keep(self, seq: int) -> None:
        stream = self._stream(seq)
        stream[:] = [r for r in stream if seq in r.seqs]
        for r in stream:
            r.seqs = {seq}

    def add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        stream = self._stream(seq)
        for r in self._range(seq, p0, p1):
            r.pos, r.shift = r.pos + delta, r.shift + delta
        stream[:] = [r for r in stream if r.pos >= 0]

    def div(self, seq: int, p0: int, p1: int, d: int) -> None:
        for r in self._range(seq, p0, p1):
            # llama_kv_cells::pos_div turns K by old - new, seq_add by new - old; a cache does as its host
            # does
            r.pos, r.shift = r.pos // d, r.shift + r.pos - r.pos // d

    def _range(self, seq: int, p0: int, p1: int) -> list[Row]:
        return [r for r in self._stream(seq) if seq in r.seqs and p0 <= r.pos and (p1 < 0 or r.pos < p1)]

    def context_shift(self, keep: int, discard: int, seq: int = 0) -> None:
        end = self.pos_max(seq) + 1
        self.rm(seq, keep, keep + discard)
        self.add(seq, keep + discard, end, -discard)

    def clear(self) -> None:
        for stream in self.streams:
            stream.clear()


class LatentOracle(Oracle):
    """Latent attention (MLA) as it is computed on what is cached: keys of one KV head, whose first elements
    are the values. The matrices that would expand both act on Q and on the output.
    """

    parts = "k"

    def __init__(self, model: Gguf, il: int, kv: Uniform | Mixed, **options: Any) -> None:
        super().__init__(model, il, kv, **options)
        self.rank = int(self.keys["attention.kv_lora_rank"])  # type: ignore[call-overload]
        # what llama.cpp leaves as it is
        self.rot_k = self.rot_v = 64 if isinstance(kv, Mixed) and kv.k in QUANTISED else 0

    def _matrix(self, name: str) -> np.ndarray:
        return self.w[f"blk.{self.il}.{name}.weight"]

    def _turned(self, k: np.ndarray, pos: int) -> np.ndarray:
        return np.concatenate([k[:, : self.rank], rope(k[:, self.rank :], pos, self.shape.rope)], axis=1)

    def _new_kv(self, x: np.ndarray, pos: int) -> tuple[np.ndarray, np.ndarray]:
        k = self._matrix("attn_kv_a_mqa") @ rms_norm(x, self._matrix("attn_norm"))
        k[: self.rank] = rms_norm(k[: self.rank], self._matrix("attn_kv_a_norm"))
        return rotate(self._turned(k[None], pos), self.rot_k), np.zeros((1, 32))

    def _unrounded(self, token: int, pos: int) -> list[tuple[np.ndarray, str]]:
        return super()._unrounded(token, pos)[:1]

    def _query(self, x: np.ndarray, pos: int) -> np.ndarray:
        low = self._matrix("attn_q_a") @ rms_norm(x, self._matrix("attn_norm"))
        q = self._matrix("attn_q_b") @ rms_norm(low, self._matrix("attn_q_a_norm"))
        expand = self._matrix("attn_k_b")  # [n_head, rank, d_nope]
        q = q.reshape(self.shape.n_head, -1)
        self.scale = q.shape[1] ** -0.5
        q_nope, q_rope = np.split(q, [expand.shape[2]], axis=1)
        q_nope, q_rope = np.einsum("hrd,hd->hr", expand, q_nope), rope(q_rope, pos, self.shape.rope)
        return rotate(np.concatenate([q_nope, q_rope], axis=1), self.rot_k)

    def _attend(self, q: np.ndarray, pos: int, rows: list[Row]) -> np.ndarray:
        k = np.stack([getattr(r, f"k_{self._tier(pos, r)}")[0] for r in rows])
        score = q @ k.T * self.scale
        p = np.exp(score - score.max(axis=1, keepdims=True))
        out = rotate(p / p.sum(axis=1, keepdims=True) @ k[:, : self.rank], self.rot_v)
        return np.einsum("hdr,hr->hd", self._matrix("attn_v_b"), out).reshape(-1)


def oracle_of(model: Gguf, il: int, kv: Uniform | Mixed, **options: Any) -> Oracle:
    kind = LatentOracle if "attention.kv_lora_rank" in model.keys else Oracle
    return kind(model, il, kv, **options)
