"""The page at /docs, in a real browser: what /openapi.json says, without anything from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.clients.browser import CONTRASTS, OVERFLOWS, PHONE
from support.servers.server import Server, running

playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]
_METHODS = ("get", "post", "put", "patch", "delete")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "512", "--root-path", "/llm") as server:
        yield server


@pytest.fixture
def open_page(new_page: Callable[..., Any]) -> Callable[..., Any]:
    def open_(address: str, **options: Any) -> Any:
        page = new_page(**options)
        page.goto(address)
        page.wait_for_selector("details")
        return page

    return open_


@pytest.mark.parametrize("root", ["", "/llm"])
def test_it_shows_every_endpoint_and_loads_from_the_server_alone(
    server: Server, open_page: Callable[..., Any], root: str
) -> None:
    page = open_page(f"{server.url}{root}/docs")
    paths = server.request("GET", "/openapi.json")[1]["paths"]
    expected = [
        f"{method}-{path}" for path, methods in paths.items() for method in _METHODS if method in methods
    ]
    assert sorted(page.evaluate("[...document.querySelectorAll('details')].map(e => e.id)")) == sorted(
        expected
    )
    assert page.noise == []
    assert set(page.requested) == {
        f"{server.url}{root}/{path}" for path in ("docs", "page/docs.css", "page/docs.js", "openapi.json")
    }


def test_an_endpoint_has_its_fields_and_those_of_the_objects_within(
    server: Server, open_page: Callable[..., Any]
) -> None:
    page = open_page(server.url + "/docs")
    chat = page.locator("details[id='post-/v1/chat/completions']")
    chat.locator("summary").click()
    schemas = server.request("GET", "/openapi.json")[1]["components"]["schemas"]
    first = chat.locator("table").first.locator("th").all_inner_texts()
    assert first == list(schemas["ChatRequest"]["properties"])
    within = {text.removeprefix("Body: ") for text in chat.locator("h3").all_inner_texts()}
    assert "ChatRequest" in within
    assert len(within) > 3
    assert within <= set(schemas)
    assert f"curl -X POST {server.url}/v1/chat/completions" in chat.inner_text()


def test_the_search_leaves_what_has_the_word(server: Server, open_page: Callable[..., Any]) -> None:
    page = open_page(server.url + "/docs")
    page.fill("#find", "count_tokens")
    playwright.expect(page.locator("details:visible")).to_have_count(1)
    page.fill("#find", "logit_bias")  # a field
    playwright.expect(page.locator("details[id='post-/v1/completions']")).to_be_visible()
    playwright.expect(page.locator("details[id='get-/health']")).to_be_hidden()
    page.fill("#find", "")
    playwright.expect(page.locator("details[id='get-/health']")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(server: Server, open_page: Callable[..., Any], scheme: str) -> None:
    page = open_page(server.url + "/docs", viewport=PHONE, color_scheme=scheme)
    page.locator("details[id='post-/v1/chat/completions'] summary").click()
    assert not page.evaluate(OVERFLOWS)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    assert [entry for entry in contrasts if entry[1] < 4.5] == []
