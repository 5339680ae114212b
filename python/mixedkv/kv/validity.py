"""Records and answers what the rows of a live cache are: computed from which tokens, under which setting,
exact or not. The native library keeps it beside them.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.kv.block import KVBlock
from mixedkv.kv.cache_context import CacheContext
from mixedkv.kv.checkpoint import Checkpoint
from mixedkv.kv.row_setting import difference, name_of_model
from mixedkv.kv.rows import APPROXIMATE, UNVERIFIED, Validities, runs
from mixedkv.limits import INT32_MAX
from mixedkv.native.context_lock import exclusive
from mixedkv.tokens import as_tokens

_LOG = logging.getLogger("mixedkv.kv")
_NONE = np.empty(0, np.int32)


class Validity:
    """Records what rows are, and answers what they are. Nothing above the cache has to remember it."""

    def __init__(self, context: CacheContext) -> None:
        self._context, self.busy = context, context.busy
        self._unverified: set[int] = set()  # sequences, of models whose layers keep no rows that could say so
        self._model_name = ""

    # --- the setting that rows are computed under ---

    @property
    def setting(self) -> str:
        """The setting that rows are computed under now."""
        return self.setting_of(0, -1)

    def setting_of(self, seq: int, p: int) -> str:
        self._name_model()
        return _core.get_setting(self._context.address, seq, p)

    def _name_model(self) -> None:
        if not self._model_name:
            llama = self._context.llama
            stamp, overrides = getattr(llama, "_model_stamp", None), llama.kv_overrides
            name = name_of_model(llama.model_path, stamp, overrides)
            _core.name_model(self._context.address, name)
            self._model_name = name

    # --- questions ---

    @exclusive
    def validity(self, seq: int, tokens: npt.ArrayLike, p0: int = 0) -> Validities:
        """Return what the rows of a sequence from position `p0` on are, uint8 [n], see `mixedkv.kv.rows`.

        Args:
            tokens: their ids, [n]; rows of others, and those that are not there, are unverified.
        """
        known = _core.get_validity(self._context.address, seq, p0, as_tokens(tokens))
        return np.full_like(known, UNVERIFIED) if self._is_unverified(seq) else known

    @exclusive
    def exact(self, seq: int, tokens: npt.ArrayLike, p0: int = 0) -> int:
        """Return how many leading rows of a sequence are those that evaluating its tokens from the start
        gives; 0 or more.

        Args:
            tokens: ids of its tokens from position `p0` on: rows of others do not count.
        """
        ids = as_tokens(tokens)
        return 0 if self._is_unverified(seq) else _core.count_computed(self._context.address, seq, p0, ids)

    def past(self, seq: int, p: int) -> int:
        """Return the hash of the tokens of a sequence before position `p`, see `KVBlock.past`."""
        return int(_core.get_past(self._context.address, seq, p, 1)[0])

    def _is_unverified(self, seq: int) -> bool:
        """Return whether nothing is known of a sequence whose layers keep no rows that could say so."""
        address = self._context.address
        return seq in self._unverified and _core.count_computed(address, seq, 0, _NONE) == INT32_MAX

    # --- records ---

    def mark(self, seq: int, unverified: bool) -> None:
        """Record whether anything is unverified in a sequence whose layers keep no rows."""
        (self._unverified.add if unverified else self._unverified.discard)(seq)

    def mark_copy(self, source: int, target: int) -> None:
        """Record that a sequence continues from another one."""
        self.mark(target, source in self._unverified)

    def limit(self, seq: int, p0: int, p1: int, best: int) -> None:
        """Record that the rows at [p0, p1) are `best` at best."""
        self.mark(seq, True)
        _core.limit_validity(self._context.address, seq, p0, p1, best)

    def record(self, block: KVBlock, seq: int, at: int, best: int) -> None:
        """Record the validity of a block's rows that were put into a sequence, capped at `best`, and the
        setting they were computed under: while that is not the present one they are approximate.
        """
        known = np.maximum(block.validity, np.uint8(best))
        reason = difference(block.setting, self.setting)
        if reason:
            _LOG.info("rows at [%d, %d) are approximate here: %s", block.p0, block.p1, reason)
        self.mark(seq, bool(known.any() or reason) or (at > 0 and seq in self._unverified))
        for kind, begin, end in runs(known):
            past, ids = block.past_at(block.p0 + begin), block.tokens[begin:end]
            _core.set_validity(self._context.address, seq, at + begin, past, ids, kind, block.setting)

    def record_checkpoint(self, point: Checkpoint, n: int, seq: int) -> None:
        """Record that the rows of a checkpoint, which is now in a sequence, are approximate where it was
        taken under another setting or behind unknown tokens.
        """
        known = point.past_at(n) is not None or not self._context.layers()
        if point.setting == self.setting and known:
            return
        firsts = (int(group.positions[0]) for group in point.groups if len(group.positions))
        self.limit(seq, min(min(firsts, default=n - 1), n - 1), n, APPROXIMATE)
