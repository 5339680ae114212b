"""docs/models.md is what the models of the zoo can, as of now."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import REPOSITORY
from support.model_table import page

PAGE = REPOSITORY / "docs" / "models.md"


def test_the_page_is_what_is_found_out(zoo_dir: Path, has_fused: bool) -> None:
    if not has_fused:
        pytest.skip("the page is of a build with the fused kernels")
    assert PAGE.read_text() == "\n".join(page(zoo_dir)) + "\n"
