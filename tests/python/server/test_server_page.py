"""The page at /stats, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clients.browser import CONTRASTS, OVERFLOWS, PHONE
from support.patience import PATIENCE
from support.servers.remote import free_ports
from support.servers.server import MODEL, Server, key_file, running

playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]
KEYS = ("alice-key-0123456789", "bob-key-0123456789")
_SHARES = """() => [...document.querySelectorAll("#bar-rows i")]
    .map(i => [i.className, i.getBoundingClientRect().width])"""
OpenPage = Callable[..., Any]
Change = Callable[[Any], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(
        "--n-ctx", "2048", "--parallel", "2", "--store", str(tmp_path_factory.mktemp("store"))
    ) as server:
        yield server


@pytest.fixture
def open_page(new_page: OpenPage) -> OpenPage:
    """open_page(server, change=None, wait=True, **options): a `new_page` with numbers. `change` alters the
    stats on their way to it.
    """

    def open_(server: Server, change: Change | None = None, wait: bool = True, **options: Any) -> Any:
        page = new_page(**{"locale": "de-DE", **options})
        if change is not None:
            page.route("**/v1/stats", lambda route: _answer(route, change))
        page.goto(server.url + "/stats")
        if wait:
            page.wait_for_selector("#state.live")
        return page

    return open_


def chat(server: Server, text: str = "Where is the key?", **options: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "ignore_eos": True, **options}
    answer = server.post("/v1/chat/completions", body)
    server.wait_until_idle()  # what it changes in the stats has changed
    return answer


def number(page: Any, path: str) -> float:
    """What the page shows for a member of /v1/stats."""
    return _number(page.text_content(f'[data-stat="{path}"]'))


def _number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def cells(page: Any, body: str) -> list[list[str]]:
    """The texts of a table's rows."""
    return page.evaluate(
        "id => [...document.getElementById(id).rows].map(r => [...r.cells].map(c => c.textContent))", body
    )


def pause(page: Any, server: Server) -> Any:
    """Stats that the page, paused, shows: nothing happens in between."""
    stats = server.wait_until_idle()
    page.click("#pause")
    page.wait_for_selector("#state:has-text('Paused')")
    return stats


def _answer(route: Any, change: Change) -> None:
    now = route.fetch().json()
    change(now)
    route.fulfill(json=now)


def test_it_loads_from_the_server_alone_and_without_a_complaint(server: Server, open_page: OpenPage) -> None:
    chat(server)
    page = open_page(server)
    with page.expect_response("**/v1/stats"):  # one more poll
        pass
    assert page.noise == []
    assert set(page.requested) == {server.url + "/stats", server.url + "/v1/stats"}
    assert page.requested.count(server.url + "/v1/stats") >= 2


def test_its_numbers_are_those_of_the_stats(server: Server, open_page: OpenPage) -> None:
    for text in ("Where is the key?", "Where is the key? And the lamp?", "Something else."):
        chat(server, text)
    page = open_page(server)
    stats = pause(page, server)
    cache, store = stats["cache"], stats["store"]
    for path in ("cells_used", "tokens_hot", "tokens_cold"):
        assert cache[path] > 0, path
    for path in (
        "cache.queries_tokens",
        "cache.tokens_shared",
        "cache.evictions",
        "requests.running",
        "requests.waiting",
        "requests.parallel",
        "requests.max_queue",
    ):
        part, name = path.split(".")
        assert number(page, path) == stats[part][name], path
    assert page.text_content('[data-stat="model"]') == MODEL
    assert number(page, "cache.hit_rate") == pytest.approx(100 * cache["hit_rate"], abs=0.06)

    rows = [_number(row[1]) for row in cells(page, "parts-rows")]
    assert rows == [cache["tokens_hot"], cache["tokens_cold"], cache["n_ctx"] - cache["cells_used"]]
    memory = [row[1] for row in cells(page, "parts-memory")]
    sizes = [cache["bytes_hot"], cache["bytes_cold"], store["bytes_ram"], store["bytes_disk"]]
    assert [_bytes(text) for text in memory] == pytest.approx(sizes, rel=0.05)
    hits = cache["hits_tokens"]
    evaluated = cache["queries_tokens"] - sum(hits.values())
    assert hits.pop("remote") == 0  # it is shown where there is one
    assert [_number(row[1]) for row in cells(page, "parts-hits")] == [*hits.values(), evaluated]

    shown = [[_number(cell) for cell in row[1:4]] for row in cells(page, "sequences")]
    assert shown == [[seq["tokens"], seq["hot"], seq["cold"]] for seq in stats["sequences"]]
    for kind, summary in stats["latency"].items():
        if kind != "of_latest_requests":
            shown_seconds = _seconds(page.text_content(f'[data-stat="latency.{kind}.median_seconds"]'))
            assert shown_seconds == pytest.approx(summary["median_seconds"], rel=0.1, abs=6e-5), kind
            assert page.text_content(f"#of-{kind}").startswith(f"median of {summary['count']}, the last ")
    layers = [(int(row[0]), _bytes(row[2]), _bytes(row[3])) for row in cells(page, "layers")]
    assert [layer[0] for layer in layers] == [layer["il"] for layer in stats["layers"]]
    assert sum(layer[1] + layer[2] for layer in layers) == pytest.approx(cache["bytes_total"], rel=0.05)
    recent = [[_number(row[1]), _number(row[4]), row[7]] for row in cells(page, "recent")]
    names = ("prompt_tokens", "completion_tokens", "finish_reason")
    assert recent == [[request[name] for name in names] for request in stats["recent"]]


