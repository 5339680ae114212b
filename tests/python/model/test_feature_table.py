"""docs/features.md is what features do together, as of now."""

from __future__ import annotations

from pathlib import Path

import pytest

from feature_table import missing, page, without_models
from support import REPOSITORY

pytestmark = pytest.mark.full

PAGE = REPOSITORY / "docs" / "features.md"


@pytest.mark.slow
def test_the_page_is_what_is_found_out(tmp_path: Path, has_fused: bool) -> None:
    if not has_fused:
        pytest.skip("the page is of a build with the fused kernels")
    assert PAGE.read_text() == "\n".join(page(tmp_path)) + "\n"


def test_the_page_ends_with_what_needs_no_engine() -> None:
    assert PAGE.read_text().endswith("\n".join(without_models()) + "\n")


def test_tests_that_the_page_names_are_there() -> None:
    assert not missing()
