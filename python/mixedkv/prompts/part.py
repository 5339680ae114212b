"""Parts of a prompt that are evaluated in decodes of their own, between the steps of an engine.

A prompt is an array of ids. Tokens are evaluated in steps, with those of other prompts. A part is a range of
ids for which something else is evaluated: image vectors, or rows that were computed in other prompts. The
engine knows a part by this protocol alone. What implements it stands with its feature, as
`images.prompt_image` and `chunks.chunk_part`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from mixedkv.tokens import Tokens

# where a part stands in the text of a prompt; nobody else's text has it but by intent
MARK = f"<part {secrets.token_hex(8)}>"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of evaluating a part.

    Attributes:
        state: "done"; "goes on" in a later step; "no cells", so it is tried again when there are some;
            "failed", which ends the request with `error`; "given up": its tokens are evaluated in its place.
        n_reused: how many of its rows were computed elsewhere, when it is done.
        leaves_rows: some rows may be left of a part that found no cells, and have to be removed.
        n_evaluated: tokens that were evaluated; None: as many as it took of the step's budget.
    """

    state: Literal["done", "goes on", "no cells", "failed", "given up"]
    n_reused: int = 0
    error: Exception | None = None
    leaves_rows: bool = False
    n_evaluated: int | None = None


class PromptPart(Protocol):
    """A part of a prompt, at a place that only the prompt knows.

    Attributes:
        kind: what it is, in the words of logs and metrics.
        n_tokens: positions that it covers.
        n_cells: cells that its rows take, at least one for each position.
        can_cut: rows of its first positions are of use without the others.
        optional: its tokens can be evaluated in its place. Its rows are then a shortcut and not exact: they
            are not shared as exact ones, and the part is dropped when its request loses its rows.
        n_left: about how many tokens are still to be evaluated of a part that is half done, whose rows are of
            no use to anybody else yet; None for one that has not begun.
    """

    @property
    def kind(self) -> str: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_cells(self) -> int: ...

    @property
    def can_cut(self) -> bool: ...

    @property
    def optional(self) -> bool: ...

    @property
    def n_left(self) -> int | None: ...

    def budget(self, n: int) -> int | None:
        """Return how many tokens of a step's budget it takes if it may have `n`; None to wait for a later
        step.
        """

    def after(self, begin: int, n: int) -> tuple[int, PromptPart] | None:
        """Return where it begins and what is left of it when the first `n` tokens of the prompt have rows.
        None: nothing. A part that its prompt cannot do without stays as it is.
        """
        ...

    def evaluate(self, llm: Any, prompt: Tokens, begin: int, seq: int, n: int) -> Outcome:
        """Evaluate all of it, or a slice of about `n` tokens, on the engine's thread.

        Args:
            llm: the `Llama`.
            prompt: all ids.
            begin: where the part begins; all positions before it have rows.
            seq: the sequence that gets the rows.
            n: what `budget` returned.
        """
        ...


class GivenPart(PromptPart, Protocol):
    """A part that a request brings. Ids below zero stand for it in the prompt, made of a hash of its content.
    So prompts with parts are compared, shared and stored as all others are: by their ids.
    """

    @property
    def ids(self) -> Tokens: ...


class Insert(Protocol):
    """Ids that come into a prompt where its text has `MARK`: those of parts, and tokens around them."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def parts(self) -> Sequence[GivenPart]: ...


_G = TypeVar("_G", bound=GivenPart)


def place(parts: Sequence[_G], prompt: Tokens) -> dict[int, _G]:
    """Return the parts of a prompt by the position where each begins. Their ids are below zero.

    Raises:
        ValueError: the prompt has ids of a part that is not among those given, or it ends with a part: an
            answer begins from the logits of a token.
    """
    known = {int(part.ids[0]): part for part in parts}
    placed, end = {}, 0
    for at in np.flatnonzero(prompt < 0).tolist():
        if at < end:
            continue
        part = known.get(int(prompt[at]))
        end = at + (len(part.ids) if part is not None else 0)
        if part is None or end >= len(prompt) or not np.array_equal(prompt[at:end], part.ids):
            raise ValueError(
                "prompt: it has ids of a part that is not given, or ends with a part: give each part, and a "
                "token after the last one"
            )
        placed[at] = part
    return placed