def _seconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"s": 1, "ms": 0.001}[unit]


def _bytes(text: str) -> float:
    value, unit = text.split()
    return float(value) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


@pytest.mark.nightly
def test_the_bar_is_divided_as_the_rows_are(server: Server, open_page: OpenPage) -> None:
    chat(server, max_tokens=150)  # some of which are cold
    page = open_page(server)
    cache = pause(page, server)["cache"]
    widths = dict(page.evaluate(_SHARES))
    parts = {
        "hot": cache["tokens_hot"],
        "cold": cache["tokens_cold"],
        "free": cache["n_ctx"] - cache["cells_used"],
    }
    for kind, n in parts.items():
        assert widths[kind] / sum(widths.values()) == pytest.approx(n / cache["n_ctx"], abs=0.02), kind


@pytest.mark.nightly
def test_it_follows_a_request(server: Server, open_page: OpenPage) -> None:
    chat(server, "Before.")
    page = open_page(server)
    before, shown = cells(page, "recent")[0], number(page, "cache.queries_tokens")
    usage = chat(server, "A question that was not asked before, of some more words.")["usage"]
    playwright.expect(page.locator("#recent td").first).to_have_text(str(usage["prompt_tokens"]))
    assert cells(page, "recent")[0] != before
    assert number(page, "cache.queries_tokens") == shown + usage["prompt_tokens"]
    assert number(page, "engine.generation_tokens_per_second") > 0
    for kind in ("ttft", "itl"):
        assert re.search(r"^[\d.]+ m?s$", page.text_content(f'[data-stat="latency.{kind}.median_seconds"]'))
    assert "question" not in page.content()


@pytest.mark.nightly
def test_nothing_has_happened_yet(server: Server, open_page: OpenPage) -> None:
    """Zeros and empty lists are shown as such."""

    def empty(now: Any) -> None:
        now.update(sequences=[], recent=[], store=None)
        now["cache"] |= {
            "cells_used": 0,
            "tokens_hot": 0,
            "tokens_cold": 0,
            "queries_tokens": 0,
            "hit_rate": 0.0,
        }
        now["cache"]["hits_tokens"] = {"context": 0, "ram": 0, "disk": 0}
        for kind in ("ttft", "itl"):
            now["latency"][kind] = {"count": 0, "median_seconds": None, "p95_seconds": None}

    page = open_page(server, empty)
    assert cells(page, "sequences") == [["The context holds no rows."]]
    assert cells(page, "recent") == [["No requests yet."]]
    for kind in ("ttft", "itl"):
        assert page.text_content(f'[data-stat="latency.{kind}.median_seconds"]') == "\u2013"
        assert page.text_content(f"#of-{kind}") == "no requests yet"
    assert number(page, "cache.hit_rate") == 0
    assert [row[2] for row in cells(page, "parts-hits")] == ["\u2013"] * 4
    assert "no store" in page.text_content("#store")
    assert not re.search("NaN|undefined|Infinity", page.inner_text("body"))
    assert page.noise == []


def test_names_are_text_and_never_markup(server: Server, open_page: OpenPage) -> None:
    bad = "<img src=x onerror=alert(1)>"

    def change(now: Any) -> None:
        now["model"] = now["recent"][0]["finish_reason"] = now["sequences"][0]["state"] = bad

    chat(server)
    page = open_page(server, change)
    assert page.text_content('[data-stat="model"]') == bad
    assert page.query_selector("img") is None


@pytest.mark.nightly
def test_the_keyboard_reaches_everything_in_order(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    order = []
    for _ in range(7):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                "(() => { const e = document.activeElement;"
                "return e.id || e.getAttribute('aria-labelledby') || e.getAttribute('href'); })()"
            )
        )
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", order
    assert order == ["pause", "h-sequences", "h-layers", "h-recent", "v1/stats", "metrics", "./"]
    page.focus("#pause")
    page.keyboard.press("Enter")
    page.wait_for_selector("#state:has-text('Paused')")
    polls = len(page.requested)
    page.wait_for_timeout(3000)
    assert len(page.requested) == polls
    page.keyboard.press("Space")
    page.wait_for_selector("#state.live")


@pytest.mark.nightly
def test_landmarks_and_headers(server: Server, open_page: OpenPage) -> None:
    chat(server)
    page = open_page(server)
    tree = page.locator("body").aria_snapshot()
    for expected in ("- banner:", "- main:", "- contentinfo:", "- status: Live"):
        assert expected in tree, tree
    for expected in (
        '- heading "Latest requests" [level=2]',
        '- columnheader "Answer tokens"',
        '- rowheader "0"',
    ):
        assert expected in tree, tree
    assert re.search(r'img "Hot \(F16\): [\d,]+, Cold \(q4_0\): [\d,]+, Free: [\d,]+"', tree), tree
    assert page.evaluate("document.documentElement.lang") == "en"


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(server: Server, open_page: OpenPage, scheme: str) -> None:
    chat(server)
    page = open_page(server, color_scheme=scheme)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 50
    assert [entry for entry in contrasts if entry[1] < 4.5] == []
    backs = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", backs)[:3])) < 3 * 128) == (scheme == "dark")


