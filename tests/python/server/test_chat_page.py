"""The chat at /, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled import model_path
from mixedkv.model.gguf_file import read_model_file
from support.clients.browser import CONTRASTS, OVERFLOWS, PHONE
from support.models.images import png
from support.models.zoo.projector import write_projector
from support.patience import wait_for
from support.servers.server import Server, key_file, running

playwright = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
pytestmark = [pytest.mark.full, pytest.mark.needs("chromium")]
KEY = "alice-key-0123456789"
CHAT = "**/v1/chat/completions"
USAGE = {"prompt_tokens": 1300, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1204}}
ENDLESS = {"ignore_eos": True, "max_tokens": 60_000}  # for minutes
_KEPT = """async () => {
    const { loadChat } = await import(location.origin + "/page/chats.js");
    const chat = await loadChat(location.hash.slice(1));
    return chat?.nodes[chat.shown].content ?? "";
}"""
OpenPage = Callable[..., Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    width = int(read_model_file(model_path()).get("embedding_length"))
    mmproj = write_projector("mlp", width, tmp_path_factory.mktemp("mmproj"))
    with running("--n-ctx", "65536", "--parallel", "2", "--mmproj", str(mmproj)) as server:
        yield server


@pytest.fixture
def open_page(new_page: OpenPage) -> OpenPage:
    """open_page(server, change=None, **options): a `new_page` with the chat. `change` alters the bodies of
    its requests.
    """

    def open_(server: Server, change: dict[str, Any] | None = None, **options: Any) -> Any:
        page = new_page(**options)
        if change is not None:
            page.route(CHAT, lambda route: _change(route, change))
        page.goto(server.url)
        page.wait_for_selector("#send:has-text('Send')")
        return page

    return open_


def _change(route: Any, change: dict[str, Any]) -> None:
    route.continue_(post_data=json.dumps({**route.request.post_data_json, **change}))


def says(page: Any, *deltas: dict[str, Any], reason: str = "stop", usage: Any = USAGE) -> list[Any]:
    """Have these answered from now on; the bodies of requests."""
    requested: list[Any] = []
    chunks: list[Any] = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{"choices": [{"delta": {}, "finish_reason": reason}]}, {"choices": [], "usage": usage}]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def answer(route: Any) -> None:
        requested.append(route.request.post_data_json)
        route.fulfill(body=text, content_type="text/event-stream")

    page.route(CHAT, answer)
    return requested


def ask(page: Any, text: str, n_answers: int = 1) -> None:
    """Type a message and wait for its answer's end."""
    page.fill("#text", text)
    page.keyboard.press("Enter")
    ended(page, n_answers)


def ended(page: Any, n_answers: int = 1) -> None:
    playwright.expect(page.locator("article.assistant [aria-label='Regenerate this answer']")).to_have_count(
        n_answers
    )


def answer_text(page: Any) -> str:
    return str(page.locator("article.assistant > .body").first.inner_text())


def note(page: Any) -> str:
    return str(page.locator("article.assistant .feet").last.inner_text())


def test_a_chat_is_kept_and_its_tokens_are_not_evaluated_again(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, {"max_tokens": 12, "ignore_eos": True, "temperature": 0})
    ask(page, "Where is the key?")
    assert "12 tokens" in note(page)
    assert "cut: as long as it may be" in note(page)
    ask(page, "And the lamp?", 2)
    cached = server.wait_until_idle()["recent"][0]["cached_tokens"]
    assert cached > 0
    assert f"{cached} tokens from cache" in note(page)
    before = page.locator("#log").inner_text()
    page.reload()
    ended(page, 2)
    assert page.locator("#log").inner_text() == before
    assert page.locator("#chats a").all_inner_texts() == ["Where is the key?"]
    page.click("#new")
    page.wait_for_selector(".empty")
    page.go_back()
    ended(page, 2)
    assert page.noise == []
    assert {url.split("/")[2] for url in page.requested} == {server.url.split("/")[2]}


