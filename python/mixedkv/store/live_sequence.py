"""Checks, loads and compares the sequence of a `Llama` that is saved or restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy.typing as npt

from mixedkv.kv.block import KVBlock
from mixedkv.kv.evaluate_again import evaluate_again
from mixedkv.store.entry_error import EntryError
from mixedkv.store.recheck import Recheck
from mixedkv.store.results import Match
from mixedkv.tokens import Tokens

if TYPE_CHECKING:
    from mixedkv.llama import Llama


def load(llm: Llama, blocks: list[KVBlock], seq: int) -> None:
    """Replace the contents of a sequence."""
    try:
        empty(llm, seq)
        for block in blocks:
            llm.kv.load(block, seq, more=block is not blocks[-1])
    except (ValueError, LookupError) as error:
        empty(llm, seq)
        raise EntryError("refused", str(error)) from error


def recheck(llm: Llama, seq: int, match: Match, recheck: Recheck) -> bool:
    """Compare rows of a match in a sequence with the model's, if they are doubted.

    Returns:
        True if the match has to be loaded again.

    Raises:
        EntryError: rows are wrong; the sequence is then empty.
    """
    doubt = recheck.doubt(match, llm)
    if not doubt.spans:
        return False
    try:
        problem = doubt.settle(evaluate_again(llm.kv, seq, match.tokens, doubt.spans))
    except (ValueError, LookupError) as error:
        empty(llm, seq)
        raise EntryError("refused", str(error)) from error
    if problem:
        empty(llm, seq)
        raise EntryError("wrong", problem)
    return True


def empty(llm: Llama, seq: int) -> None:
    llm.kv.remove(seq)


def known_tokens(llm: Llama, seq: int) -> npt.ArrayLike:
    if seq != 0:
        raise ValueError(f"tokens: give the ids of sequence {seq}; the Llama knows those of sequence 0 only")
    return llm.input_ids[: llm.n_tokens]


def exact_tokens(llm: Llama, tokens: Tokens, seq: int) -> int:
    """Return how many of a sequence's tokens may be stored: those whose rows evaluating them gives.

    Raises:
        LookupError: the sequence does not have all of these positions.
    """
    n = min(len(tokens), llm.kv.exact(seq, tokens))
    if n < len(tokens) and (there := llm.kv.n_rows(seq, len(tokens))) < len(tokens):
        raise LookupError(f"sequence {seq} does not have position {there}: give the tokens that it has")
    return n


def check_sequence(llm: Llama, seq: int) -> None:
    """Check the number of a sequence: llama.cpp would end the process, or take -1 for all sequences."""
    n = llm.context_params.n_seq_max
    if isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq < n:
        raise ValueError(f"seq={seq!r}: use a number from 0 to {n - 1}")