@pytest.mark.nightly
def test_it_fits_a_phone(server: Server, open_page: OpenPage) -> None:
    for text in ("One.", "Two and something more.", "Three."):
        chat(server, text)

    def large(now: Any) -> None:
        now["model"] = "a-name-of-a-model-that-is-long-" + "x" * 60
        now["cache"] |= {"n_ctx": 1_048_576, "queries_tokens": 123_456_789}
        for entry in now["recent"]:
            entry |= {
                "prompt_tokens": 131_072,
                "cached_tokens": 131_071,
                "ttft_seconds": 12.3,
                "seconds": 123.4,
            }
        for seq in now["sequences"]:
            seq |= {"tokens": 131_072, "hot": 4_096, "cold": 126_976}

    assert not open_page(server, viewport=PHONE).evaluate(OVERFLOWS)
    page = open_page(server, large, viewport=PHONE)
    assert "131,072" in page.text_content("#recent")
    assert not page.evaluate(OVERFLOWS)
    cut = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    )
    assert cut == 0, "a table is wider than its section"


@pytest.mark.nightly
def test_it_says_that_the_server_has_gone_and_comes_back(open_page: OpenPage) -> None:
    options = ("--n-ctx", "1024", "--parallel", "2", "--port", str(free_ports(1)))
    with running(*options) as first:
        chat(first)
        page = open_page(first)
        n = number(page, "cache.queries_tokens")
        first.stop()
        page.wait_for_selector("#state.lost")
        assert "out of reach" in page.text_content("#state")
        assert number(page, "cache.queries_tokens") == n  # the last numbers stay
    with running(*options):
        page.wait_for_selector("#state.live", timeout=1000 * PATIENCE)
        playwright.expect(page.locator('[data-stat="cache.queries_tokens"]')).to_have_text("0")


def test_a_key_is_asked_for_and_stays_in_the_tab(tmp_path: Path, open_page: OpenPage) -> None:
    keys = key_file(tmp_path, f"alice:{KEYS[0]}", f"bob:{KEYS[1]}")
    with running("--n-ctx", "1024", "--parallel", "2", "--api-key-file", str(keys)) as server:
        body = {"prompt": "Where is the key to the old house by the lake and who has it?", "max_tokens": 9}
        server.post("/v1/completions", body, key=KEYS[1])
        page = open_page(server, wait=False)
        page.wait_for_selector("#key")
        assert not page.is_visible("main")
        assert page.evaluate("document.activeElement.id") == "secret"
        page.keyboard.type("not-a-key-of-this-server")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#refused")).to_contain_text("does not know")
        page.fill("#secret", KEYS[0])
        page.keyboard.press("Enter")
        page.wait_for_selector("#state.live")
        assert page.is_visible("main")
        assert cells(page, "recent") == [["No requests yet."]]  # bob's are not alice's
        assert number(page, "cache.queries_tokens") > 0  # sums are
        page.reload()
        page.wait_for_selector("#state.live")
        stored = page.evaluate(
            "[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]"
        )
        assert KEYS[0] in stored[0]
        assert stored[1:] == ["{}", ""]
        assert not any(KEYS[0] in url for url in page.requested)
        page.click("#forget")
        page.wait_for_selector("#key")
        assert not page.is_visible("main")
        assert MODEL not in page.inner_text("body")
        assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.nightly
def test_rates_are_gone_when_nobody_tells_them(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    rate = page.locator('[data-stat="engine.generation_tokens_per_second"]')
    playwright.expect(rate).to_have_text(re.compile(r"\d"))
    page.route("**/v1/stats", lambda route: route.abort())
    page.wait_for_selector("#state.lost")
    playwright.expect(rate).to_have_text("\u2013")
    page.unroute("**/v1/stats")
    page.wait_for_selector("#state.live")
    playwright.expect(rate).to_have_text(re.compile(r"\d"))


@pytest.mark.nightly
def test_no_row_is_cut_and_medians_say_how_old_they_are(server: Server, open_page: OpenPage) -> None:
    chat(server)

    def many(now: dict[str, Any]) -> None:
        now["recent"] = [{**now["recent"][0], "time": now["recent"][0]["time"] - 3 * 3600}] * 40
        now["layers"] = now["layers"] * 12

    page = open_page(server, many)
    assert page.evaluate(
        "[...document.querySelectorAll('.scroll')].every(e => e.scrollHeight <= e.clientHeight + 1)"
    )
    assert len(cells(page, "recent")) == 12
    page.click("#more")
    assert len(cells(page, "recent")) == 40
    assert ", the last 3 h" in page.inner_text("#of-ttft")
