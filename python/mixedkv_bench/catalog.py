"""The tests of `mixedkv bench`, and what their rows are."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from mixedkv_bench import products, quality, quick, reuse, sensitivity, speed
from mixedkv_bench.products import ProductsRow
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.quick import QuickRow
from mixedkv_bench.reuse import ReuseRow
from mixedkv_bench.sensitivity import SensitivityRow
from mixedkv_bench.speed import SpeedRow
from mixedkv_bench.tasks import TasksRow

TESTS = {module.TEST.name: module.TEST for module in (quick, speed, quality, products, reuse, sensitivity)}

AnyRow = Annotated[
    QuickRow | SpeedRow | QualityRow | TasksRow | ProductsRow | ReuseRow | SensitivityRow,
    Field(discriminator="test"),
]
ROWS: TypeAdapter[AnyRow] = TypeAdapter(AnyRow)
