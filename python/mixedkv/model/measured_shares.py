"""Shares of the divergence that K or V of each layer causes, as `mixedkv bench sensitivity` measured them."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mixedkv.model.layer_plan import Part


class _Share(BaseModel):
    """The fields of a row that a plan of layers needs; a row without a layer is one of the planned caches."""

    model_config = ConfigDict(strict=True)

    layer: int | None = None
    part: Part | None = None
    kld_share: float | None = None


def read_shares(path: Path | str) -> dict[tuple[int, Part], float]:
    """Return the shares, in nats, by layer and part, from a file of `mixedkv bench sensitivity --json`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no such rows.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("test") == "sensitivity"]
        read = [_Share.model_validate(row) for row in rows]
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not what bench sensitivity --json writes: {error}") from None
    shares = {(row.layer, row.part): row.kld_share for row in read if row.layer is not None and row.part}
    if not shares or None in shares.values():
        raise ValueError(f"{path} has no share of each layer: run mixedkv bench sensitivity --json {path}")
    return shares  # type: ignore[return-value]
