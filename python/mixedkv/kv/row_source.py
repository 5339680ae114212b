"""Names what a store needs of a `Llama`: the cache, and what its rows are computed from."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mixedkv.kv.cache import KVCache
from mixedkv.limits import check_int
from mixedkv.tokens import Tokens


class RowSource(Protocol):
    """A `Llama`, as far as it computes rows that are kept."""

    _model_stamp: Any  # of the file that was loaded

    @property
    def kv(self) -> KVCache: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def input_ids(self) -> npt.NDArray[np.intc]: ...

    @property
    def n_batch(self) -> int: ...

    @property
    def model(self) -> Any: ...

    @property
    def model_path(self) -> str: ...

    @property
    def metadata(self) -> dict[str, str]: ...

    @property
    def context_params(self) -> Any: ...

    def n_ctx(self) -> int: ...


def known_tokens(llm: RowSource, seq: int) -> npt.ArrayLike:
    if seq != 0:
        raise ValueError(f"tokens: give the ids of sequence {seq}; the Llama knows those of sequence 0 only")
    return llm.input_ids[: llm.n_tokens]


def exact_tokens(llm: RowSource, tokens: Tokens, seq: int) -> int:
    """Return how many of a sequence's tokens may be stored: those whose rows evaluating them gives.

    Raises:
        LookupError: the sequence does not have all of these positions.
    """
    n = min(len(tokens), llm.kv.exact(seq, tokens))
    if n < len(tokens) and (there := llm.kv.n_rows(seq, len(tokens))) < len(tokens):
        raise LookupError(f"sequence {seq} does not have position {there}: give the tokens that it has")
    return n


def check_sequence(llm: RowSource, seq: int) -> None:
    """Check the number of a sequence: llama.cpp would end the process, or take -1 for all sequences."""
    check_int("seq", seq, 0, llm.context_params.n_seq_max - 1)
