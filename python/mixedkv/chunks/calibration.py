"""The measured loss of each repair method on a model, in a JSON file beside the store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from mixedkv.atomic_write import write_atomically
from mixedkv.chunks.chunk_reuse import Repair
from mixedkv.chunks.repair import Method
from mixedkv.store import Identity

_MAX_BYTES = 1 << 20


class Measured(BaseModel):
    """The results of one method on the prompts of a calibration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repair: Repair
    ratio: float = Field(ge=0, le=1)
    overlap_k: int = Field(ge=0, le=1024)
    n_prompts: int = Field(ge=1)
    evaluated: float = Field(ge=0)  # share of the tokens that were evaluated again
    kld_mean: float = Field(ge=0)
    kld_median: float = Field(ge=0)
    same_top1: float = Field(ge=0, le=1)

    @property
    def method(self) -> Method:
        return Method(repair=self.repair, ratio=self.ratio, overlap_k=self.overlap_k)


class Calibration(BaseModel):
    """The results of all methods on one model and setting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    identity: str
    label: str
    max_kld: float = Field(gt=0)
    measured: tuple[Measured, ...]

    @property
    def chosen(self) -> Measured | None:
        """The cheapest method that leaves at most a quarter of the mean divergence without repair, or the one
        with the least divergence if none does. None if its median is above the bound, since the gate, which
        compares the median too, would close.
        """
        unrepaired = max((each.kld_mean for each in self.measured if each.repair == "none"), default=0.0)
        good = [each for each in self.measured if each.kld_median <= self.max_kld]
        near = [each for each in good if each.kld_mean <= unrepaired / 4]
        if near:
            return min(near, key=lambda each: each.evaluated)
        return min(good, key=lambda each: each.kld_mean, default=None)

    def write(self, folder: Path) -> Path:
        """Write the calibration to its place in a store's folder and return the path."""
        path = place(folder, self.identity)
        write_atomically(path, self.model_dump_json(indent=1) + "\n")
        return path


def place(folder: Path, identity: str) -> Path:
    return folder / f"chunks-{identity[:32]}.json"


def name_of(identity: Identity) -> str:
    """Return the name of a calibration's file, the same for all tenants of a model and setting."""
    return Identity.from_facts(identity.facts).digest.hex()


def read_calibration(folder: Path, identity: Identity) -> Calibration | None:
    """Return the calibration of this model and setting, None if there is none.

    Raises:
        ValueError: the file is damaged, or belongs to another model or setting.
    """
    path = place(folder, name_of(identity))
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    try:
        found = Calibration.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise ValueError(
            f"{path} is not a calibration: {error.errors()[0]['msg']}. Calibrate again"
        ) from error
    if found.identity != name_of(identity):
        raise ValueError(f"{path} is of another model or setting ({found.label}). Calibrate again")
    return found
