"""Whatever is sent, neither the event loop nor the engine's thread stands for it: work that is not a step is
done elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.children import standing_child
from support.clients.hostile_clients import attacks_in_one_request
from support.clients.raw_http import CHAT
from support.servers.server import Server

pytestmark = pytest.mark.full

_TEXT, _CHAT = "/v1/completions", "/v1/chat/completions"
_OPTIONS = ("--n-ctx", "4096", "--parallel", "4", "--embeddings", "--request-timeout", "20")


class Watched:
    """A server that notes who stood."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0
        self.server = Server(*_OPTIONS, program=(standing_child.__file__, str(file)))

    def stood(self) -> list[dict[str, Any]]:
        """What stood since the last look."""
        lines = self._file.read_text().splitlines()[self._read :] if self._file.exists() else []
        self._read += len(lines)
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    found = Watched(tmp_path_factory.mktemp("standing") / "stood")
    try:
        found.server.wait_until_ready()
        assert found.server.status("POST", _TEXT, {"prompt": "x", "max_tokens": 1}) == 200
        found.stood()  # what is imported with the first request
        yield found
    finally:
        found.server.process.kill()


def _schema(schema: dict[str, Any]) -> tuple[str, bytes]:
    expected = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _chat(response_format=expected)


def _links() -> dict[str, Any]:
    links: dict[str, Any] = {str(i): {"$ref": f"#/d/{i + 1}"} for i in range(98)}
    return {**links, "98": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}}


def _text(**fields: Any) -> tuple[str, bytes]:
    return _TEXT, json.dumps({"prompt": "x", "max_tokens": 1, **fields}).encode()


def _chat(**fields: Any) -> tuple[str, bytes]:
    return _CHAT, json.dumps({"messages": CHAT, "max_tokens": 1, **fields}).encode()


def _post(path: str, **fields: Any) -> tuple[str, bytes]:
    return path, json.dumps(fields).encode()


def _tool(i: int) -> dict[str, Any]:
    properties = {f"a{j}": {"type": "string"} for j in range(30)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}


def _results(n: int) -> list[dict[str, Any]]:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(n)
    ]
    results = [{"role": "tool", "tool_call_id": str(i), "content": "y" * 1000} for i in range(n)]
    return [*CHAT, {"role": "assistant", "tool_calls": calls}, *results]


_LISTS = '{"model":"\u0122","prompt":"x","max_tokens":1,"z":[' + ",".join(["[]"] * 1_300_000) + "]}"
_IDS = [[65 + (i * 7 + j) % 100 for j in range(1000)] for i in range(20)]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4}] * 1000
_USERS = [{"role": "user", "content": "a"}] * 4096
_NAMED = [{"role": "user", "content": f"a{i}", "message_id": f"m{i}"} for i in range(4000)]
ATTACKS: dict[str, tuple[str, bytes]] = {
    **attacks_in_one_request(),
    "brackets in a grammar": _text(grammar="root ::= " + "[" * 32_000),
    "quotes in a grammar": _text(grammar='root ::= "' + '\\"' * 16_000),
    "members that refer": _schema({"d": _links(), "oneOf": [{"$ref": "#/d/0"}] * 2500}),
    "members of their own": _schema({"oneOf": [{"const": str(i)} for i in range(2500)]}),
    "UTF-16": (_TEXT, _LISTS.encode("utf-16-le")),
    "a long name": _text(**{"a[]." * 1_900_000 + "!": 1}),
    "a long tag": _chat(messages=[{"role": "user", "content": [{"type": "' found using '" * 400_000}]}]),
    "log probabilities of prompts": _text(prompt=_IDS, prompt_logprobs=20),
    "echoed log probabilities": _text(prompt=_IDS, echo=True, logprobs=20),
    "a stream of them": _text(prompt=_IDS[0] * 4, echo=True, logprobs=20, stream=True),
    "as many ids as there may be": _text(prompt=[65] * 262_000),
    "many parts": _chat(messages=_PARTS),
    "as many messages as there may be": _chat(messages=_USERS),
    "messages of another API": _post("/v1/messages", model="m", max_tokens=1, messages=_PARTS),
    "items": _post("/v1/responses", input=_USERS),
    "long instructions": _post(
        "/v1/responses", input="x", instructions="é" * 3_000_000, truncation="auto", max_output_tokens=1
    ),
    "a text that slides": _text(prompt="a" * 1_000_000, overflow="slide"),
    "words that slide": _text(prompt="hello " * 200_000, overflow="slide"),
    "ids to read": _post("/detokenize", tokens=[65] * 262_000),
    "a text to cut": _post("/tokenize", content="x y " * 5000, with_pieces=True),
    "many vectors": _post("/api/embed", model="m", input=["a"] * 2000),
    "many tools": _chat(tools=[_tool(i) for i in range(120)]),
    "many results": _chat(messages=_results(2000)),
    "names of messages": _chat(messages=_NAMED),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_stands_for_an_attack(watched: Watched, name: str) -> None:
    path, body = ATTACKS[name]
    status, answer, _ = watched.server.request("POST", path, raw=body)
    assert status < 500 or status == 504, answer
    assert watched.server.status("GET", "/health") == 200
    assert not (stood := watched.stood()), json.dumps(stood, indent=1)


def test_who_stands_is_noticed(tmp_path: Path) -> None:
    """A turn of a loop that takes long, and a call that holds Python's lock as long."""
    who = [each["who"] for each in _stand(tmp_path / "stood")]
    assert "event loop" in who
    assert any(each.startswith("Python's lock") for each in who)


def _stand(file: Path) -> list[dict[str, Any]]:
    standing = standing_child.Standing(file, standing_child.most_seconds())

    def spin() -> None:
        began = time.thread_time()
        while time.thread_time() - began < 10 * standing_child.most_seconds():
            pass

    def hold() -> None:
        pow(3, 30_000_000)  # one call of Python's, which lets nobody else go on

    async def loop() -> None:
        standing.begin()
        await asyncio.sleep(0.05)
        spin()
        await asyncio.sleep(0.05)
        await asyncio.to_thread(hold)
        await asyncio.sleep(0.05)

    asyncio.run(loop())
    return [json.loads(line) for line in file.read_text().splitlines()]
