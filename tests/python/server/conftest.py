"""What tests of pages share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.clients.browser import launch
from support.patience import PATIENCE


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """new_page(**options of a browser context): a page whose `noise` is what it writes to the console and its
    errors, and whose `asked` are the addresses of its requests.
    """
    from playwright.sync_api import expect

    contexts = []

    def new(**options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(1000 * PATIENCE)
        expect.set_options(timeout=1000 * PATIENCE)
        page.noise, page.requested = [], []
        page.on("console", lambda message: page.noise.append(message.text))
        page.on("pageerror", lambda error: page.noise.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url))
        return page

    yield new
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")  # an answer that is being altered while its page closes
        context.close()
