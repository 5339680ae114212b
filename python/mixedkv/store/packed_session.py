"""Loads packed sessions of other programs, and compares them with the model first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from mixedkv.kv.block import KVBlock
from mixedkv.kv.evaluate_again import Rows, evaluate_again
from mixedkv.kv.row_source import RowSource
from mixedkv.store.formats.packed import Array
from mixedkv.store.formats.packed_block import Rotary, block_from_packed

_CHECKED = 8  # tokens to evaluate at the beginning and at the end
_SAME_MODEL = (
    0.5  # median relative error over layers and tokens, of K and of V; a wrong layout has 1 and more
)
_EXACT = 0.02  # error by rounding to F16 and another order of sums
_ROW = 0.35  # of a single row of a layer: sound ones have .23 at most, those of another token 1 and more
_SAMPLE = 72  # tokens: where a tenth of all are wrong, one of these is with 9,994 in 10,000


def load_packed(
    llm: RowSource,
    layers: Sequence[tuple[Array, Array]],
    tokens: npt.ArrayLike,
    *,
    rotary: Rotary | Literal["auto"],
) -> float:
    """Load a packed session into the empty sequence 0 of a `Llama`, if its rows are those of this model.

    The first and the last tokens are evaluated again after the session's rows and compared. If they differ by
    more than rounding, as when another quantisation of the same model computed them, the session is loaded
    but counts as inexact: `llm.kv.exact_tokens` is 0, and no store keeps it. Otherwise 72 tokens in random
    places are evaluated again, and each of their rows is compared: of a session of up to 72 tokens, all.

    Args:
        llm: the model.
        layers, tokens, rotary: as in `block_from_packed`; "auto" takes the rotary layout that has the
            model's rows.

    Returns:
        The error of the rows as a share of their size: the median over layers and tokens, of K or V,
        whichever is larger.

    Raises:
        ValueError: the session does not fit the model, or its rows are not this model's for these tokens; the
            sequence is then empty. Or the sequence was not empty, or the model has a recurrent state.
    """
    if llm.kv.positions(0)[1] >= 0:
        raise ValueError("sequence 0 is not empty: remove what it holds with llm.kv.remove(0)")
    if not llm.kv.can_cut:
        raise ValueError("this model keeps a state of the whole sequence: a packed session has none")
    layouts = get_args(Rotary) if rotary == "auto" else (rotary,)
    blocks = [block_from_packed(layers, tokens, llm, rotary=each) for each in layouts]
    differences = []
    for block in blocks:
        try:
            differences.append(_difference(llm, block))
        finally:
            llm.kv.remove(0)
    off = float(np.nanmin([*differences, np.inf]))
    if not off <= _SAME_MODEL:
        remedy = (
            "" if rotary == "auto" else f" and rotary={rotary!r}: llama models of transformers have 'half'"
        )
        raise ValueError(
            f"the packed session is not this model's: its rows are off by {off:.2g} of their size. Check the "
            f"tokens, the model{remedy}"
        )
    block = blocks[differences.index(off)]
    if off <= _EXACT:
        try:
            _check_sample(llm, block)
        finally:
            llm.kv.remove(0)
    llm.kv.load(block.as_own() if off <= _EXACT else block)
    return off


def _check_sample(llm: RowSource, block: KVBlock) -> None:
    """Evaluate a random sample of a block's tokens again.

    Raises:
        ValueError: a row is wrong.
    """
    n = len(block)
    chosen = sorted(random.SystemRandom().sample(range(n), min(n, _SAMPLE)))
    llm.kv.load(block)
    for begin in range(0, len(chosen), llm.n_batch):
        some = chosen[begin : begin + llm.n_batch]
        again = evaluate_again(llm.kv, 0, block.tokens, [(at, at + 1) for at in some])
        for (il, which), errors in again.errors.items():
            if errors.max(initial=0.0) > _ROW:
                at = some[int(errors.argmax())]
                raise ValueError(
                    f"the packed session is damaged, or not this model's: {which} of layer {il} at position "
                    f"{at} is off by {errors.max():.2g} of its size. Compute it again"
                )


def _difference(llm: RowSource, block: KVBlock) -> float:
    n = len(block)
    begin = min(_CHECKED // 2, n)
    spans = [(0, begin)] + ([(max(begin, n - _CHECKED // 2), n)] if n > begin else [])
    llm.kv.load(block)
    errors = evaluate_again(llm.kv, 0, block.tokens, spans).errors
    return max(_median(errors, "K"), _median(errors, "V"))


def _median(errors: Rows, which: str) -> float:
    return float(np.median([rows for (_, name), rows in errors.items() if name == which]))
