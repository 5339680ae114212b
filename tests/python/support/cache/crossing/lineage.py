"""What made the rows of a sequence, and a context that makes them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import Llama
from mixedkv.chunks.gate import logits_at
from mixedkv.config import MixedKVConfig
from mixedkv.engine.batch.batch import Batch

Window = tuple[int, int, int]


@dataclass
class Lineage:
    """All that was done to a sequence since it was empty.

    Attributes:
        window: of the cache when the sequence began; None for a uniform cache.
        acts: ("eval", tokens), ("cut", n), ("remove", p0, p1), ("shift", p0, by), ("fill", tokens, positions)
            or ("window", *window).
        tokens, positions: what it holds now.
        known: whether doing the same elsewhere gives the same rows.
        partly: some tokens of its end may be missing: a step failed, and earlier micro-batches stay.
    """

    window: Window | None = None
    acts: list[tuple[Any, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    known: bool = True

    def copy(self) -> Lineage:
        return replace(self, acts=list(self.acts), tokens=list(self.tokens), positions=list(self.positions))

    @property
    def end(self) -> int:
        return self.positions[-1] + 1 if self.positions else 0

    @property
    def whole(self) -> bool:
        """It has every position from 0 on."""
        return self.end == len(self.positions)

    @property
    def plain(self) -> bool:
        """It was evaluated in order, and that is all."""
        return self.known and all(act[0] == "eval" for act in self.acts)

    def eval(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        self.positions += range(self.end, self.end + len(tokens))
        self.tokens += tokens
        self.acts.append(("eval", list(tokens)))

    def fill(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        both = sorted([*zip(self.positions, self.tokens, strict=True), *zip(positions, tokens, strict=True)])
        self.positions, self.tokens = [p for p, _ in both], [t for _, t in both]
        self.acts.append(("fill", list(tokens), list(positions)))

    def remove(self, p0: int, p1: int) -> None:
        kept = [(p, t) for p, t in zip(self.positions, self.tokens, strict=True) if not p0 <= p < p1]
        if len(kept) == len(self.positions):
            return
        self.acts.append(("remove", p0, p1 if p1 < self.end else -1))
        self.positions, self.tokens = [p for p, _ in kept], [t for _, t in kept]

    def shift(self, p0: int, by: int) -> None:
        self.positions = [p + by if p >= p0 else p for p in self.positions]
        self.acts.append(("shift", p0, by))


def evaluate(llm: Llama, tokens: Sequence[int], first: int, seq: int = 0) -> np.ndarray:
    """Logits [n, n_vocab] of tokens evaluated behind the `Llama`'s back; RuntimeError names what failed."""
    found, batch = [], Batch(llm.n_batch)
    for i in range(0, len(tokens), llm.n_batch):
        part = tokens[i : i + llm.n_batch]
        batch.clear()
        batch.add(part, first + i, seq, logits=True, every=True)
        if code := batch.decode(llm.ctx):
            raise llm.decode_error(code)
        found += [logits_at(llm, j) for j in range(len(part))]
    return np.stack(found)


class Reference:
    """A context that does what a lineage says, in one sequence, with nothing else in between.

    Args:
        same_steps: evaluate in the steps of the lineage. Otherwise evaluations that follow each other are
            one, and rows must not depend on how they were cut.
    """

    def __init__(self, llm: Llama, same_steps: bool = False) -> None:
        self.llm, self.same_steps = llm, same_steps

    def logits(self, lineage: Lineage, n: int) -> np.ndarray:
        """Of the last `n` tokens, which an evaluation or a fill at the end put there."""
        kv = self.llm.kv
        kv.clear()
        self.llm.reset()
        if lineage.window is not None:
            self._set_window(lineage.window)
        end, out = 0, np.empty((0, 0), np.float32)
        for name, *args in lineage.acts if self.same_steps else _merged(lineage.acts):
            if name == "eval" and self.same_steps:
                self.llm.eval(args[0])
                out = self.llm.scores[: self.llm.n_tokens].copy()
            elif name == "eval":
                out = evaluate(self.llm, args[0], end)
            elif name == "fill":
                kv.fill(args[0], args[1], 0, logits=True)
                out = logits_at(self.llm, -1)[None]
            elif name == "remove":
                kv.remove(0, *args)
            elif name == "shift":
                kv.shift(0, args[0], -1, args[1])
            elif name == "window":
                self._set_window(tuple(args))
            end = kv.positions(0)[1] + 1
        return out[-n:]

    def fresh(self, tokens: Sequence[int], window: Window | None, n: int) -> np.ndarray:
        return self.logits(Lineage(window=window, acts=[("eval", list(tokens))]), n)

    def _set_window(self, window: Window) -> None:
        threshold, group, sinks = window
        self.llm.kv.set_window(quantization_threshold=threshold, group_size=group, sink_tokens=sinks)


def _merged(acts: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the acts with evaluations that follow each other made one."""
    merged: list[tuple[Any, ...]] = []
    for act in acts:
        if merged and act[0] == merged[-1][0] == "eval":
            merged[-1] = ("eval", [*merged[-1][1], *act[1]])
        else:
            merged.append(act)
    return merged


def window_of(llm: Llama) -> Window | None:
    setting = llm.kv.config
    if not isinstance(setting, MixedKVConfig):
        return None
    return setting.quantization_threshold, setting.group_size, setting.sink_tokens


def pos_max(llm: Llama, seq: int) -> int:
    return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), seq))
