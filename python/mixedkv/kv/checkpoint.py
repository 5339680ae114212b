"""The state of a sequence at one moment, besides the rows of all its tokens: see `config.cut_rule`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.kv.rows import (
    RowGroup,
    describe_group,
    read_group,
    read_setting,
    slice_group,
    take,
    take_int,
    take_list,
)
from mixedkv.limits import INT32_MAX

_NO_STATE: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
_NO_PASTS: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint: with the rows of the tokens before it, a sequence continues as if it had never been
    longer.

    Made by `KVCache.checkpoint`, put back by `KVCache.resume`. The arrays are read, never written.

    Args:
        n: tokens of the sequence.
        first: it serves a sequence cut anywhere from here to `n`.
        groups: rows with F16 copies, and those of sliding windows; none where the model has only a state.
        state: of the recurrent layers, as llama.cpp writes it, uint8 [size]; empty without such layers.
        pasts: hashes of the tokens before each cut that it serves, uint64 [n - first + 1], see
            `KVBlock.past`; empty if they are not known, or no layer keeps rows.
        setting: what its rows and its state were computed under, see `mixedkv.kv.row_setting`; "" if that is
            not known.
    """

    n: int
    first: int
    groups: tuple[RowGroup, ...] = ()
    state: npt.NDArray[np.uint8] = field(default_factory=lambda: _NO_STATE)
    pasts: npt.NDArray[np.uint64] = field(default_factory=lambda: _NO_PASTS)
    setting: str = ""

    def __repr__(self) -> str:
        return f"<Checkpoint {self.first} to {self.n}, {self.nbytes} bytes>"

    def serves(self, n: int) -> bool:
        return self.first <= n <= self.n

    def cut(self, n: int) -> Checkpoint:
        """Return the part of it that serves a sequence of `n` tokens."""
        if n == self.n:
            return self
        groups = tuple(slice_group(group, 0, n) for group in self.groups)
        return replace(self, n=n, groups=groups, pasts=self.pasts[: n - self.first + 1])

    def past_at(self, n: int) -> int | None:
        """Return the hash of the first `n` tokens, a cut that it serves; None if it is not known."""
        return int(self.pasts[n - self.first]) if len(self.pasts) else None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.to_arrays().values())

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name: "state", "<group>.positions", "<group>.<layer>.k" and so on."""
        named = {name: array for i, group in enumerate(self.groups) for name, array in group.named(f"{i}.")}
        return {"state": self.state, "pasts": self.pasts.view(np.uint8), **named}

    def describe(self) -> dict[str, Any]:
        """Describe all but the arrays, as JSON can hold it."""
        groups = [describe_group(group) for group in self.groups]
        return {"n": self.n, "first": self.first, "groups": groups, "setting": self.setting}

    @classmethod
    def taken(cls, prefix: str, description: Any, arrays: dict[str, npt.NDArray[Any]]) -> Checkpoint:
        """Return the checkpoint that `describe` and `to_arrays` were called on; its arrays are taken out.

        Raises:
            ValueError: something is missing, of another type, or does not fit the rest; the message names it.
        """
        n = take_int(description, "n", 1, INT32_MAX)
        first = take_int(description, "first", 0, n)
        groups = tuple(
            read_group(f"{prefix}{i}.", group, arrays, 0, n)
            for i, group in enumerate(take_list(description, "groups", at_least=0))
        )
        state = take(arrays, prefix + "state", np.uint8, (None,))
        pasts = take(arrays, prefix + "pasts", np.uint8, (None,))
        if len(pasts) not in (0, 8 * (n - first + 1)):
            raise ValueError(
                f"array {prefix + 'pasts'!r} is not of the {n - first + 1} cuts from {first} to {n}"
            )
        setting = read_setting(description)
        hashes = np.ascontiguousarray(pasts).view(np.uint64)
        return cls(n=n, first=first, groups=groups, state=state, pasts=hashes, setting=setting)


def served(checkpoints: Sequence[Checkpoint], n: int) -> tuple[int, Checkpoint | None]:
    """Return the longest cut, up to `n`, that a checkpoint serves, and the checkpoint; (0, None) if there is
    none.
    """
    cuts = [(min(n, point.n), point) for point in checkpoints if point.first <= n]
    return max(cuts, key=lambda cut: cut[0], default=(0, None))


def joined(before: RowGroup, after: RowGroup) -> RowGroup:
    """Join the rows of two ranges to one group."""
    n = np.int32(len(before.positions))
    layers = tuple(
        replace(
            a,
            k=np.concatenate([a.k, b.k]),
            v=np.concatenate([a.v, b.v]),
            k_hot=np.concatenate([a.k_hot, b.k_hot]),
            v_hot=np.concatenate([a.v_hot, b.v_hot]),
        )
        for a, b in zip(before.layers, after.layers, strict=True)
    )
    return RowGroup(
        positions=np.concatenate([before.positions, after.positions]),
        hot=np.concatenate([before.hot, after.hot + n]),
        slots=np.concatenate([before.slots, after.slots]),
        layers=layers,
        xy=None if before.xy is None or after.xy is None else np.concatenate([before.xy, after.xy]),
    )


def named_checkpoints(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for i, point in enumerate(checkpoints):
        yield from ((f"checkpoint{i}.{name}", array) for name, array in point.to_arrays().items())


def read_checkpoints(
    description: Mapping[str, Any], arrays: dict[str, npt.NDArray[Any]], p0: int, p1: int
) -> tuple[Checkpoint, ...]:
    """Read checkpoints that were written.

    Raises:
        ValueError: as `Checkpoint.taken`, or one is not of a token in [p0, p1).
    """
    if "checkpoints" not in description:
        return ()
    points = tuple(
        Checkpoint.taken(f"checkpoint{i}.", one, arrays)
        for i, one in enumerate(take_list(description, "checkpoints", at_least=0))
    )
    if any(not p0 < point.n <= p1 for point in points):
        raise ValueError(f"checkpoints: one lies outside of ({p0}, {p1}]")
    return points
