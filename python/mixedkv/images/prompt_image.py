"""Images as a model sees them: vectors in place of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mixedkv.errors import not_finite_at
from mixedkv.llama import Llama
from mixedkv.native.batch import NO_CELLS, NativeBatch
from mixedkv.prompts.part import Outcome
from mixedkv.tokens import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class ImageVectors:
    """An image, or a tile of one, as a `PromptPart`. It is evaluated whole: its vectors may attend to each
    other.

    Args:
        ids: int32 [positions], below zero.
        vectors: float32 [n, width].
        grid: of M-RoPE, time, row and column of each vector, from where the image begins: int32 [3, n]; else
            each vector has a position.
        causal: a vector sees those before it only; else all of the image.
    """

    kind: ClassVar[str] = "image"
    can_cut: ClassVar[bool] = False
    optional: ClassVar[bool] = False
    n_left: ClassVar[None] = None

    ids: Tokens
    vectors: npt.NDArray[np.float32]
    grid: npt.NDArray[np.int32] | None
    causal: bool

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def n_cells(self) -> int:
        """Return how many cells it takes: with M-RoPE there are more vectors than positions."""
        return max(len(self.ids), len(self.vectors))

    def budget(self, n: int) -> int | None:
        return len(self.vectors) if n else None

    def after(self, begin: int, n: int) -> tuple[int, ImageVectors]:
        return begin, self

    def evaluate(self, llm: Llama, prompt: Tokens, begin: int, seq: int, n: int) -> Outcome:
        code = self._decode(llm, begin, seq)
        if found := llm.kv.take_not_finite():
            return Outcome("failed", error=not_finite_at(min(found.values())))
        if code == 0:
            return Outcome("done")
        if code != NO_CELLS:
            return Outcome("failed", error=llm.decode_error(code))
        # some of several decodes may have succeeded, and not every memory can remove a part
        return Outcome("no cells", leaves_rows=len(self.vectors) > llm.n_batch)

    def _decode(self, llm: Llama, begin: int, seq: int) -> int:
        """Evaluate the vectors at positions of a sequence from `begin` on; return llama_decode's code."""
        with llm.kv.causal(self.causal):
            for first in range(0, len(self.vectors), llm.n_batch):
                batch = self._batch(begin, seq, first, min(first + llm.n_batch, len(self.vectors)))
                if (code := llm.kv.decode(batch.native)) != 0:
                    return code
            return 0

    def _batch(self, begin: int, seq: int, first: int, last: int) -> NativeBatch:
        n = last - first
        vectors = np.ascontiguousarray(self.vectors[first:last])
        if self.grid is None:
            batch = NativeBatch(vectors)
            batch.pos[:] = np.arange(begin + first, begin + last)
        else:  # the fourth part is 0
            batch = NativeBatch(vectors, n_pos=4)
            batch.pos[: 3 * n] = (self.grid[:, first:last] + begin).ravel()
        batch.seq[:] = seq
        batch.native.n_tokens = n
        return batch


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: its parts, with the tokens that a model wants around them.

    Args:
        tokens: those, and the ids of the parts.
    """

    tokens: list[int]
    parts: tuple[ImageVectors, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.vectors.nbytes for part in self.parts)


def ids_of(digest: bytes, part: int, n: int) -> Tokens:
    """Return the ids that stand for part of an image: 31 bits of its hash for each position."""
    bits = hashlib.shake_256(digest + part.to_bytes(4, "little")).digest(4 * n)
    ids: Tokens = (np.frombuffer(bits, "<u4") | np.uint32(1 << 31)).view(np.int32)
    return ids
