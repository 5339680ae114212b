"""Images in messages of all three APIs, and what is refused of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from mixedkv.bundled import model_path
from mixedkv.model.gguf_file import read_model_file
from support.models.families import ADD
from support.models.images import data_url, png
from support.models.zoo.projector import write_projector
from support.patience import PATIENCE
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def mmproj(tmp_path_factory: pytest.TempPathFactory) -> Path:
    width = int(read_model_file(model_path()).get("embedding_length"))
    return write_projector("mlp", width, tmp_path_factory.mktemp("mmproj"))


@pytest.fixture(scope="module")
def server(mmproj: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = str(tmp_path_factory.mktemp("store"))
    with running("--mmproj", str(mmproj), "--n-ctx", "2048", "--store", store) as server:
        yield server


def part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def asking(*parts: Any, **body: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": 8, "temperature": 0, **body}


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_chat_about_an_image(server: Server) -> None:
    first = server.post(CHAT, asking("What is this?", part(png())))
    again = server.post(CHAT, asking("What is this?", part(png())))
    third = server.post(CHAT, asking("What is this?", part(png())))
    other = server.post(CHAT, asking("What is this?", part(png(1))))
    n = first["usage"]["prompt_tokens"]
    assert cached(first) == 0
    assert cached(third) == n - 1
    assert [answer["choices"] for answer in (again, third)] == [first["choices"]] * 2
    assert 0 <= cached(other) < n - 16  # those of the image are its own
    assert server.post(CHAT, asking("What is this?"))["usage"]["prompt_tokens"] == n - 16


def test_clients_as_they_are(server: Server) -> None:
    said = server.post(CHAT, asking("What is this?", part(png())))["choices"][0]["message"]["content"]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    body: Any = {"model": MODEL, **asking("What is this?", part(png()))}
    chunks = client.chat.completions.create(**body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    content = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": data_url(png()), "detail": "auto"},
    ]
    given: Any = [{"role": "user", "content": content}]
    response = client.responses.create(model=MODEL, input=given, max_output_tokens=8, temperature=0)
    assert response.output_text == said

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    blocks = [{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]
    messages: Any = [{"role": "user", "content": blocks}]
    claude = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0)
    answer = claude.messages.create(model=MODEL, messages=messages, max_tokens=8)
    assert answer.usage.input_tokens > 16
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_a_constrained_answer_and_two_choices(server: Server) -> None:
    body = asking(part(png()), "Red?", regex="yes|no", n=2)
    texts = [choice["message"]["content"] for choice in server.post(CHAT, body)["choices"]]
    assert set(texts) <= {"yes", "no"}


def test_images_in_a_prompt_of_llama_server(server: Server) -> None:
    chat = asking("What is this?", part(png()))
    text = server.post("/apply-template", asking("What is this?<__media__>"))["prompt"]
    file = base64.b64encode(png()).decode()
    prompt = {"prompt_string": text, "multimodal_data": [file]}
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 8, "temperature": 0})
    said = server.post(CHAT, chat)
    assert answer["content"] == said["choices"][0]["message"]["content"]
    assert answer["tokens_evaluated"] == said["usage"]["prompt_tokens"]
    assert server.post(f"{CHAT}/input_tokens", chat)["input_tokens"] == said["usage"]["prompt_tokens"]
    for wrong in (
        {**prompt, "prompt_string": "no place"},
        {**prompt, "multimodal_data": ["not Base64"]},
        {**prompt, "multimodal_data": [base64.b64encode(b"no image").decode()]},
        [prompt, "another"],
    ):
        assert server.status("POST", "/completion", {"prompt": wrong}) == 400


def test_what_is_kept_has_no_images(server: Server) -> None:
    content = [{"type": "input_image", "image_url": data_url(png())}]
    body = {"input": [{"role": "user", "content": content}], "store": True}
    assert server.status("POST", "/v1/responses", body) == 400
    assert server.status("POST", "/v1/warm", {"messages": asking(part(png()))["messages"]}) == 400
    assert server.status("POST", "/apply-template", {"messages": asking(part(png()))["messages"]}) == 400
    session = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "ttl": 60}
    made = server.post("/v1/context", session)
    status, answer, _ = server.request("POST", CHAT, asking(part(png()), session_id=made["session_id"]))
    assert (status, answer["error"]["param"]) == (400, "session_id")


def test_the_mark_of_an_image_is_no_image(server: Server) -> None:
    """Whoever writes it gets text."""
    from mixedkv.prompts.part import MARK

    assert server.post(CHAT, asking(f"What is {MARK}?"))["choices"]
    assert server.post(CHAT, asking(f"What is {MARK}?", part(png())))[
        "choices"
    ]  # another process, another mark


def test_without_an_encoder() -> None:
    with running("--n-ctx", "512") as plain:
        status, answer, _ = plain.request("POST", CHAT, asking(part(png())))
        assert status == 400
        assert "--mmproj" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--mmproj", "/nowhere.gguf"), "no such file"),
        (("--mmproj", str(model_path())), "image encoder"),
        (("--mmproj", "other=/nowhere.gguf"), "no such file"),
    ],
)
@pytest.mark.nightly
def test_encoders_that_cannot_be(options: tuple[str, ...], says: str) -> None:
    server = Server("--n-ctx", "512", *options)
    assert server.process.wait(PATIENCE) != 0
    server.stop()  # all of its log is read
    assert says in server.log
    assert "Traceback" not in server.log


def test_tools_and_images(mmproj: Path) -> None:
    from support.models.families import template_path

    template = str(template_path("Qwen-Qwen2.5-7B-Instruct"))
    with running("--n-ctx", "4096", "--chat-format", template, "--mmproj", str(mmproj)) as server:
        body = asking("Add what you see.", part(png()), tools=[ADD], tool_choice="required", max_tokens=200)
        answer = server.post(CHAT, body)
        assert answer["choices"][0]["message"]["tool_calls"]
