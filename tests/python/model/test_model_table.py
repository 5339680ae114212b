"""docs/models.md is what the models of the zoo can, as of now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from model_table import page
from support import REPOSITORY

pytestmark = pytest.mark.full

PAGE = REPOSITORY / "docs" / "models.md"


@pytest.mark.nightly
def test_the_page_is_what_is_found_out(zoo_dir: Path, has_fused: bool) -> None:
    if not has_fused:
        pytest.skip("the page is of a build with the fused kernels")
    pages = PAGE.read_text(), "\n".join(page(zoo_dir))
    kept, found = (map(without_bytes, text.splitlines()) for text in pages)
    for (line, n_bytes), (now, n_bytes_now) in zip(kept, found, strict=True):
        assert line == now
        assert n_bytes == pytest.approx(n_bytes_now, rel=0.2)


def without_bytes(line: str) -> tuple[str, int]:
    """A line, and the bytes in its last cell: which checkpoints are kept depends on when answers end."""
    rest, number, end = re.match(r"(.*?)(\d{4,})?( \|)?$", line).groups()  # type: ignore[union-attr]
    return rest + (end or ""), int(number or 0)
