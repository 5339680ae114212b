"""What agents send in half an hour, recorded and shortened: a file, calls of tools with results, an answer
that is asked for again, one that is stopped, and the chat taken up after the server was killed.
"""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.models.families import template_path
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FILE = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(20))


class Exchange(NamedTuple):
    user: str
    assistant: str
    output: str | None  # of the tool that the assistant called


SAID = [
    Exchange(f"Here is a.py:\n{FILE}\nWhat does f3 do?", "It adds 3.", None),
    Exchange("List the files.", "I list them.", "a.py\nb.py"),
    Exchange("Now b.py.", "I read it.", "import a\nprint(a.f3(4))"),
    Exchange("Rename f3.", "Done.", "1 file changed"),
]
Chat = Callable[[int, int], tuple[str, dict[str, Any]]]  # of exchanges that are over, and a turn's number


def asked(n: int) -> str:
    return SAID[n].user


def claude_code(n: int, turn: int) -> tuple[str, dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i, (user, assistant, output) in enumerate(SAID[:n]):
        messages.append({"role": "user", "content": [{"type": "text", "text": user}]})
        content: list[dict[str, Any]] = [{"type": "text", "text": assistant}]
        if output is not None:
            call = {"type": "tool_use", "id": f"toolu_{i}", "name": "Bash", "input": {"command": "ls"}}
            result = {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": output}
            messages += [
                {"role": "assistant", "content": [*content, call]},
                {"role": "user", "content": [result]},
            ]
            content = [{"type": "text", "text": "Seen."}]
        messages.append({"role": "assistant", "content": content})
    messages.append({"role": "user", "content": [{"type": "text", "text": asked(n)}]})
    return "/v1/messages", {
        "model": MODEL,
        "max_tokens": 24,
        "stream": True,
        "temperature": 1,
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={7919 * turn:05x};",
            },
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": messages,
        "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "user_0_account__session_0"},
    }


def codex(n: int, turn: int) -> tuple[str, dict[str, Any]]:
    def message(role: str, text: str) -> dict[str, Any]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    items: list[dict[str, Any]] = [message("developer", "<permissions>")]
    for i, (user, assistant, output) in enumerate(SAID[:n]):
        items += [message("user", user), message("assistant", assistant)]
        if output is not None:
            call = {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command": "ls"}',
                "call_id": f"c{i}",
            }
            items += [call, {"type": "function_call_output", "call_id": f"c{i}", "output": output}]
            items.append(message("assistant", "Seen."))
    items.append(message("user", asked(n)))
    shell = {
        "type": "function",
        "name": "shell",
        "description": "Runs.",
        "strict": False,
        "parameters": SCHEMA,
    }
    return "/v1/responses", {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [shell],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-aaaa",
        "client_metadata": {"turn": str(turn)},
        "max_output_tokens": 24,
    }


def chat_of(n: int, system: str, tool: bool, parts: bool) -> list[dict[str, Any]]:
    def text(said: str) -> Any:
        return [{"type": "text", "text": said}] if parts else said

    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for i, (user, assistant, output) in enumerate(SAID[:n]):
        messages.append({"role": "user", "content": text(user)})
        if output is not None and tool:
            call = {
                "id": f"c{i}",
                "type": "function",
                "function": {"name": "read_file", "arguments": '{"command": "a"}'},
            }
            messages += [
                {"role": "assistant", "content": assistant, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"c{i}", "content": output},
                {"role": "assistant", "content": "Seen."},
            ]
        else:
            messages.append({"role": "assistant", "content": assistant})
    return [*messages, {"role": "user", "content": text(asked(n))}]


STREAMED: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": 24}


def aider(n: int, turn: int) -> tuple[str, dict[str, Any]]:
    messages = chat_of(n, "Act as an expert software developer.", tool=False, parts=False)
    return "/v1/chat/completions", {**STREAMED, "messages": messages, "temperature": 0}


def cline(n: int, turn: int) -> tuple[str, dict[str, Any]]:
    function = {"name": "read_file", "strict": False, "parameters": SCHEMA}
    return "/v1/chat/completions", {
        **STREAMED,
        "messages": chat_of(n, "You are Cline.", tool=True, parts=True),
        "tools": [{"type": "function", "function": function}],
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }


def open_webui(n: int, turn: int) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        **STREAMED,
        "messages": chat_of(n, "Be brief.", tool=False, parts=False),
        "stream_options": {"include_usage": True},
        "params": {},
        "chat_id": "c",
        "id": f"m{turn}",
        "background_tasks": {"title_generation": True},
    }


CLIENTS: dict[str, Chat] = {
    "claude_code": claude_code,
    "codex": codex,
    "aider": aider,
    "cline": cline,
    "open_webui": open_webui,
}


def answered(server: Server, path: str, body: dict[str, Any]) -> dict[str, int]:
    """Return what the server counted of an answer."""
    status, text, _ = server.request("POST", path, body)
    assert status == 200, text
    assert '"error":{' not in text, text
    return dict(server.wait_until_idle()["recent"][0])


def stopped(server: Server, path: str, body: dict[str, Any]) -> None:
    """Ask, read the beginning of the answer, and leave."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {**body, **dict.fromkeys(body.keys() & {"max_tokens", "max_output_tokens"}, 2000)}
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().read(20)
    connection.close()
    server.wait_until_idle()


def test_half_an_hour_of_each_client(tmp_path: Path) -> None:
    template = str(template_path("Qwen-Qwen2.5-7B-Instruct"))
    options = ("--n-ctx", "8192", "--chat-format", template, "--store", str(tmp_path / "kv"))
    sent: dict[str, int] = {}
    with running(*options) as server:
        for name, chat in CLIENTS.items():
            first = answered(server, *chat(0, 1))
            second = answered(server, *chat(1, 2))
            assert second["cached_tokens"] >= first["prompt_tokens"] - 8, name
            again = answered(server, *chat(1, 3))
            assert again["cached_tokens"] == again["prompt_tokens"] - 1, name
            if chat is open_webui:  # which asks for a title meanwhile
                title = {
                    **STREAMED,
                    "stream": False,
                    "messages": [{"role": "user", "content": "A title for: Hi"}],
                }
                server.post("/v1/chat/completions", title)
            stopped(server, *chat(2, 4))
            third = answered(server, *chat(2, 5))
            assert third["cached_tokens"] == third["prompt_tokens"] - 1, name
            sent[name] = third["prompt_tokens"]
        server.stop(signal.SIGKILL)
    with running(*options) as server:
        for name, chat in CLIENTS.items():
            after = answered(server, *chat(3, 6))
            assert after["cached_tokens"] >= sent[name] - 64, (name, after, sent[name])
