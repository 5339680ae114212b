"""Gives bits to layers: types of K and V by layer, in steps, each where a bit does most.

What rounding does to the next token grows with its mean squared error. So what K or V of one layer does in
a coarse type, measured once (`mixedkv bench sensitivity`), tells what it does in a finer one, and together
they do about the sum. From the coarsest types on, the next step is the one that takes most divergence for its
bytes: the errors of `LADDER` fall ever slower, and then no other order has less at the same bytes. A layer
with a sliding window has fewer rows, so its bits cost fewer bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

from mixedkv.config.mixed import OWN_TYPES, type_bits, type_block
from mixedkv.model.footprint import LayerShape, ModelShape

Part = Literal["k", "v"]
Each = tuple[int, Part]
Shares = Mapping[Each, float]

# Mean squared errors of rotated rows of the bundled model, beside that of `MEASURED`: docs/benchmarks.md.
LADDER = {"tc3": 2.9, "lm4": 0.88, "q4_0": 1.0, "q5_0": 0.25, "q8_0": 0.0039}
MEASURED, FINEST = "q4_0", "q8_0"
_ALL_TO_WINDOW = 4.0  # a layer that reads all tokens against one with a window, of Gemma 3 270M
_K_TO_V = 14.0  # where nothing was measured: K alone against V alone in 4 bits, of the bundled model


class LayerPlan:
    """The steps from the coarsest types in all layers to the finest.

    Args:
        shape: the model.
        shares: divergence that K or V of a layer causes in the type `MEASURED`, in nats; without it layers of
            a kind are taken to be alike, and the deepest come first.
        cells: rows of layers that keep all, and of those with a sliding window: see `n_cells`.
        own_types: whether types of `OWN_TYPES` can be where the cache lies.
    """

    def __init__(
        self,
        shape: ModelShape,
        shares: Shares | None = None,
        *,
        cells: tuple[int, int] = (1, 1),
        own_types: bool = True,
    ) -> None:
        self._shape = shape
        usable = _usable(shape, own_types)
        parts: list[Each] = [
            (layer.il, part)
            for layer in reversed(shape.layers)  # K of the upper half makes most of the error: decision 048
            for part in ("k", "v")
            if _width(layer, part)  # latent attention (MLA): values are a part of the keys
        ]
        self._shares = shares or _guessed(shape)
        if missing := [
            f"{part.upper()} of layer {il}" for il, part in parts if (il, part) not in self._shares
        ]:
            raise ValueError(f"no share was measured for {', '.join(missing)}")
        self._sizes: dict[Each, int] = {
            (layer.il, part): cells[layer.slides] * _width(layer, part)
            for layer in shape.layers
            for part in ("k", "v")
        }
        self._errors = usable
        ladder = _ladder(usable)
        self._coarsest = dict.fromkeys(parts, ladder[0])
        steps = [
            (self._gain(each, one, other) / self._sizes[each], each, other)
            for each in parts
            for one, other in pairwise(ladder)
        ]
        self._steps = [(each, to) for _, each, to in sorted(steps, key=lambda step: -step[0])]

    def __len__(self) -> int:
        return len(self._steps)

    def types(self, n_steps: int) -> list[tuple[int, str, str]]:
        """Return the layers with their types of K and V after so many steps."""
        types = self._coarsest | dict(self._steps[:n_steps])
        layers = [layer.il for layer in self._shape.layers]
        return [(il, types[il, "k"], types.get((il, "v"), types[il, "k"])) for il in layers]

    def bits(self, n_steps: int) -> float:
        """Return the bits of an allocated K or V element after so many steps, scales included."""
        types = self._coarsest | dict(self._steps[:n_steps])
        bits = sum(self._sizes[each] * type_bits(name) for each, name in types.items())
        return bits / sum(self._sizes.values())

    def most(self, bits: float) -> int:
        """Return the largest number of steps that takes no more than this many bits."""
        return bisect_right(range(len(self) + 1), bits, key=self.bits) - 1

    def divergence(self, n_steps: int) -> float:
        """Return the divergence that the shares of these types add up to."""
        types = self._coarsest | dict(self._steps[:n_steps])
        return sum(self._shares[each] * self._errors[name] for each, name in types.items())

    def _gain(self, each: Each, one: str, other: str) -> float:
        """Return the divergence that a step takes, for a bit of an element."""
        return self._shares[each] * _slope(self._errors, one, other)


def _guessed(shape: ModelShape) -> Shares:
    """Return shares for a model that was not measured."""
    return {
        (layer.il, part): (_K_TO_V if part == "k" else 1.0) * (1.0 if layer.slides else _ALL_TO_WINDOW)
        for layer in shape.layers
        for part in ("k", "v")
    }


def _slope(errors: Mapping[str, float], one: str, other: str) -> float:
    """Return by how much each bit from a type to a finer one reduces the error."""
    return (errors[one] - errors[other]) / (type_bits(other) - type_bits(one))


def _usable(shape: ModelShape, own_types: bool) -> dict[str, float]:
    """Return the types of `LADDER` that all heads can have."""
    heads = [size for layer in shape.layers for size in (layer.head_k, layer.head_v)]
    return {
        name: error
        for name, error in LADDER.items()
        if (own_types or name not in OWN_TYPES)
        and not ((block := type_block(name)[0]) > 32 and any(size % block for size in heads))
    }


def _ladder(errors: Mapping[str, float]) -> list[str]:
    """Return the types by their bits, less those that are passed over: the next one does more for a bit."""
    res: list[str] = []
    for name in errors:
        if res and errors[name] >= errors[res[-1]]:
            continue
        while len(res) > 1 and _slope(errors, *res[-2:]) < _slope(errors, res[-1], name):
            res.pop()
        res.append(name)
    return res


def _width(layer: LayerShape, part: str) -> int:
    return layer.n_embd_k if part == "k" else layer.n_embd_v
