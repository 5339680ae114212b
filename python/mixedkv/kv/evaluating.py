"""Evaluates tokens for a `Llama`. Rows count once the graph that writes them has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.config import KVSetting, MixedKVConfig
from mixedkv.errors import ContextLengthError, MissingRowsError, NotFiniteError, not_finite_at
from mixedkv.kv.rows import DOUBTED, Truth
from mixedkv.kv.sequence_state import SequenceState
from mixedkv.limits import INT32_MAX
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.batch import NO_CELLS, decode
from mixedkv.native.context_lock import exclusive
from mixedkv.tokens import as_tokens, check_tokens


class Evaluating(SequenceState):
    """The part of a `KVCache` that evaluates: in three ways, noting which rows are exact afterwards.

    `step` is for tokens at the end of sequence 0, which the `Llama` follows, `fill` for tokens between
    others, `decode` for a caller that keeps track of its sequences itself. Rows of an evaluation that did not
    end well, for whatever reason, are not counted.

    Args:
        check: returns what raises the reason why an evaluation ended early: a file that cannot be read, a
            signal's handler. None once the `Llama` is gone.
        busy: the context's lock.
    """

    def __init__(
        self,
        llama: llama_cpp.Llama,
        setting: KVSetting,
        check: Callable[[], Callable[[], None] | None],
        busy: _core.Gate,
    ) -> None:
        super().__init__(llama, setting, busy)
        self._find_check = check

    def _check(self) -> None:
        if (check := self._find_check()) is not None:
            check()

    # --- three ways to evaluate ---

    @contextmanager
    def step(self, tokens: Sequence[int]) -> Iterator[None]:
        """Evaluate `tokens`, in one llama_decode, after n_tokens of sequence 0, within this context
        manager.

        Once their graph has ended well they count, in n_tokens, input_ids and `exact_tokens`, even if a
        signal's handler raises after that. Otherwise all three stay as they were, and so does the sequence.

        Raises:
            MissingRowsError: the tokens would read rows that the sequence no longer has.
            NotFiniteError: they gave values that are no numbers.
            ModelReadError: layers are streamed, and the file cannot be read any more.
            KeyboardInterrupt: layers are streamed, and a signal's handler raised this, or something else.
        """
        llama = self._llama
        with self.busy.waiting():
            n = llama.n_tokens
            end = n + len(tokens)
            if n == 0:
                self._doubted.discard(0)
            if n and self._end() != n:
                self._check_rows(n)
            llama_cpp.llama_memory_seq_rm(self._memory, 0, n, -1)
            is_at_end = self._end() == n
            try:
                yield
                self._refuse_not_finite()
            except NotFiniteError:
                self._cut_back(n)
                raise
            except RuntimeError as error:  # llama_decode: the memory has taken back its last micro-batch
                llama.n_tokens = n
                llama_cpp.llama_memory_seq_rm(self._memory, 0, n, -1)
                self._check()
                if reason := self.refused():
                    raise MissingRowsError(reason) from error
                if str(error).endswith(f"returned {NO_CELLS}"):
                    raise ContextLengthError(
                        f"no room for {len(tokens)} tokens behind {n}: other sequences have the rest of the "
                        f"context: remove some (kv.remove), or raise n_ctx"
                    ) from error
                raise
            except BaseException:
                if not is_at_end or self._end() != end:
                    llama.n_tokens = n
                    llama_cpp.llama_memory_seq_rm(self._memory, 0, n, -1)
                    raise
                llama.input_ids[n:end] = tokens
                llama.n_tokens = end
                raise

    def _cut_back(self, n: int) -> None:
        """Remove what sequence 0 has from position `n` on, or all of it where the model keeps a state of the
        whole, and what its cells held.
        """
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, n, -1):
            llama_cpp.llama_memory_seq_rm(self._memory, 0, -1, -1)
            n = 0
        self._llama.n_tokens = n
        self.clear_unused()

    # --- values that are no numbers ---

    def take_not_finite(self) -> dict[int, int]:
        """Return the sequences whose evaluation gave values that are no numbers since the last call, each
        with the position of the first such token. Remove them from there on, then call `clear_unused`.
        """
        return _core.take_not_finite(self._address)

    def clear_unused(self) -> None:
        """Zero what is left in cells that no sequence has. llama.cpp's attention multiplies it by 0, which
        makes NaN of NaN.
        """
        _core.clear_unused(self._address)

    def _refuse_not_finite(self) -> None:
        """Raise an error if the latest evaluation gave values that are no numbers."""
        if found := self.take_not_finite():
            raise not_finite_at(min(found.values()))

    def decode(self, batch: Any, wanted: npt.NDArray[np.uint32] | None = None) -> int:
        """Evaluate a llama_batch in sequences whose tokens the caller knows; return llama_decode's code.

        0: its rows count. NO_CELLS: nothing has changed. Any other: drop the batch's sequences, which may
        have rows of some of its micro-batches, and see `Llama.decode_error`.

        Args:
            wanted: tokens whose logits are read, a bit each; others may be -inf. None for all.
        """
        context = _llama_cpp.context(self._llama)
        if wanted is None:
            return decode(context, batch)
        _core.want_logits(_llama_cpp.address(context), wanted)
        try:
            return decode(context, batch)
        finally:
            _core.want_logits(_llama_cpp.address(context), None)

    @contextmanager
    def causal(self, value: bool) -> Iterator[None]:
        """While inside, let tokens attend to earlier tokens only, or to all."""
        context = _llama_cpp.context(self._llama)
        llama_cpp.llama_set_causal_attn(context, value)
        try:
            yield
        finally:
            llama_cpp.llama_set_causal_attn(context, True)

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
        ids = np.array(check_tokens("tokens", tokens, self._llama.n_vocab()), np.int32)
        at = np.ascontiguousarray(positions, np.int32)
        if ids.ndim != 1 or ids.shape != at.shape:
            raise ValueError(
                f"positions has the shape {at.shape}: give one for each of the tokens {ids.shape}"
            )
        last = -1 if last_layer is None else last_layer
        try:
            watched = _core.fill(self._address, seq, ids, at, logits, last, watch)
            self._refuse_not_finite()
            return watched
        except NotFiniteError:
            for pos in at.tolist():
                llama_cpp.llama_memory_seq_rm(self._memory, seq, pos, pos + 1)
            self.clear_unused()
            raise
        except (KeyboardInterrupt, RuntimeError):
            self._check()
            raise

    # --- which rows are exact ---

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
        return min(n, self.exact(0, self._llama.input_ids[:n]))

    @exclusive
    def exact(self, seq: int, tokens: npt.ArrayLike, p0: int = 0) -> int:
        """Return how many leading rows of a sequence are those that evaluating its tokens from the start
        gives; 0 or more.

        Args:
            tokens: ids of its tokens from position `p0` on: rows of others do not count.
        """
        ids = as_tokens(tokens)
        return 0 if self._is_doubted(seq) else _core.count_computed(self._address, seq, p0, ids)

    @exclusive
    def truth(self, seq: int, tokens: npt.ArrayLike, p0: int = 0) -> Truth:
        """Return what the rows of a sequence from position `p0` on are, uint8 [n], see `mixedkv.kv.rows`.

        Args:
            tokens: their ids, [n]; rows of others, and those that are not there, are doubted.
        """
        known = _core.get_truth(self._address, seq, p0, as_tokens(tokens))
        return np.full_like(known, DOUBTED) if self._is_doubted(seq) else known

    def _is_doubted(self, seq: int) -> bool:
        """Return whether a sequence is doubted of a model whose layers keep no rows that could say so."""
        none = np.empty(0, np.int32)
        return seq in self._doubted and _core.count_computed(self._address, seq, 0, none) == INT32_MAX

    @exclusive
    def limit_exact(self, p: int) -> None:
        """Mark rows of sequence 0 from `p` on as inexact, after llama_cpp's own functions moved rows."""
        self._doubt(0, True)
        _core.limit_truth(self._address, 0, p, -1, DOUBTED)

    def refused(self) -> str:
        """Return why the latest evaluation was refused: rows that its tokens read are missing. "" if it was
        not.
        """
        return _core.refused(self._address)

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

    @exclusive
    def short_from(self) -> list[int]:
        """Return for every sequence the first position that was evaluated without an F16 row of its window;
        -1 where there is none. Its rows are not exact from there on.
        """
        if not isinstance(self._setting, MixedKVConfig):
            return [-1] * self._llama.context_params.n_seq_max
        return _core.short_from(self._address)

    def _check_rows(self, n: int) -> None:
        """Refuse to evaluate the token at `n` of sequence 0 without rows and states that it reads. Rows that
        `remove` took from layers which keep all of them are not missed.
        """
        if not self._memory:  # of a model that reads its input at once
            return
        cut = self._find_cut(0, n)
        if self._end() < n or min(cut.window, cut.state) != n:
            raise MissingRowsError(
                f"the token at position {n} reads rows or a state that sequence 0 no longer has; it can "
                f"go on at {cut.n}: set n_tokens to that and evaluate from there, or call reset(). "
                f"swa_full=True keeps all rows of sliding windows"
            )

    def _end(self) -> int:
        return self.positions(0)[1] + 1

    def _append_tokens(self, tokens: npt.NDArray[np.int32]) -> None:
        """Append tokens whose KV was loaded behind what is there, so that evaluation goes on after them."""
        llama = self._llama
        end = min(llama.n_tokens + len(tokens), len(llama.input_ids))
        llama.input_ids[llama.n_tokens : end] = tokens[: end - llama.n_tokens]
        llama.n_tokens = end
