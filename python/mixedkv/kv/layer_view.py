"""The rows of one layer of a live cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from mixedkv import _core
from mixedkv.kv.stats import LayerStats
from mixedkv.native.context_lock import ContextGate, exclusive

Basis = Literal["attention", "model"]


class LayerView:
    """The rows of one layer, in order of position, as the query at the last position reads them. Copies.

    Every method raises ContextBusyError while another thread evaluates or touches rows.
    """

    def __init__(self, address: Callable[[], int], info: LayerStats, busy: ContextGate) -> None:
        self._address = address
        self.info = info
        self.busy = busy

    def __repr__(self) -> str:
        return f"<LayerView {self.info}>"

    @exclusive
    def k(
        self, seq: int = 0, p0: int = 0, p1: int = -1, basis: Basis = "attention"
    ) -> npt.NDArray[np.float32]:
        """Return the keys of positions [p0, p1) of a sequence, float32 [n_tokens, n_head_kv, head_size_k].

        p1 < 0 means the end. llama.cpp rotates a quantised cache by a Hadamard matrix, which changes no
        score. `basis` is "attention" for rows as attention reads them, "model" for rows turned back to
        what the model computed.

        Raises:
            LookupError: the cache has no such sequence.
        """
        return self._rows("k", seq, p0, p1, basis)

    @exclusive
    def v(
        self, seq: int = 0, p0: int = 0, p1: int = -1, basis: Basis = "attention"
    ) -> npt.NDArray[np.float32]:
        """Return the values, float32 [n_tokens, n_head_kv, head_size_v]; otherwise as `k`."""
        return self._rows("v", seq, p0, p1, basis)

    @exclusive
    def positions(self, seq: int = 0, p0: int = 0, p1: int = -1) -> npt.NDArray[np.int32]:
        """Return the positions of the rows, int32 [n_tokens]."""
        return _core.read_tiers(self._address(), self.info.il, seq, p0, p1)[0]

    @exclusive
    def hot(self, seq: int = 0, p0: int = 0, p1: int = -1) -> npt.NDArray[np.bool_]:
        """Return which of the rows are read in F16, bool [n_tokens]."""
        return _core.read_tiers(self._address(), self.info.il, seq, p0, p1)[1]

    def _rows(
        self, which: Literal["k", "v"], seq: int, p0: int, p1: int, basis: Basis
    ) -> npt.NDArray[np.float32]:
        if basis not in ("attention", "model"):
            raise ValueError(f"basis={basis!r} is unknown: use 'attention' or 'model'")
        unrotate = basis == "model"
        return _core.read_rows(self._address(), self.info.il, seq, which, p0, p1, unrotate)[0]
