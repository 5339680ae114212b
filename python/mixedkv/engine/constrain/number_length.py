"""Limits the digits of numbers in JSON, since a model that repeats itself may write them to the end of its
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_DIGITS = 20  # digits in a row: a 64-bit float has 17, a 64-bit integer 20
MOST_EXPONENT = 3


def begin_with_digit(tokens: Sequence[bytes]) -> npt.NDArray[np.bool_]:
    """Return which tokens of a vocabulary begin with a digit."""
    return np.array([token[:1].isdigit() for token in tokens], bool)


@dataclass(slots=True)
class NumberLength:
    """Follows a JSON text and tells when a number must not get another digit."""

    in_string: bool = False
    escaped: bool = False
    n_digits: int = 0  # in a row
    most: int = MOST_DIGITS

    @property
    def is_full(self) -> bool:
        return self.n_digits >= self.most

    def read(self, text: bytes) -> None:
        """Go on by a piece of the text."""
        for byte in text:
            self._read(byte)

    def _read(self, byte: int) -> None:
        if self.in_string:
            self.in_string = self.escaped or byte != 0x22
            self.escaped = byte == 0x5C and not self.escaped
        elif 0x30 <= byte <= 0x39:
            self.n_digits += 1
        else:
            self.in_string = byte == 0x22
            in_exponent = byte in b"eE" or (byte in b"+-" and self.most == MOST_EXPONENT)
            self.n_digits, self.most = 0, MOST_EXPONENT if in_exponent else MOST_DIGITS