def test_stop_ends_the_work_and_keeps_the_text(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, ENDLESS)
    page.fill("#text", "Tell me a story")
    page.keyboard.press("Enter")
    wait_for(lambda: len(answer_text(page)) > 40, 0.05)
    page.click("#send:has-text('Stop')")
    ended(page)
    assert "Stopped" in note(page)
    assert server.wait_until_idle()["recent"][0]["finish_reason"] == "abort"
    text = answer_text(page)
    page.reload()
    ended(page)
    assert answer_text(page) == text


@pytest.mark.nightly
def test_a_reload_keeps_what_an_answer_had(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, ENDLESS)
    page.fill("#text", "Tell me a story")
    page.keyboard.press("Enter")
    wait_for(lambda: len(page.evaluate(_KEPT)) > 40, 0.05)
    page.reload()
    ended(page)
    assert "Not finished" in note(page)
    assert len(answer_text(page)) > 20
    server.wait_until_idle()


@pytest.mark.nightly
def test_an_edit_begins_a_branch(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    requested = says(page, {"content": "One."})
    ask(page, "First")
    ask(page, "Second", 2)
    page.locator("article.user >> text=Edit").last.click()
    page.keyboard.type(", edited")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("article.user > .body").last).to_have_text("Second, edited")
    ended(page, 2)
    assert [m["content"] for m in requested[-1]["messages"]] == ["First", "One.", "Second, edited"]
    assert "1,204 tokens from cache" in note(page)
    last = page.locator("article.user").last
    playwright.expect(last).to_contain_text("2 of 2")
    last.locator("[aria-label='The version before']").click()
    playwright.expect(page.locator("article.user > .body").last).to_have_text("Second")
    page.reload()
    playwright.expect(page.locator("article.user > .body").last).to_have_text("Second")
    page.locator("article.assistant [aria-label='Regenerate this answer']").last.click()
    playwright.expect(page.locator("article.assistant").last).to_contain_text("2 of 2")
    assert [m["content"] for m in requested[-1]["messages"]] == ["First", "One.", "Second"]


