"""Evaluates tokens for a `Llama`. Rows count once the graph that writes them has succeeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.errors import ContextLengthError, MissingRowsError, NotFiniteError, not_finite_at
from mixedkv.kv.cache_context import CacheContext
from mixedkv.kv.sequence_state import SequenceStates
from mixedkv.kv.validity import Validity
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.batch import NO_CELLS, decode
from mixedkv.tokens import check_tokens


class Evaluation:
    """Evaluates in three ways; rows count once their graph has ended well.

    `step` is for tokens at the end of sequence 0, which the `Llama` follows, `fill` for tokens between
    others, `decode` for a caller that keeps track of its sequences itself. Rows of an evaluation that did not
    end well, for whatever reason, are not counted.

    Args:
        check: returns what raises the reason why an evaluation ended early: a file that cannot be read, a
            signal's handler. None once the `Llama` is gone.
    """

    def __init__(
        self,
        context: CacheContext,
        states: SequenceStates,
        validity: Validity,
        check: Callable[[], Callable[[], None] | None],
    ) -> None:
        self._context, self._states, self._validity = context, states, validity
        self._find_check = check

    def _check(self) -> None:
        if (check := self._find_check()) is not None:
            check()

    # --- three ways to evaluate ---

    @contextmanager
    def step(self, tokens: Sequence[int]) -> Iterator[None]:
        """Evaluate `tokens`, in one llama_decode, after n_tokens of sequence 0, within this context
        manager.

        Once their graph has ended well they count, in n_tokens, input_ids and `KVCache.exact_tokens`, even if
        a signal's handler raises after that. Otherwise all three stay as they were, and so does the sequence.

        Raises:
            MissingRowsError: the tokens would read rows that the sequence no longer has.
            NotFiniteError: they gave values that are no numbers.
            ModelReadError: layers are streamed, and the file cannot be read any more.
            KeyboardInterrupt: layers are streamed, and a signal's handler raised this, or something else.
        """
        llama, context = self._context.llama, self._context
        with context.busy.acquire():
            n = llama.n_tokens
            end = n + len(tokens)
            if n == 0:
                self._validity.mark(0, False)
            if n and self._end() != n:
                self._check_rows(n)
            context.remove(0, n)
            is_at_end = self._end() == n
            try:
                yield
                self._refuse_not_finite()
            except NotFiniteError:
                self._cut_back(n)
                raise
            except RuntimeError as error:  # llama_decode: the memory has taken back its last micro-batch
                llama.n_tokens = n
                context.remove(0, n)
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
                    context.remove(0, n)
                    raise
                llama.input_ids[n:end] = tokens
                llama.n_tokens = end
                raise

    def _cut_back(self, n: int) -> None:
        """Remove what sequence 0 has from position `n` on, or all of it where the model keeps a state of the
        whole, and what its cells held.
        """
        if not self._context.remove(0, n):
            self._context.remove(0)
            n = 0
        self._context.llama.n_tokens = n
        self.clear_unused()

    # --- values that are no numbers ---

    def take_not_finite(self) -> dict[int, int]:
        """Return the sequences whose evaluation gave values that are no numbers since the last call, each
        with the position of the first such token. Remove them from there on, then call `clear_unused`.
        """
        return _core.take_not_finite(self._context.address)

    def clear_unused(self) -> None:
        """Zero what is left in cells that no sequence has. llama.cpp's attention multiplies it by 0, which
        makes NaN of NaN.
        """
        _core.clear_unused(self._context.address)

    def _refuse_not_finite(self) -> None:
        """Raise an error if the latest evaluation gave values that are no numbers."""
        if found := self.take_not_finite():
            raise not_finite_at(min(found.values()))

    def decode(self, batch: Any, needed_logits: npt.NDArray[np.uint32] | None = None) -> int:
        """Evaluate a llama_batch in sequences whose tokens the caller knows; return llama_decode's code.

        0: its rows count. NO_CELLS: nothing has changed. Any other: drop the batch's sequences, which may
        have rows of some of its micro-batches, and see `Llama.decode_error`.

        Args:
            needed_logits: tokens whose logits are read, a bit each; others may be -inf. None for all.
        """
        context = self._context.handle
        if needed_logits is None:
            return decode(context, batch)
        _core.want_logits(_llama_cpp.address(context), needed_logits)
        try:
            return decode(context, batch)
        finally:
            _core.want_logits(_llama_cpp.address(context), None)

    @contextmanager
    def causal(self, value: bool) -> Iterator[None]:
        """While inside, let tokens attend to earlier tokens only, or to all."""
        context = self._context.handle
        llama_cpp.llama_set_causal_attn(context, value)
        try:
            yield
        finally:
            llama_cpp.llama_set_causal_attn(context, True)

    def fill(
        self,
        tokens: npt.ArrayLike,
        positions: npt.ArrayLike,
        seq: int,
        logits: bool,
        last_layer: int | None,
        watch: int,
    ) -> npt.NDArray[np.float32]:
        """Evaluate tokens at positions that a sequence lacks, see `KVCache.fill`."""
        ids = np.array(check_tokens("tokens", tokens, self._context.llama.n_vocab()), np.int32)
        at = np.ascontiguousarray(positions, np.int32)
        if ids.ndim != 1 or ids.shape != at.shape:
            raise ValueError(
                f"positions has the shape {at.shape}: give one for each of the tokens {ids.shape}"
            )
        last = -1 if last_layer is None else last_layer
        try:
            watched = _core.fill(self._context.address, seq, ids, at, logits, last, watch)
            self._refuse_not_finite()
            return watched
        except NotFiniteError:
            for pos in at.tolist():
                self._context.remove(seq, pos, pos + 1)
            self.clear_unused()
            raise
        except (KeyboardInterrupt, RuntimeError):
            self._check()
            raise

    def refused(self) -> str:
        """Return why the latest evaluation was refused: rows that its tokens read are missing. "" if it was
        not.
        """
        return _core.refused(self._context.address)

    def _check_rows(self, n: int) -> None:
        """Refuse to evaluate the token at `n` of sequence 0 without rows and states that it reads. Rows that
        `remove` took from layers which keep all of them are not missed.
        """
        if not self._context.memory:  # of a model that reads its input at once
            return
        cut = self._states.find_cut(0, n)
        if self._end() < n or min(cut.window, cut.state) != n:
            raise MissingRowsError(
                f"the token at position {n} reads rows or a state that sequence 0 no longer has; it can "
                f"go on at {cut.n}: set n_tokens to that and evaluate from there, or call reset(). "
                f"swa_full=True keeps all rows of sliding windows"
            )

    def _end(self) -> int:
        return self._context.positions(0)[1] + 1
