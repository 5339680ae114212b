"""A `Llama` to which things are done, and what each of its sequences must hold after them."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import Llama
from mixedkv.config import parse_kv
from mixedkv.model.packaged_model import SMOLLM2
from support.cache.crossing.lineage import Lineage, Reference, evaluate, pos_max, window_of
from support.cache.harness import rel_rms
from support.cache.hidden import hidden
from support.models import zoo

N_SEQ, N_CTX, MOST = 3, 1152, 330  # a sequence has MOST tokens: all have room in one pool and in streams

# RMS of a row of logits from the reference's, relative to their spread. What is compared did the same sums in
# another order, after which some elements are quantised to the next step: 1e-2 at most with 8 bits, 6e-2 with
# fewer. A row that was never computed, or is another token's, is 0.2 and more away.
TOLERANCE = {"f16": 2e-2, "q8_0": 4e-2, "coarse": 0.15}


# Routed experts: rounding makes a token's choice of them another one now and then. They are not streamed.
EXPERTS = ("qwen3moe", "glm4moe", "gpt-oss", "llama4", "qwen3next")


class FindingError(AssertionError):
    """What a step did is wrong."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is crossed: a family of the zoo, a kind of cache, and how the context is laid out."""

    family: str
    kv: str = "f16"
    streamed: bool = False
    unified: bool = True
    swa_full: bool = False
    n_batch: int = 64
    n_ubatch: int = 16

    @property
    def tolerance(self) -> float:
        setting = parse_kv(self.kv)
        kinds = {setting.type_k, setting.type_v}
        if kinds <= {"f16", "q8_0"}:
            return TOLERANCE["q8_0" if "q8_0" in kinds else "f16"]
        return TOLERANCE["coarse"]

    @property
    def coarse(self) -> bool:
        """Whether a row is cold or hot makes more of a difference than rounding."""
        return self.tolerance == TOLERANCE["coarse"]

    @property
    def shares_window(self) -> bool:
        """Sequences take F16 rows from each other."""
        return self.kv.endswith("attention=fused")

    def __str__(self) -> str:
        flags = [name for name in ("streamed", "unified", "swa_full") if getattr(self, name)]
        return " ".join([self.family, self.kv, *flags, f"{self.n_batch}/{self.n_ubatch}"])


def opened(path: Path, setup: Setup, **options: Any) -> Llama:
    shape: dict[str, Any] = {
        "n_ctx": N_CTX if setup.unified else N_CTX * N_SEQ,
        "n_batch": setup.n_batch,
        "n_ubatch": setup.n_ubatch,
        "n_seq_max": N_SEQ,
        "kv_unified": setup.unified,
        "swa_full": setup.swa_full,
        "n_threads": 1,
        "n_threads_batch": 1,
        "logits_all": True,
        "verbose": False,
    }
    with warnings.catch_warnings(), hidden(hot_budget="" if setup.shares_window else "all"):
        warnings.simplefilter("ignore")
        return Llama(path, kv=setup.kv, **{**shape, **options})


