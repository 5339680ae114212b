"""Requests in the shapes that agents send, written down from what they send: all are answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from support.models.families import template_path
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "maxLength": 9}},
    "required": ["command"],
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": SCHEMA,
}
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={:05x};"
BASH = {"name": "Bash", "description": "Runs a command.", "input_schema": SCHEMA}

CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "<environment_context>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "function_call", "name": "shell", "arguments": '{"command": "ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ],
    "tools": [
        SHELL,
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "namespace", "name": "mcp__notes", "description": "", "tools": [SHELL]},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-aaaa",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "0"},
    "max_output_tokens": 8,
}


def claude_code(turn: int) -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": MODEL,
        "max_tokens": 8,
        "stream": False,
        "temperature": 1,
        "system": [
            {"type": "text", "text": BILLING.format(turn, 7919 * turn)},
            {"type": "text", "text": "You are Claude Code. " * 20, **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>As you answer</system-reminder>"},
                    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
                    {"type": "text", "text": "List the files.", **cached},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "EmwKAhgB"},
                    {"type": "thinking", "thinking": "I list them.", "signature": "EqQB"},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [
                            {"type": "text", "text": "a.txt"},
                            {"type": "tool_reference", "tool_name": "x"},
                        ],
                        "is_error": False,
                    }
                ],
            },
        ],
        "tools": [BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_0_account__session_0"},
    }


READ = {"type": "function", "function": {"name": "Read", "description": "Reads.", "parameters": SCHEMA}}
CONTINUE: dict[str, Any] = {  # its CLI and extensions, by OpenAI's JavaScript package
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are an agent in the Continue CLI."},
        {"role": "user", "content": "Hi"},
    ],
    "stream": True,
    "tools": [READ],
    "stream_options": {"include_usage": True},
    "max_tokens": 4,
}
ZED: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are a coding assistant."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "# a.py"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "Read", "arguments": '{"command": "a"}'},
                }
            ],
        },
        {"role": "tool", "content": [{"type": "text", "text": "x = 1"}], "tool_call_id": "c1"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 4,
    "temperature": 1.0,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "tools": [READ],
    "prompt_cache_key": "0199-bbbb",
}
N8N: dict[str, Any] = {  # LangChain's ChatOpenAI for JavaScript, which its model node is
    "model": MODEL,
    "temperature": 0.7,
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "n": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "Hi"}],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    template = str(template_path("Qwen-Qwen2.5-7B-Instruct"))
    with running("--n-ctx", "4096", "--chat-format", template) as server:
        yield server


def test_codex(server: Server) -> None:
    status, text, headers = server.request("POST", "/v1/responses", CODEX)
    assert status == 200, text
    assert '"type":"response.completed"' in text or '"type":"response.incomplete"' in text
    ignored = set(headers["x-ignored-fields"].split(", "))
    assert ignored >= {
        "tools[].web_search",
        "tools[].custom",
        "tools[].namespace",
        "tools[].image_generation",
        "input[].web_search_call",
        "input[].custom_tool_call",
        "input[].custom_tool_call_output",
    }


def test_what_is_hosted_is_no_choice(server: Server) -> None:
    body = {**CODEX, "stream": False, "tool_choice": {"type": "web_search"}}
    answer = server.post("/v1/responses", body)
    assert any(warning.startswith("tool_choice: ") for warning in answer["warnings"])
    assert [tool["name"] for tool in answer["tools"]] == ["shell"]


def test_claude_code(server: Server) -> None:
    answer = server.post("/v1/messages", claude_code(1))
    said = " ".join(answer["warnings"])
    for name in (
        "tools[].web_search",
        "content[].server_tool_use",
        "content[].redacted_thinking",
        "billing_header",
    ):
        assert name in said
    count = server.post("/v1/messages/count_tokens", claude_code(1) | {"max_tokens": None})
    assert count["input_tokens"] == sum(
        answer["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_what_a_client_reads_of_a_prompt_that_is_too_long(server: Server) -> None:
    """At the beginning what to do; later what has Claude Code shorten its history."""
    first, later = claude_code(1), claude_code(1)
    first["messages"] = [{"role": "user", "content": "word " * 9000}]
    later["messages"][0]["content"][2]["text"] = "word " * 9000
    says = (
        r"has \d+ tokens, which exceeds the available context size \(\d+ tokens\): shorten it, or use a model"
    )
    for body, message in ((first, says), (later, r"^prompt is too long: \d+ tokens > \d+ maximum: ")):
        status, answer, _ = server.request("POST", "/v1/messages", body)
        assert status == 400
        assert re.search(message, answer["error"]["message"])


def test_a_billing_header_that_changes_does_not_spoil_the_prefix(server: Server) -> None:
    server.post("/v1/messages", claude_code(2))
    usage = server.post("/v1/messages", claude_code(3))["usage"]
    assert usage["input_tokens"] <= 1


OTHERS = {"continue": CONTINUE, "zed": ZED, "n8n": N8N}  # more of them: test_sessions_of_agents.py


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_chats_of_others(server: Server, body: dict[str, Any]) -> None:
    status, text, _ = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, text
    assert text.rstrip().endswith("data: [DONE]")


EMPTY: list[Any] = ["", [], [{"type": "text", "text": ""}]]
HI = {"role": "user", "content": "Hi"}
DIGIT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
}


@pytest.mark.parametrize("content", EMPTY)
def test_an_answer_that_begins_with_nothing_is_as_any(server: Server, content: Any) -> None:
    messages = [HI, {"role": "assistant", "content": content}]
    same = {"max_tokens": 8, "temperature": 0}
    expected = server.post("/v1/messages", {"messages": [HI], **same})["content"]
    assert server.post("/v1/messages", {"messages": messages, **same})["content"] == expected
    said = [HI, {"role": "assistant", "content": content or None}]
    for body in ({"messages": [HI]}, {"messages": said, "continue_final_message": True}):
        answer = server.post("/v1/chat/completions", {**body, **same})
        assert answer["choices"][0]["message"]["content"] == expected[0]["text"]


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DIGIT}}},
        {"regex": r'\{"a": ?[0-9]\}'},
        {"grammar": 'root ::= "{\\"a\\":" " "? [0-9] "}"'},
    ],
    ids=["schema", "regex", "grammar"],
)
def test_a_constraint_is_for_the_whole_answer(server: Server, form: dict[str, Any]) -> None:
    def ask(begun: str) -> tuple[int, Any]:
        messages = [HI, {"role": "assistant", "content": begun}]
        body = {
            "messages": messages,
            "continue_final_message": True,
            "max_tokens": 30,
            "temperature": 0,
            **form,
        }
        return server.request("POST", "/v1/chat/completions", body)[:2]

    status, answer = ask('{"a":')
    assert status == 200, answer
    assert json.loads('{"a":' + answer["choices"][0]["message"]["content"])["a"] in range(10)
    status, answer = ask("Sure: ")
    assert (status, answer["error"]["param"]) == (400, next(iter(form)))
    assert "cannot begin with the last message" in answer["error"]["message"]
