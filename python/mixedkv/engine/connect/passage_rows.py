"""Puts passages that were computed in other prompts into a job's sequence."""

from __future__ import annotations

from mixedkv.chunks.repair import Method
from mixedkv.chunks.stitch import Rows, Stitch, behind
from mixedkv.llama import Llama
from mixedkv.tokens import Tokens


class PassageRows:
    """A `schedule.progress.Stitching`.

    Args:
        rows: the passages and their rows, in order; at least one.
        method: how they are repaired.
    """

    def __init__(self, rows: Rows, method: Method) -> None:
        self._rows, self._method = rows, method
        self._stitch: Stitch | None = None

    @property
    def begin(self) -> int:
        return self._rows[0][0].begin

    @property
    def begun(self) -> bool:
        return self._stitch is not None

    @property
    def n_left(self) -> int:
        return self._stitch.n_left if self._stitch is not None else 0

    @property
    def n_kept(self) -> int:
        """Return how many tokens have rows from elsewhere, when all is done."""
        return int(self._stitch.kept.sum()) if self._stitch is not None else 0

    def behind(self, n: int) -> PassageRows | None:
        rows = behind(self._rows, n)
        return PassageRows(rows, self._method) if rows else None

    def advance(self, llm: Llama, prompt: Tokens, n_rows: int, seq: int, n: int) -> bool:
        """Evaluate about `n` tokens of a prompt whose first `n_rows` have rows; return whether it goes on."""
        if self._stitch is None:
            self._stitch = Stitch(llm, prompt, self._rows, n_rows, self._method, seq)
        return self._stitch.advance(n)
