"""A block of exported KV: the rows of a token range in every layer, as the cache stored them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mixedkv.kv.checkpoint import Checkpoint, named_checkpoints, read_checkpoints
from mixedkv.kv.rows import (
    COMPUTED,
    FOREIGN,
    UNVERIFIED,
    LayerRows,
    RowGroup,
    Validities,
    all_of,
    describe_group,
    describe_validity,
    extend_past,
    pick_rows,
    read_group,
    read_setting,
    read_validity,
    row_bytes,
    slice_group,
    take,
    take_int,
    take_list,
)
from mixedkv.limits import INT32_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBlock:
    """The exported KV of positions [p0, p1) of one sequence.

    Made by `KVCache.export` and put back by `KVCache.load`. The arrays are read, never written.

    Args:
        p0, p1: the positions.
        tokens: token ids, int32 [p1 - p0]; of an image any ids, one for each position that it covers, which
            should tell it apart.
        groups: the rows; none where no layer keeps any.
        checkpoints: of the sequence, at tokens within the block or at its end.
        validity: what each token's rows are, uint8 [p1 - p0], see `mixedkv.kv.rows`; None if that is not
            known: they are unverified. Only rows that were computed from the start are stored.
        past: a hash of the tokens before them; behind others they are approximate.
        setting: what the rows were computed under, see `mixedkv.kv.row_setting`; "" if that is not known.
            Under another one they are approximate.
    """

    p0: int
    p1: int
    tokens: npt.NDArray[np.int32]
    groups: tuple[RowGroup, ...]
    checkpoints: tuple[Checkpoint, ...] = ()
    validity: Validities = None  # type: ignore[assignment]  # until __post_init__
    past: int = 0
    setting: str = ""

    def __post_init__(self) -> None:
        if self.validity is None:
            object.__setattr__(self, "validity", all_of(len(self), UNVERIFIED))

    def __len__(self) -> int:
        return self.p1 - self.p0

    def __repr__(self) -> str:
        layers = sum(len(group.layers) for group in self.groups)
        return f"<KVBlock [{self.p0}, {self.p1}), {layers} layers, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.to_arrays().values())

    @property
    def n_exact(self) -> int:
        """Number of first tokens whose rows are those that an evaluation from the start gives."""
        less = np.flatnonzero(self.validity != COMPUTED)
        return int(less[0]) if len(less) else len(self)

    @property
    def foreign(self) -> bool:
        """True if another program computed rows, which were not compared with this model's."""
        return bool((self.validity == FOREIGN).any())

    @property
    def is_text(self) -> bool:
        """True if none of the rows is an image's."""
        return all(
            group.xy is None
            or (len(group.xy) == len(self) and bool((group.xy == group.positions[:, None]).all()))
            for group in self.groups
        )

    def slice(self, p0: int, p1: int) -> KVBlock:
        """Return the part at positions [p0, p1); its rows are views of this block's. A checkpoint that serves
        its end is cut to it.

        Raises:
            ValueError: the range is empty or not within this block's.
        """
        if not self.p0 <= p0 < p1 <= self.p1:
            raise ValueError(f"positions [{p0}, {p1}) are not within this block's [{self.p0}, {self.p1})")
        tokens = self.tokens[p0 - self.p0 : p1 - self.p0]
        groups = tuple(slice_group(group, p0, p1) for group in self.groups)
        points = [point for point in self.checkpoints if p0 < point.n <= p1]
        if all(point.n < p1 for point in points) and (last := self.checkpoint_at(p1)) is not None:
            points.append(last.cut(p1))
        return replace(
            self,
            p0=p0,
            p1=p1,
            tokens=tokens,
            groups=groups,
            checkpoints=tuple(points),
            validity=self.validity[p0 - self.p0 : p1 - self.p0],
            past=self.past_at(p0),
        )

    def past_at(self, p: int) -> int:
        """Return the hash of the tokens before position `p`: of an image one for each that has rows."""
        at = np.arange(self.p0, p)
        if self.groups:
            at = np.intersect1d(at, max((group.positions for group in self.groups), key=len))
        return extend_past(self.past, self.tokens[at - self.p0])

    def checkpoint_at(self, n: int) -> Checkpoint | None:
        """Return a checkpoint that serves a sequence of `n` tokens, None if there is none."""
        return next((point for point in self.checkpoints if point.serves(n)), None)

    def without_hot(self) -> KVBlock:
        """Return the block without F16 copies and checkpoints, for a place where it is not recent."""
        cold = tuple(pick_rows(group, slice(None), slice(0)) for group in self.groups)
        return replace(self, groups=cold, checkpoints=())

    def as_own(self, setting: str) -> KVBlock:
        """Return the block as one of a model's, after its rows were compared with those that the model
        computes under `setting`.
        """
        return replace(self, validity=all_of(len(self), COMPUTED), setting=setting)

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays by name: "tokens", "<group>.positions", "<group>.<layer>.k" and so on."""
        rows = {name: array for i, group in enumerate(self.groups) for name, array in group.named(f"{i}.")}
        return {"tokens": self.tokens, **rows, **dict(named_checkpoints(self.checkpoints))}

    def describe(self) -> dict[str, Any]:
        """Describe all but the arrays, as JSON can hold it."""
        rows = {
            "p0": self.p0,
            "p1": self.p1,
            "groups": [describe_group(group) for group in self.groups],
            "truth": describe_validity(self.validity),  # the name that files have
            "past": f"{self.past:016x}",
            "setting": self.setting,
        }
        points = [point.describe() for point in self.checkpoints]
        # `from_arrays` takes a block without groups only if it names checkpoints, be it none
        return {**rows, "checkpoints": points} if points or not self.groups else rows

    @classmethod
    def from_arrays(cls, description: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> KVBlock:
        """Return the block that `describe` and `to_arrays` were called on. Both may come from anywhere.

        Raises:
            ValueError: something is missing, of another type, or does not fit the rest; the message names it.
        """
        left = dict(arrays)
        p0 = take_int(description, "p0", 0, INT32_MAX - 1)
        p1 = take_int(description, "p1", p0 + 1, INT32_MAX)
        tokens = take(left, "tokens", np.int32, (p1 - p0,))
        groups = tuple(
            read_group(f"{i}.", group, left, p0, p1)
            for i, group in enumerate(
                take_list(description, "groups", 0 if "checkpoints" in description else 1)
            )
        )
        points = read_checkpoints(description, left, p0, p1)
        layers = [layer.il for group in groups for layer in group.layers]
        if len(set(layers)) != len(layers):
            raise ValueError("groups: a layer is there twice")
        if groups and all(group.xy is None and len(group.positions) < p1 - p0 for group in groups):
            raise ValueError(f"groups: none has all rows of [{p0}, {p1})")
        if left:
            raise ValueError(f"array {sorted(left)[0]!r} belongs to no layer of the description")
        return cls(
            p0=p0,
            p1=p1,
            tokens=tokens,
            groups=groups,
            checkpoints=points,
            validity=read_validity(description.get("truth"), p1 - p0),
            past=_read_past(description.get("past")),
            setting=read_setting(description),
        )


def _read_past(value: object) -> int:
    if not (isinstance(value, str) and re.fullmatch("[0-9a-f]{1,16}", value)):
        raise ValueError("past: it is not a number of 16 hexadecimal digits")
    return int(value, 16)


__all__ = ["Checkpoint", "KVBlock", "LayerRows", "RowGroup", "row_bytes"]
