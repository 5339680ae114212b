"""What can be done to a `Subject`, each step with numbers that mean something whatever it holds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from llama_cpp import StoppingCriteriaList

from mixedkv.chunks.gate import logits_at
from mixedkv.engine import PromptCache
from mixedkv.errors import UnsupportedModelError
from mixedkv.store import KVStore
from support.cache.crossing.injections import Calls, RaisedError, abort_callback, cut_short, signal_after
from support.cache.crossing.lineage import pos_max, window_of
from support.cache.crossing.subject import MOST, N_SEQ, FindingError, Subject, put_state, state_of
from support.cache.harness import prompt, rel_rms

Step = tuple[Any, ...]
REFUSALS = (UnsupportedModelError, ValueError, LookupError)


class Player:
    """Plays steps on a subject. A step that means nothing now does nothing."""

    def __init__(self, subject: Subject) -> None:
        self.s, self.llm, self.kv = subject, subject.llm, subject.llm.kv
        subject.clear()
        self.saved: tuple[Any, ...] | None = None
        self.sequence: tuple[Any, ...] | None = None
        self.point: tuple[Any, ...] | None = None
        self.store = KVStore(None)
        self.chunks: PromptCache | None = None

    def play(self, step: Step) -> None:
        name, *args = step
        getattr(self, name)(*args)

    def finish(self) -> None:
        """Go on with every sequence."""
        for seq in range(N_SEQ):
            self.eval(seq, 5, 7)

    def _room(self, seq: int, n: int) -> bool:
        return self.s.lines[seq].end + n <= MOST

    def _at(self, seq: int, fraction: float) -> int:
        return round(fraction * self.s.lines[seq].end)

    # --- evaluation ---

    def eval(self, seq: int, n: int, seed: int) -> None:
        if not self._room(seq, n):
            self.end(seq)
        self.s.go_on(seq, prompt(n, seed))

    def fill(self, seq: int, n: int, seed: int, logits: int) -> None:
        """Tokens behind the end."""
        line = self.s.lines[seq]
        if not self._room(seq, n) or not line.end or not self.s.cuts or n > 64:
            return
        tokens, at = prompt(n, seed), list(range(line.end, line.end + n))
        follows, exact = self.s.follows(seq), self.kv.exact_tokens
        try:
            self.kv.fill(tokens, at, seq, logits=bool(logits))
        except LookupError:
            if not self.s.slides:
                raise
            return  # the window's rows have taken the cells
        plain = line.plain
        line.eval(tokens) if plain else line.fill(tokens, at)
        if self.s.slides:
            line.known = line.known and plain
        if follows:
            if line.whole and self.kv.positions(0)[0] == 0:
                self.kv.assume(line.tokens, exact)
            else:
                self._unfollow(seq)
            self.s.loaded = self.s.loaded or not line.plain
        if logits and (plain or line.known):
            want = self.s.reference.logits(line, 1)
            self.s._same(logits_at(self.llm, -1)[None], want, f"fill in sequence {seq}")
        self.s.loaded = self.s.loaded or seq == 0

    def _unfollow(self, seq: int) -> None:
        """Its tokens are known to nobody but us."""
        if seq == 0:
            self.llm.n_tokens = 0

    def refill(self, seq: int, a: float, b: float) -> None:
        """The middle goes, and is evaluated again in its place."""
        first, last = sorted((self._at(seq, a), self._at(seq, b)))
        line, last = self.s.lines[seq], min(last, first + 60, self.s.lines[seq].end - 1)
        if not self.s.cuts or last <= first or not line.whole or self.s.shares(seq):
            return
        follows, known = self.s.follows(seq), line.tokens[first:last]
        self.kv.remove(seq, first, last)
        line.remove(first, last)
        self.s.touched(seq, cut=True)
        try:
            self.kv.fill(known, list(range(first, last)), seq)
        except LookupError:
            if not self.s.slides:
                raise
            return  # the window's rows have taken the cells
        line.fill(known, list(range(first, last)))
        if follows and self.kv.positions(0)[0] == 0:
            self.kv.assume(line.tokens, first)

    def early(self, seq: int, n: int, layer: int) -> None:
        """Rows up to a layer only: they are those of a whole evaluation, and cost less."""
        line, layers = self.s.lines[seq], self.kv.layers
        if not self._room(seq, n) or not self.s.cuts or len(layers) < 2 or n > 64:
            return
        last, first = layers[min(layer, len(layers) - 2)].il, line.end
        at, calls, rows = list(range(first, first + n)), [], []
        for stop in (None, last):
            counter = Calls()
            try:
                if self.s.setup.streamed:
                    self.kv.fill(prompt(n, 5), at, seq, last_layer=stop)
                else:
                    with abort_callback(self.llm, counter):
                        self.kv.fill(prompt(n, 5), at, seq, last_layer=stop)
            except ValueError:
                if stop is None:
                    raise
                return
            calls.append(counter.n)
            rows.append(np.asarray(self.kv.layer(last).k(seq, first, first + n)).reshape(n, -1))
            self.kv.remove(seq, first)
            self.s.touched(seq, cut=True)
            line.acts.append(("fill", prompt(n, 5), at))  # its F16 rows are those of tokens that went
            line.acts.append(("remove", first, -1))
        if not first:
            self.s.drop(seq)
        if (far := rel_rms(rows[1], rows[0])) > self.s.setup.tolerance:
            raise FindingError(f"rows of layer {last} are {far:.2g} off after a fill with last_layer={last}")
        if calls[0] and calls[1] > 0.9 * calls[0]:
            raise FindingError(f"last_layer={last}: {calls[1]} nodes were computed, of {calls[0]} in all")

    def generate(self, n: int, raises_at: int) -> None:
        """The likeliest tokens; a stopping criterion raises at some."""
        line = self.s.lines[0]
        if not self._room(0, n + 4) or not self.s.follows(0) or not self.s.cuts or not line.whole:
            return
        calls = 0

        def stop(_tokens: Any, _logits: Any) -> bool:
            nonlocal calls
            calls += 1
            if calls == raises_at:
                raise RaisedError
            return calls > n

        before = list(line.tokens)
        with suppress(RaisedError):
            for _ in self.llm.generate(
                [*line.tokens, *prompt(4, n)], temp=0.0, stopping_criteria=StoppingCriteriaList([stop])
            ):
                if calls > n:
                    break
        self._follow(before)

    def _follow(self, before: Sequence[int]) -> None:
        """What the `Llama` did to sequence 0 on its own."""
        line, now = self.s.lines[0], self.llm.input_ids[: self.llm.n_tokens].tolist()
        common = next(
            (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
            min(len(before), len(now)),
        )
        if common < len(before):
            line.remove(common, line.end)
            self.s.touched(0, cut=True)
        line.eval(now[common:])

    # --- sequences ---

    def copy(self, src: int, dst: int) -> None:
        if src == dst or not self.s.lines[src].end:
            return
        self.kv.remove(dst)
        self.s.drop(dst)
        self.kv.copy(src, dst)
        self.s.lines[dst] = self.s.lines[src].copy()
        if self.s.setup.unified:
            others = {seq for pair in self.s.share if src in pair for seq in pair}
            self.s.share |= {frozenset((dst, seq)) for seq in {src, *others} - {dst}}
        if dst == 0:
            self.llm.n_tokens, self.s.loaded = 0, True

    def rollback(self, seq: int, fraction: float) -> None:
        self._remove(seq, self._at(seq, fraction), self.s.lines[seq].end)

    def cut(self, seq: int, a: float, b: float) -> None:
        first, last = sorted((self._at(seq, a), self._at(seq, b)))
        self._remove(seq, first, min(last, self.s.lines[seq].end - 1))

    def _remove(self, seq: int, first: int, last: int) -> None:
        line = self.s.lines[seq]
        if last <= first or not line.end:
            return
        with self.s.refused(UnsupportedModelError):
            self.kv.remove(seq, first, -1 if last == line.end else last)
            line.remove(first, last)
            self.s.touched(seq, cut=True)
            if not line.positions:
                self.s.drop(seq)

    def shift(self, seq: int, keep: int, fraction: float) -> None:
        """As a full context moves: some tokens behind the first go, and the rest moves down."""
        line = self.s.lines[seq]
        n = line.end
        drop = max(1, round(fraction * (n - keep - 4)))
        if n < 12 + keep or not line.whole or self.s.shares(seq) or not self.s.rotates:
            return
        self._remove(seq, keep, keep + drop)
        with self.s.refused(UnsupportedModelError):
            self.kv.shift(seq, keep + drop, -1, -drop)
            line.shift(keep + drop, -drop)

    def keep(self, seq: int) -> None:
        self.kv.keep(seq)
        for other in range(N_SEQ):
            if other != seq:
                self.s.drop(other)

    def end(self, seq: int) -> None:
        self.kv.remove(seq)
        self.s.drop(seq)

    def window(self, threshold: int, group: int, sinks: int) -> None:
        if self.s.setup.kv.startswith("mixed"):
            group = max(1, min(group, threshold))
            self.kv.set_window(quantization_threshold=threshold, group_size=group, sink_tokens=sinks)
            for line in self.s.lines:
                if line.acts:
                    line.acts.append(("window", threshold, group, sinks))
                    line.known = line.known and not self.s.setup.coarse
                else:
                    line.window = window_of(self.llm)

    # --- what leaves and comes back ---

    def save(self) -> None:
        self.saved = (
            self.llm.save_state(),
            [line.copy() for line in self.s.lines],
            set(self.s.share),
            window_of(self.llm),
        )

    def load(self, clear: int) -> None:
        if self.saved is None or self.saved[3] != window_of(self.llm):
            return
        state, lines, share, _ = self.saved
        if clear:
            self.llm.reset()
            self.kv.clear()
        self.llm.load_state(state)
        self.s.lines, self.s.share, self.s.loaded = [line.copy() for line in lines], set(share), True
        self._look(*range(N_SEQ))

    def take_state(self, seq: int) -> None:
        if self.s.lines[seq].end:
            self.sequence = state_of(self.llm, seq), self.s.lines[seq].copy(), window_of(self.llm)

    def give_state(self, seq: int) -> None:
        if self.sequence is None or self.sequence[2] != window_of(self.llm):
            return
        data, line, _ = self.sequence
        self.end(seq)
        if not put_state(self.llm, data, seq):
            raise FindingError("the state of a sequence that this context saved is refused")
        self.s.lines[seq] = line.copy()
        if seq == 0:
            self.llm.n_tokens, self.s.loaded = 0, True
        self._look(seq)

    def block(self, src: int, dst: int, fraction: float) -> None:
        """All rows leave in two blocks, and come back in the same sequence or in another."""
        line, at = self.s.lines[src].copy(), self._at(src, fraction)
        if not line.whole or not line.end or (dst != src and self.s.lines[dst].end):
            return
        parts = [(0, at), (at, line.end)] if self.s.cuts and 0 < at < line.end else [(0, line.end)]
        try:
            blocks = [self.kv.export(src, a, b, line.tokens[a:b]) for a, b in parts]
        except REFUSALS as error:
            if self.s.slides:
                return  # rows behind the window are gone
            raise FindingError(f"export: {error}") from error
        exact = self.kv.exact_tokens if src == 0 and self.s.follows(0) else 0
        self.end(src)
        for block in blocks:
            self.kv.load(block, dst, more=block is not blocks[-1])
        self.s.drop(dst)
        self.s.lines[dst] = line
        if dst == 0:
            self.s.loaded = self.s.loaded or src != 0 or exact < line.end
        if len(blocks) > 1:
            self.s.touched(dst)
        self._look(dst)

    def stored(self, seq: int, other: int) -> None:
        """Saved in a store, and restored in another context, which believes it."""
        line = self.s.lines[seq]
        if line.end < 40 or not line.whole or not (line.plain or (seq == 0 and self.s.follows(0))):
            return
        with suppress(UnsupportedModelError):
            self.store.save(self.llm, line.tokens, seq)
        self.s.reference.llm.kv.clear()
        self.s.reference.llm.reset()
        llm = self.s.reference.llm if other else self.llm
        if not other:
            self.end(seq)
        found = self.store.restore(llm, line.tokens, 0 if other else seq, exact_only=True)
        if not found.hit:
            return
        n = found.n_tokens
        if not other:
            line = line.copy()
            if n < line.end:
                line.remove(n, line.end)
            self.s.lines[seq] = line
            if n < line.end:
                self.s.touched(seq, cut=True)
            return
        extra = prompt(3, 8)
        from support.cache.crossing.lineage import evaluate

        got = evaluate(llm, extra, n)
        want = self.s.reference.fresh([*line.tokens[:n], *extra], window_of(self.llm), 3)
        self.s._same(got, want, "restored from the store as exact")

    def checkpoint(self, seq: int) -> None:
        line = self.s.lines[seq]
        self.point = None
        if line.whole and line.end and (point := self.kv.checkpoint(seq)) is not None:
            self.point = point, seq, line.copy(), window_of(self.llm)

    def resume(self, dst: int) -> None:
        if self.point is None or self.point[3] != window_of(self.llm):
            return
        point, src, line, _ = self.point
        if (
            self.s.lines[src].tokens[: line.end] != line.tokens
            or self.s.lines[src].acts[: len(line.acts) - 1] != line.acts[:-1]
        ):
            return
        if not self.s.setup.unified and dst != src:
            return  # whole sequences only
        try:
            self.kv.resume(point, line.end, src, dst)
        except ValueError:
            self.s.drop(dst)
            if self.s.cuts and not self.s.slides:
                raise
            return
        if dst != src:
            self.s.drop(dst)
            if self.s.setup.unified:
                self.s.share |= {frozenset((dst, src))}
        self.s.lines[dst] = line.copy()
        if dst == 0:
            self.llm.n_tokens, self.s.loaded = 0, True

    def passage(self, seed: int) -> None:
        """A prompt whose middle was computed elsewhere."""
        if not self.s.rotates or (self.s.setup.swa_full is False and self.kv.sliding_window):
            return
        document, before, behind = prompt(64, 100 + seed), prompt(20, seed), prompt(20, 50 + seed)
        exact = 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if self.chunks is None:
                    options = {"chunk_size": 32, "repair": "seam", "max_kld": 99.0, "check": 0.0}
                    self.chunks = PromptCache(self.llm, self.store, reuse="chunks", threaded=False, **options)
                self.chunks.warm([document])
                done = self.chunks.prefill([*before, *document, *behind])
                exact = done.chunks.n_exact if done.chunks is not None else done.prompt_tokens
        except REFUSALS:
            if self.s.follows(0):
                return  # refused before anything was done
        self.s.drop(0)
        line = self.s.lines[0]
        line.eval(self.llm.input_ids[: self.llm.n_tokens].tolist())
        line.known, self.s.loaded = False, True
        if self.llm.n_tokens and self.kv.exact_tokens > exact:
            raise FindingError(f"exact_tokens={self.kv.exact_tokens}, and the prompt has {exact}")

    def _look(self, *seqs: int) -> None:
        for seq in seqs:
            if (got := pos_max(self.llm, seq) + 1) != self.s.lines[seq].end:
                raise FindingError(
                    f"sequence {seq} came back with {got} of {self.s.lines[seq].end} positions"
                )

    # --- faults ---

    def abort(self, seq: int, n: int, calls: int, raises: int) -> None:
        if self.s.setup.streamed or not self._room(seq, n):
            return
        with abort_callback(self.llm, Calls(calls, bool(raises))):
            self._fails(seq, prompt(n, calls), RuntimeError)

    def signal(self, seq: int, n: int, seconds: float) -> None:
        if self._room(seq, n):
            with suppress(RaisedError), signal_after(seconds):
                self._fails(seq, prompt(n, 9), RaisedError)

    def unreadable(self, seq: int, n: int, share: float) -> None:
        if self.s.setup.streamed and self._room(seq, n):
            with cut_short(self.s.path, share):
                self._fails(seq, prompt(n, 9), OSError)

    def _fails(self, seq: int, tokens: list[int], *errors: type[BaseException]) -> None:
        line = self.s.lines[seq]
        before, exact, follows = line.end, self.kv.exact_tokens, self.s.follows(seq)
        try:
            got = self.s.evaluate(seq, tokens)
        except errors:
            done = line.end - before
            if follows and done % self.s.setup.n_ubatch and done != len(tokens):
                raise FindingError(f"{done} of {len(tokens)} tokens stayed of a step that failed") from None
            if (left := pos_max(self.llm, seq) + 1) != line.end:
                raise FindingError(
                    f"positions up to {left} are left of a step that failed at {line.end}"
                ) from None
            if follows and self.kv.exact_tokens < line.end:
                self.s.loaded = True  # a signal between the end of a step and the note of it
            if follows and self.kv.exact_tokens < min(exact, before):
                raise FindingError(f"exact_tokens fell from {exact} to {self.kv.exact_tokens}") from None
        else:
            self.s.compare(seq, got)


def random_plan(rng: random.Random, n: int, signals: bool = True) -> list[Step]:
    """Steps of which faults and sequence operations are as frequent as evaluation. `signals` come at times
    that no plan repeats.
    """
    names = [name for name in _NAMES if signals or name != "signal"]
    return [_MAKERS[rng.choice(names)](rng) for _ in range(n)]


def _seq(rng: random.Random) -> int:
    return rng.choice((0, 0, 0, 1, 2))


_MAKERS: dict[str, Any] = {
    "eval": lambda r: ("eval", _seq(r), r.choice((1, 3, 20, 40, 70, 250)), r.randrange(999)),
    "fill": lambda r: ("fill", _seq(r), r.choice((1, 5, 40)), r.randrange(999), r.randrange(2)),
    "refill": lambda r: ("refill", _seq(r), round(r.random(), 2), round(r.random(), 2)),
    "early": lambda r: ("early", _seq(r), r.choice((5, 40)), r.randrange(2)),
    "generate": lambda r: ("generate", r.randrange(1, 6), r.randrange(8)),
    "copy": lambda r: ("copy", _seq(r), _seq(r)),
    "rollback": lambda r: ("rollback", _seq(r), round(r.random(), 2)),
    "cut": lambda r: ("cut", _seq(r), round(r.random(), 2), round(r.random(), 2)),
    "shift": lambda r: ("shift", _seq(r), r.choice((0, 4)), round(r.random(), 2)),
    "keep": lambda r: ("keep", _seq(r)),
    "end": lambda r: ("end", _seq(r)),
    "window": lambda r: ("window", r.choice((0, 8, 16, 24)), r.choice((1, 8)), r.choice((0, 3))),
    "save": lambda r: ("save",),
    "load": lambda r: ("load", r.randrange(2)),
    "take_state": lambda r: ("take_state", _seq(r)),
    "give_state": lambda r: ("give_state", _seq(r)),
    "block": lambda r: ("block", _seq(r), _seq(r), round(r.random(), 2)),
    "stored": lambda r: ("stored", _seq(r), r.randrange(2)),
    "checkpoint": lambda r: ("checkpoint", _seq(r)),
    "resume": lambda r: ("resume", _seq(r)),
    "passage": lambda r: ("passage", r.randrange(3)),
    "abort": lambda r: ("abort", _seq(r), r.choice((1, 3, 40, 100)), r.randrange(150), r.randrange(8) == 0),
    "signal": lambda r: ("signal", _seq(r), r.choice((3, 40, 100)), round(r.random() ** 3 * 0.03, 5)),
    "unreadable": lambda r: ("unreadable", _seq(r), r.choice((3, 40, 100)), round(r.random(), 2)),
}
_WEIGHTS = {
    "eval": 8,
    "abort": 3,
    "shift": 2,
    "copy": 2,
    "save": 2,
    "load": 2,
    "signal": 2,
    "unreadable": 2,
    "window": 0.4,
    "passage": 0.6,
}
_NAMES = [name for name in _MAKERS for _ in range(round(5 * _WEIGHTS.get(name, 1)))]
