"""Schemas and required tools of a `Llama`'s chat, which llama-cpp-python ignores, hold or are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path

pytestmark = pytest.mark.core

QUESTION: list[Any] = [{"role": "user", "content": "Which code has the mill?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "integer", "minimum": 0, "maximum": 99},
        "place": {"enum": ["mill", "barn"]},
    },
    "required": ["code", "place"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}


def check(value: Any) -> None:
    """Assert that a value is of SCHEMA; by hand, since the core's environment has no `jsonschema`."""
    assert value.keys() == {"code", "place"}
    assert type(value["code"]) is int
    assert 0 <= value["code"] <= 99
    assert value["place"] in ("mill", "barn")


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with Llama(model_path(), n_ctx=512) as llm:
        yield llm


@pytest.mark.parametrize(
    "asked", [FORMAT, {"type": "json_object", "schema": SCHEMA}], ids=["schema", "object"]
)
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_its_schema(llm: Llama, asked: Any, seed: int) -> None:
    answer: Any = llm.create_chat_completion(QUESTION, response_format=asked, temperature=1.5, seed=seed)
    choice = answer["choices"][0]
    check(json.loads(choice["message"]["content"]))
    assert choice["finish_reason"] == "stop"


def test_a_stream_follows_its_schema(llm: Llama) -> None:
    chunks: Any = llm.create_chat_completion(QUESTION, response_format=FORMAT, stream=True, temperature=0.0)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    check(json.loads(text))


def test_own_processors_come_after_the_schema(llm: Llama) -> None:
    seen = []

    def watch(ids: Any, scores: Any) -> Any:
        seen.append(len(ids))
        return scores

    llm.create_chat_completion(QUESTION, response_format=FORMAT, logits_processor=[watch], temperature=0.0)
    assert seen


def test_the_only_tool_is_called_where_a_call_is_required(llm: Llama) -> None:
    answer: Any = llm.create_chat_completion(QUESTION, tools=[TOOL], tool_choice="required", temperature=0.0)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "find"
    check(json.loads(call["function"]["arguments"]))


def test_a_chat_begins_with_bos_where_the_vocabulary_asks_for_it(llm: Llama) -> None:
    llm.create_chat_completion(QUESTION, max_tokens=1)
    assert llm.input_ids[:2].tolist().count(llm.token_bos()) == 1
    assert llm.tokenize(b"<|user|>a", add_bos=False, special=True)[0] != llm.token_bos()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"response_format": {"type": "xml"}},
            r"response_format: type='xml' is none of text, json_object, json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format: there is no schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x"}}}},
            "response_format",
        ),
        ({"tools": [TOOL, TOOL], "tool_choice": "required"}, "with 2 tools: a Llama can be made to call one"),
        ({"tool_choice": "required"}, "with 0 tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "search"}}},
            "tool_choice: there is no tool 'search' in tools",
        ),
        ({"tools": [{"name": "find"}], "tool_choice": "required"}, r"tools: \{'name': 'find'\} is not"),
        ({"tools": [TOOL], "tool_choice": {"name": "find"}}, r"tool_choice: \{'name': 'find'\} is not"),
        ({"tools": [TOOL], "tool_choice": "find"}, "tool_choice='find': use"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(llm: Llama, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.create_chat_completion(QUESTION, **options)
