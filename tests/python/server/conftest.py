"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.browser import launch


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()
