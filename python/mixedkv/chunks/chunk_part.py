"""The rest of a prompt from its first reused chunk on: rows from other prompts, and what is evaluated between
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from mixedkv.chunks.assembly import Assembly, Rows, behind
from mixedkv.chunks.repair import Method
from mixedkv.llama import Llama
from mixedkv.prompts.part import Outcome
from mixedkv.tokens import Tokens


class ChunkPart:
    """Tokens of a prompt from its first chunk on, but the last: a `prompts.part.PromptPart`.

    Args:
        rows: the chunks and their rows, in order; at least one.
        method: how they are repaired.
        n_prompt: tokens of the prompt.
        note: told what was put together, or the error because of which nothing was.
    """

    kind: ClassVar[str] = "chunks"
    can_cut: ClassVar[bool] = True
    optional: ClassVar[bool] = True

    def __init__(
        self,
        rows: Rows,
        method: Method,
        n_prompt: int,
        note: Callable[[Assembly | Exception], None] = lambda _: None,
    ) -> None:
        self._rows, self._method, self._n_prompt, self._note = rows, method, n_prompt, note
        self.begin = rows[0][0].begin
        self._assembly: Assembly | None = None

    @property
    def n_tokens(self) -> int:
        return self._n_prompt - 1 - self.begin

    @property
    def n_cells(self) -> int:
        return self.n_tokens

    @property
    def n_left(self) -> int | None:
        return self._assembly.n_left if self._assembly is not None else None

    def budget(self, n: int) -> int:
        """Return `n`: it goes on in every step, since loading rows takes no tokens."""
        return n

    def after(self, begin: int, n: int) -> tuple[int, ChunkPart] | None:
        if not (rows := behind(self._rows, n)):
            return None
        part = ChunkPart(rows, self._method, self._n_prompt, self._note)
        return part.begin, part

    def evaluate(self, llm: Llama, prompt: Tokens, begin: int, seq: int, n: int) -> Outcome:
        try:
            if self._assembly is None:
                self._assembly = Assembly(llm, prompt, self._rows, begin, self._method, seq)
            before = self._assembly.n_evaluated
            goes_on = self._assembly.advance(n)
            n_evaluated = self._assembly.n_evaluated - before
            if goes_on:
                return Outcome("goes on", n_evaluated=n_evaluated)
            self._note(self._assembly)
            return Outcome("done", n_reused=int(self._assembly.kept.sum()), n_evaluated=n_evaluated)
        except Exception as error:  # whatever is wrong with rows from elsewhere: they are only a shortcut
            self._note(error)
            return Outcome("given up", error=error)
