"""Drafts over HTTP: the setting, the field, predicted outputs, and what is told of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from support.models.mtp_models import write_counting_model
from support.patience import PATIENCE, wait_for
from support.servers.server import Server, running

pytestmark = pytest.mark.full

RECALL = make_recall(3, 10)
PROMPT = RECALL.prompt
ENDLESS = {"prompt": PROMPT, "temperature": 0, "max_tokens": 120, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(
        "--n-ctx", "2048", "--parallel", "2", "--kv", "f16", "--speculation", "prompt-lookup"
    ) as server:
        yield server


def details(answer: Any) -> dict[str, int]:
    return dict(answer["usage"].get("completion_tokens_details", {}))


def with_drafts(server: Server, path: str, body: dict[str, Any]) -> Any:
    """An answer with drafts that came: none are made while others on this machine make them look dear."""
    answers: list[Any] = []

    def is_drafted() -> bool:
        answers[:] = [server.post(path, body)]
        return details(answers[0]).get("accepted_prediction_tokens", 0) > 0

    wait_for(is_drafted)
    return answers[0]


def test_an_answer_with_drafts_is_told_apart_by_its_usage_only(server: Server) -> None:
    drafted = with_drafts(server, "/v1/completions", ENDLESS)
    plain = server.post("/v1/completions", {**ENDLESS, "speculation": "off"})
    # what follows the model's own end has near ties: other roundings make other texts
    n = len(RECALL.fact.answer)
    assert drafted["choices"][0]["text"][:n] == plain["choices"][0]["text"][:n]
    assert details(plain) == {}
    found = details(drafted)
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 120
    now = server.wait_until_idle()["engine"]["speculation"]
    assert (now["mode"], now["why_off"]) == ("prompt-lookup", "")
    assert now["accepted_tokens"] >= found["accepted_prediction_tokens"]
    text = server.metrics()
    names = ("draft", "accepted")
    counted = [
        re.search(rf"^mixedkv_spec_decode_num_{name}_tokens_total (\S+)", text, re.M) for name in names
    ]
    assert [float(match[1]) for match in counted if match] == [now["drafted_tokens"], now["accepted_tokens"]]


def test_choices_are_drafted_each_for_itself(server: Server) -> None:
    body = {**ENDLESS, "n": 2, "temperature": 0.7, "seed": 3}
    drafted, plain = (
        server.post("/v1/completions", {**body, "speculation": mode}) for mode in ("prompt-lookup", "off")
    )
    same = [a["text"] == b["text"] for a, b in zip(drafted["choices"], plain["choices"], strict=True)]
    assert any(same)


@pytest.mark.parametrize("as_parts", [False, True])
def test_predicted_outputs(server: Server, as_parts: bool) -> None:
    want = server.post("/v1/chat/completions", {**CHAT, "speculation": "off"})
    text = want["choices"][0]["message"]["content"]
    prediction = {"type": "content", "content": [{"type": "text", "text": text}] if as_parts else text}
    predicted = {**CHAT, "speculation": "off", "prediction": prediction}
    answer = with_drafts(server, "/v1/chat/completions", predicted)
    assert answer["choices"][0]["message"]["content"] == text


def test_a_draft_model() -> None:
    with running(
        "--n-ctx", "1024", "--parallel", "2", "--speculation", str(model_path()), "--kv", "mixed"
    ) as server:
        plain = server.post("/v1/completions", {**ENDLESS, "speculation": "off"})
        drafted = with_drafts(server, "/v1/completions", ENDLESS)
        assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == 120
        assert server.stats()["engine"]["speculation"]["mode"] == "draft-model"


def test_the_models_own_layer_drafts(tmp_path: Path) -> None:
    path = write_counting_model(tmp_path / "counts.gguf", "state")
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0, "min_tokens": 60}
    with running("-m", str(path), "--n-ctx", "512", "--parallel", "2", "--speculation", "mtp") as server:
        drafted = with_drafts(server, "/v1/completions", body)
        plain = server.post("/v1/completions", {**body, "speculation": "off"})
        assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
        assert server.stats()["engine"]["speculation"]["mode"] == "mtp"


def test_a_model_without_such_a_layer_is_refused() -> None:
    server = Server("-m", str(model_path()), "--speculation", "mtp")
    assert server.process.wait(PATIENCE) != 0
    server.stop()
    assert "has no MTP layers" in server.log
    assert "Traceback" not in server.log