@pytest.mark.nightly
def test_two_tabs_have_the_same_chats(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    says(page, {"content": "One."})
    ask(page, "First")
    other = page.context.new_page()
    other.goto(page.url)
    ended(other)
    says(other, {"content": "Two."})
    ask(other, "Second", 2)
    ended(page, 2)  # the first tab has it too
    ask(page, "Third", 3)
    ended(other, 3)
    texts = ["First", "Second", "Third"]
    for each in (page, other):
        assert each.locator("article.user > .body").all_inner_texts() == texts
    page.on("dialog", lambda dialog: dialog.accept())
    page.hover("#chats li")
    page.click("[aria-label='Delete First']")
    playwright.expect(other.locator("#chats li")).to_have_count(0)
    playwright.expect(other.locator(".empty")).to_be_visible()
    other.reload()
    playwright.expect(other.locator("#chats li")).to_have_count(0)


HOSTILE = """<script>window.ran = 1</script><img src=x onerror="window.ran = 1">
![see](https://evil.example/a.png?secret) ![x](data:text/html,<script>window.ran=1</script>)

[press](javascript:window.ran=1) [press](JaVaScRiPt:window.ran=1) [data](data:text/html;base64,PHM+)
[ok](https://example.org/a"onmouseover="window.ran=1)

```html"><script>window.ran=1</script>
</code></pre><iframe srcdoc="<script>parent.ran = 1</script>">
```

| <svg onload=window.ran=1> | b |
|---|---|
| <style>*{display:none}</style> | `<b>` |

# <a href="javascript:window.ran=1">x</a>
- <form action=https://evil.example><input autofocus onfocus=window.ran=1>
> <object data=x></object>"""


def test_hostile_output_is_text(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    says(page, {"content": HOSTILE, "reasoning_content": HOSTILE})
    ask(page, HOSTILE)
    page.reload()
    ended(page)
    for link in page.locator("#log a").all():
        assert re.match(r"https://(evil\.example|example\.org)", link.get_attribute("href") or "")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    made = (
        "script, img, iframe, svg, style, object, #log input, #log form, [onerror], [onload], [onmouseover]"
    )
    assert page.locator("body").locator(made).evaluate_all("all => all.map(e => e.outerHTML)") == [
        '<script type="module" src="page/chat.js"></script>'
    ]
    assert page.evaluate("window.ran === undefined")
    assert page.noise == []
    assert {url.split("/")[2] for url in page.requested} == {server.url.split("/")[2]}
    assert "<img src=x onerror=" in answer_text(page)


@pytest.mark.nightly
def test_markdown_is_shown(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    text = (
        "# Title #\nA **bold**, *thin*, `co*d*e` and snake_case_name, 2 * 3 * 4.\n\n1. one\n2. two\n"
        "   - in\n\n"
        "| a | b |\n|--|--|\n| 1 | 2 |\n\n```python\nx = '<b>'\n\ny\n```\n> said\n\n~~old~~ \\*no\\*"
    )
    says(page, {"content": text})
    ask(page, "Show it")
    assert page.locator("article.assistant > .body").first.evaluate("e => e.innerHTML") == (
        "<h3>Title</h3><p>A <strong>bold</strong>, <em>thin</em>, <code>co*d*e</code> and snake_case_name, "
        '2 * 3 * 4.</p><ol start="1"><li>one</li><li>two<ul><li>in</li></ul></li></ol>'
        '<div class="scroll"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>2'
        '</td></tr></tbody></table></div><div class="code"><div class="bar"><span>python</span>'
        '<button class="copy" type="button">Copy</button></div><pre><code>x = \'&lt;b&gt;\'\n\ny</code></pre>'
        "</div><blockquote><p>said</p></blockquote><p><s>old</s> *no*</p>"
    )


PARTS = (
    *("*a ", "**a* ", "_", "`", "`` ` ", "[", "[a](", "> ", ">", "- ", "  - a\n", "# ", "|-", "a\n", "```\n"),
    *("\\", "https://", "1. 1. ", "~~~ ", "* * * ", "-- ", "x\n- y\n\n", "| |\n|-|\n"),
)


@pytest.mark.nightly
def test_time_grows_with_the_length_of_a_text(server: Server, open_page: OpenPage) -> None:
    """With these a parser that looks twice takes minutes."""
    page = open_page(server)
    for part in PARTS:
        seconds = page.evaluate(
            """async (part) => {
                const { make, showMarkdown } = await import(location.origin + "/page/markdown.js");
                const began = performance.now(), text = part.repeat(100000 / part.length);
                for (const before of ["", "# ", "x | y\\n"]) showMarkdown(make("div"), before + text + "x");
                return (performance.now() - began) / 1000;
            }""",
            part,
        )
        assert seconds < 20, part


@pytest.mark.nightly
def test_a_call_of_a_tool_is_shown_and_answered(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    page.click("#open-settings")
    page.fill("#tools", "[{")
    page.click("dialog >> text=Done")
    playwright.expect(page.locator("#wrong")).to_contain_text("Tools:")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    page.fill("#tools", json.dumps([tool]))
    page.fill("#system", "Be short.")
    page.fill("#temperature", "0.5")
    page.click("dialog >> text=Done")
    begun = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city": '}}
    more = {"index": 0, "function": {"arguments": '"Rome"}'}}
    requested = says(page, {"tool_calls": [begun]}, {"tool_calls": [more]}, reason="tool_calls")
    ask(page, "How warm is it?")
    assert requested[0]["messages"][0] == {"role": "system", "content": "Be short."}
    assert (requested[0]["tools"], requested[0]["temperature"]) == ([tool], 0.5)
    assert "calls weather" in page.locator("article.assistant").inner_text()
    assert '{"city": "Rome"}' in page.locator("article.assistant").inner_text()
    assert page.get_attribute("#text", "placeholder") == "Result of weather"
    requested = says(page, {"content": "It is warm."})
    ask(page, "31 degrees", 2)
    assert [m["role"] for m in requested[0]["messages"]] == ["system", "user", "assistant", "tool"]
    assert requested[0]["messages"][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "31 degrees"}


@pytest.mark.nightly
def test_images_go_with_a_message(server: Server, open_page: OpenPage) -> None:
    page = open_page(server, {"max_tokens": 4, "ignore_eos": True})
    page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": png()})
    playwright.expect(page.locator("#images img")).to_have_count(1)
    ask(page, "What is this?")
    assert "4 tokens" in note(page)
    page.reload()
    ended(page)
    assert page.evaluate("document.querySelector('article.user img').naturalWidth") == 60


@pytest.mark.nightly
def test_an_error_is_shown_and_the_next_try_works(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    page.route(
        CHAT, lambda route: route.fulfill(status=429, json={"error": {"message": "The queue is full."}})
    )
    ask(page, "First")
    assert "The queue is full." in note(page)
    requested = says(page, {"content": "Now."})
    page.click("article.assistant [aria-label='Regenerate this answer']")
    playwright.expect(page.locator("article.assistant > .body").first).to_have_text("Now.")
    assert [m["content"] for m in requested[0]["messages"]] == ["First"]


def test_a_key_is_asked_for(tmp_path: Path, open_page: OpenPage) -> None:
    keys = key_file(tmp_path, f"alice:{KEY}")
    with running("--n-ctx", "1024", "--parallel", "2", "--api-key-file", str(keys)) as server:
        page = open_page(server, {"max_tokens": 4, "ignore_eos": True})
        page.wait_for_selector("#key:visible")
        page.fill("#secret", "not-a-key-of-this-server")
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#refused")).to_contain_text("does not know")
        page.fill("#secret", KEY)
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#key")).to_be_hidden()
        ask(page, "Hello")
        assert "4 tokens" in note(page)
        page.reload()
        ended(page)
        assert not page.is_visible("#key")
        stored = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
        assert KEY not in "".join(stored)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.nightly
def test_it_fits_a_phone_and_can_be_read(server: Server, open_page: OpenPage, scheme: str) -> None:
    page = open_page(server, viewport=PHONE, color_scheme=scheme)
    says(page, {"content": "A " + "long" * 100 + "\n```\n" + "code " * 100 + "\n```\n|a|b|\n|-|-|\n|1|2|"})
    ask(page, "word" * 80)
    assert not page.evaluate(OVERFLOWS)
    page.click("#open-side")
    playwright.expect(page.locator("#new")).to_be_visible()
    page.wait_for_timeout(300)
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 10
    assert [entry for entry in contrasts if entry[1] < 4.5] == []
    page.click("#new")
    playwright.expect(page.locator("#new")).to_be_hidden()


def test_a_base_model_continues_the_text(open_page: OpenPage, zoo_path: Callable[[str], Path]) -> None:
    with running("-m", str(zoo_path("llama-64")), "--n-ctx", "512") as server:
        page = open_page(server, viewport=PHONE, has_touch=True, is_mobile=True)
        page.wait_for_selector("text=It is a base model, which is not tuned for chat.")
        assert page.get_attribute("#text", "placeholder") == "Text to continue"
        page.click("#open-settings")
        page.fill("#max_tokens", "4")
        page.click("#settings button.main")
        page.fill("#text", "On Monday")
        with page.expect_request("**/v1/completions") as requested:
            page.click("#send")
        assert requested.value.post_data_json["prompt"] == "On Monday"
        page.wait_for_selector("text=4 tokens")
        assert not page.noise


def test_a_phone_says_what_enter_does(server: Server, open_page: OpenPage) -> None:
    assert "Enter begins a new line. The button sends." in open_page(
        server, viewport=PHONE, has_touch=True, is_mobile=True
    ).inner_text("#log")
    assert "Enter sends" in open_page(server).inner_text("#log")


def attach_text(page: Any, name: str, text: str) -> None:
    page.set_input_files("#files", {"name": name, "mimeType": "text/plain", "buffer": text.encode()})


@pytest.mark.nightly
def test_texts_are_attached_and_long_pastes_become_such(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    requested = says(page, {"content": "Seen."})
    attach_text(page, "notes.md", "# The mill\n\nIts code is 4817.")
    pasted = "A line of a log.\n" * 400
    page.evaluate(
        """text => {
            const data = new DataTransfer();
            data.setData("text/plain", text);
            const options = { clipboardData: data, bubbles: true, cancelable: true };
            const event = new ClipboardEvent("paste", options);
            document.getElementById("text").dispatchEvent(event);
        }""",
        pasted,
    )
    assert page.locator("#images .file").all_inner_texts() == [
        "notes.md (3 lines) ✕",
        "Pasted text (401 lines) ✕",
    ]
    ask(page, "What is the code?")
    assert requested[0]["messages"][0]["content"] == (
        f"notes.md:\n\n# The mill\n\nIts code is 4817.\n\nPasted text:\n\n{pasted}\n\nWhat is the code?"
    )
    shown = page.locator("article.user")
    assert shown.locator("summary").all_inner_texts() == ["notes.md (3 lines)", "Pasted text (401 lines)"]
    assert not shown.locator("pre").first.is_visible()
    assert shown.locator(".body").inner_text() == "What is the code?"
    page.reload()
    ended(page)
    assert page.locator("article.user summary").count() == 2
    attach_text(page, "bad.bin", "a\0b")
    playwright.expect(page.locator("#state")).to_contain_text("bad.bin is no text in UTF-8")
    assert page.locator("#images .file").count() == 0


@pytest.mark.nightly
def test_a_message_that_is_too_long_is_put_back(open_page: OpenPage) -> None:
    with running("--n-ctx", "512") as server:
        page = open_page(server)
        text = "The lamp is in the mill. " * 400
        page.fill("#text", text)
        page.keyboard.press("Enter")
        playwright.expect(page.locator("#state")).to_contain_text("Not sent: ")
        playwright.expect(page.locator("#send")).to_have_text("Send")
        assert "context size" in page.inner_text("#state")
        assert page.input_value("#text") == text.strip()
        assert page.locator("article").count() == 0
        page.fill("#text", "The lamp")
        page.keyboard.press("Enter")
        ended(page)
        assert page.locator("article.user > .body").all_inner_texts() == ["The lamp"]


@pytest.mark.nightly
def test_a_long_message_is_folded(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    says(page, {"content": "Seen."})
    text = "word " * 500
    ask(page, text)
    body = page.locator("article.user > .body")
    assert len(body.inner_text()) < 1600
    body.locator("text=Show all").click()
    assert body.inner_text() == text.strip()


@pytest.mark.nightly
def test_chats_are_renamed_found_and_exported(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    says(page, {"content": "It is **4817**."})
    for text in ("Code of the mill?", "Colour of the lamp?"):
        page.click("#new")
        ask(page, text)
    page.on("dialog", lambda dialog: dialog.accept("The miller's secret"))
    page.hover("#chats li:last-child")
    page.click("[aria-label='Rename Code of the mill?']")
    playwright.expect(page.locator("#chats a").last).to_have_text("The miller's secret")
    page.fill("#find", "LAMP")
    playwright.expect(page.locator("#chats a")).to_have_text(["Colour of the lamp?"])
    page.fill("#find", "4817")  # in both answers
    playwright.expect(page.locator("#chats a")).to_have_count(2)
    page.fill("#find", "miller's")
    page.click("#chats a")
    playwright.expect(page.locator("#title")).to_have_text("The miller's secret")
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "The-miller-s-secret.md"
    assert download.value.path().read_text() == (
        "# The miller's secret\n\n## You\n\nCode of the mill?\n\n## Answer\n\nIt is **4817**.\n"
    )
    page.reload()
    playwright.expect(page.locator("#title")).to_have_text("The miller's secret")
    assert page.noise == []


@pytest.mark.nightly
def test_sampling_is_asked_for_and_the_context_is_measured(server: Server, open_page: OpenPage) -> None:
    page = open_page(server)
    assert page.is_visible("#model")  # also where there is one
    assert page.input_value("#model") == model_path().stem
    page.click("#open-settings")
    page.fill("#top_p", "0.9")
    page.fill("#seed", "7")
    page.click("dialog >> text=Done")
    requested = says(page, {"content": "One."})
    assert not page.is_visible("#used")
    ask(page, "First")
    assert (requested[0]["top_p"], requested[0]["seed"]) == (0.9, 7)
    playwright.expect(page.locator("#tokens")).to_have_text("1,307 of 65,536 tokens")
    assert page.evaluate("document.getElementById('meter').value") == 1307
    page.click("#open-settings")
    assert (page.input_value("#top_p"), page.input_value("#seed")) == ("0.9", "7")
