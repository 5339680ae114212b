"""Images as a model sees them: vectors in place of tokens.

Each position that they take has an id below zero, made of a hash of the image and of the encoder. So prompts
with images are compared, shared and stored as all others are: by their tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mixedkv.tokens import Tokens

# where an image stands in the text of a prompt; nobody else's text has it but by intent
MARK = f"<image {secrets.token_hex(8)}>"


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image, or a part of one, as it is evaluated.

    Args:
        ids: int32 [positions], below zero.
        vectors: float32 [n, width].
        grid: of M-RoPE, time, row and column of each vector, from where the image begins: int32 [3, n]; else
            each vector has a position.
        causal: a vector sees those before it only; else all of the image.
    """

    ids: Tokens
    vectors: npt.NDArray[np.float32]
    grid: npt.NDArray[np.int32] | None
    causal: bool

    def __len__(self) -> int:
        """Return the number of rows in the cache."""
        return len(self.vectors)


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt: its pictures, with the tokens that a model wants around them.

    Args:
        tokens: those, and the ids of the pictures.
    """

    tokens: list[int]
    pictures: tuple[Picture, ...]

    @property
    def nbytes(self) -> int:
        return sum(picture.vectors.nbytes for picture in self.pictures)


def place(pictures: Sequence[Picture], prompt: Tokens) -> dict[int, Picture]:
    """Return where pictures begin in a prompt, in order.

    Raises:
        ValueError: there are ids in it of none, or it ends with one, so that no token says what comes next.
    """
    known = {int(picture.ids[0]): picture for picture in pictures}
    placed, end = {}, 0
    for at in np.flatnonzero(prompt < 0).tolist():
        if at < end:
            continue
        picture = known.get(int(prompt[at]))
        end = at + (len(picture.ids) if picture is not None else 0)
        if picture is None or end >= len(prompt) or not np.array_equal(prompt[at:end], picture.ids):
            raise ValueError("a prompt has ids of a picture that is not given, or ends with one")
        placed[at] = picture
    return placed


def ids_of(digest: bytes, part: int, n: int) -> Tokens:
    """Return the ids that stand for part of an image: 31 bits of its hash for each position."""
    bits = hashlib.shake_256(digest + part.to_bytes(4, "little")).digest(4 * n)
    ids: Tokens = (np.frombuffer(bits, "<u4") | np.uint32(1 << 31)).view(np.int32)
    return ids