class Subject:
    """The context under test.

    Args:
        path: of the model; streamed layers are read from a copy of it.
        folder: for that copy, and a store.
        same_steps: the reference evaluates in the steps and the layout of the subject, and logits must be the
            same to the bit.
    """

    def __init__(self, setup: Setup, path: Path, folder: Path, same_steps: bool = False) -> None:
        self.setup, self.folder = setup, folder
        self.path = Path(shutil.copy(path, folder / path.name)) if setup.streamed else path
        streams = {"stream_layers": _n_layers(path), "memory": "8GiB"} if setup.streamed else {}
        self.llm = opened(self.path, setup, **streams)
        alone = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 1, "kv_unified": False}
        reference = opened(path, replace(setup, streamed=False), **({} if same_steps else alone))
        self.reference = Reference(reference, same_steps)
        self.same_steps = same_steps
        self.rotates = bool(self.llm.kv.can_shift)
        self.cuts = self.llm.kv.can_cut
        # how a sliding window looks after a cut depends on how its tokens came
        self.slides = self.llm.kv.sliding_window > 0 and not setup.swa_full
        self.clear()

    def clear(self) -> None:
        """Begin again, with the window that the cache was made with."""
        if (window := window_of(self.reference.llm)) is not None:
            setting = parse_kv(self.setup.kv)
            window = setting.window.threshold, setting.window.group_size, setting.window.sink_tokens
            for llm in (self.llm, self.reference.llm):
                llm.kv.set_window(
                    quantization_threshold=window[0], group_size=window[1], sink_tokens=window[2]
                )
        self.llm.kv.clear()
        self.llm.reset()
        self.lines = [self.empty() for _ in range(N_SEQ)]
        self.share: set[frozenset[int]] = set()  # sequences that may have cells in common
        self.n_compared = 0
        self.loaded = False  # seq 0 has been through a state, of which nothing is vouched for

    def close(self) -> None:
        self.llm.close()
        self.reference.llm.close()

    def empty(self) -> Lineage:
        return Lineage(window=window_of(self.llm))

    # --- sequences ---

    def follows(self, seq: int) -> bool:
        """Whether the `Llama` itself can go on with the sequence."""
        line = self.lines[seq]
        if seq != 0:
            return False
        if self.llm.n_tokens != line.end and line.whole and self.llm.kv.positions(0) == (0, line.end - 1):
            self.llm.kv.assume(line.tokens, 0)
        return self.llm.n_tokens == line.end

    def shares(self, seq: int) -> bool:
        return any(seq in pair for pair in self.share)

    def drop(self, seq: int) -> None:
        """The sequence has been removed."""
        self.lines[seq] = self.empty()
        self.share = {pair for pair in self.share if seq not in pair}
        if seq == 0:
            self.loaded = False

    def evaluate(self, seq: int, tokens: Sequence[int]) -> np.ndarray:
        """Logits of all tokens; the lineage gets those that are there afterwards, also when this raises."""
        line, follows = self.lines[seq], self.follows(seq)
        first = line.end
        try:
            if follows:
                self.llm.eval(tokens)
                return self.llm.scores[first : first + len(tokens)].copy()
            return evaluate(self.llm, tokens, first, seq)
        finally:
            end = self.llm.n_tokens if follows else pos_max(self.llm, seq) + 1
            line.eval(list(tokens[: max(0, end - first)]))
            if end < first or end > first + len(tokens):
                raise FindingError(
                    f"sequence {seq} ends at {end}: evaluated were [{first}, {first + len(tokens)})"
                )

    def go_on(self, seq: int, tokens: Sequence[int]) -> None:
        """Evaluate, and compare every row."""
        self.compare(seq, self.evaluate(seq, tokens))

    def compare(self, seq: int, got: np.ndarray) -> None:
        line = self.lines[seq]
        if self._was_short(seq):
            line.known = False
        window = window_of(self.llm)
        if line.known:
            self._same(got, self.reference.logits(line, len(got)), f"sequence {seq}")
        if seq == 0 and self.follows(0) and line.whole:
            self._compare_exact(line, got)
        elif seq != 0 and line.plain and line.whole and not line.known:
            self._same(got, self.reference.fresh(line.tokens, window, len(got)), f"sequence {seq}")

    def _compare_exact(self, line: Lineage, got: np.ndarray) -> None:
        exact, n = self.llm.kv.exact_tokens, self.llm.n_tokens
        if exact < n and line.plain and not self.loaded:
            raise FindingError(f"exact_tokens={exact} of {n}, of tokens that were evaluated in order")
        first = n - len(got)
        if exact > first and not line.plain:
            fresh = self.reference.fresh(line.tokens[:exact], window_of(self.llm), exact - first)
            self._same(got[: exact - first], fresh, f"exact_tokens={exact} of {n}, but they")

    def _was_short(self, seq: int) -> bool:
        return self.llm.kv.short_from()[seq] >= 0

    def _same(self, got: np.ndarray, want: np.ndarray, what: str) -> None:
        far = [rel_rms(a, b) for a, b in zip(got, want, strict=True)]
        self.n_compared += len(far)
        if self.same_steps:
            wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not np.array_equal(a, b)]
        else:
            wrong = [i for i, distance in enumerate(far) if not distance < self.setup.tolerance]
        experts = self.setup.family in EXPERTS and not self.same_steps
        if len(wrong) > (max(1, len(far) // 10) if experts else 0):
            raise FindingError(
                f"{what}: {len(wrong)} of {len(far)} rows of logits are wrong, the first at {wrong[0]}; "
                f"at most {max(far):.2g} off"
            )

    def touched(self, seq: int, *, cut: bool = False) -> None:
        """The sequence lost rows in its middle or at its end: where F16 rows are, or rows of sliding windows,
        now depends on more than what was done to it."""
        if self.slides or (cut and self.setup.coarse):
            self.lines[seq].known = False

    @contextmanager
    def refused(self, *errors: type[Exception]) -> Iterator[None]:
        """What may be refused must leave everything as it is."""
        before = [pos_max(self.llm, seq) for seq in range(N_SEQ)], self.llm.n_tokens
        try:
            yield
        except errors:
            after = [pos_max(self.llm, seq) for seq in range(N_SEQ)], self.llm.n_tokens
            if before != after:
                raise FindingError(f"refused, but changed from {before} to {after}") from None


def model_file(family: str, folder: Path) -> Path:
    """Of a family of the zoo, "real" (SmolLM2 with F16 weights), or "deep": a Llama of more layers than the
    ring of a streamed model holds.
    """
    if family == "real":
        return SMOLLM2.f16()
    if family != "deep":
        return zoo.write(family, folder)
    path = folder / "deep.gguf"
    if not path.exists():
        zoo.decoder(zoo.Shape("deep", "llama", n_layer=6, kv_layers=tuple(range(6)))).write(path)
    return path


def _n_layers(path: Path) -> int:
    from mixedkv.model.gguf_file import n_layers, read_model_file

    return n_layers(read_model_file(path))


def state_of(llm: Llama, seq: int) -> bytes:
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, seq)
    buffer = (llama_cpp.ctypes.c_uint8 * size)()
    return bytes(buffer[: llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, size, seq)])


def put_state(llm: Llama, data: bytes, seq: int) -> bool:
    buffer = (llama_cpp.ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    return int(llama_cpp.llama_state_seq_set_data(llm.ctx, buffer, len(data), seq)) == len(data)
