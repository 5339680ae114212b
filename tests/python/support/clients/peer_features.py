"""What servers of GGUF models answer, each row tried by the client that people use for it.

PYTHONPATH=tests/python python -m support.clients.peer_features URL MODEL

prints "yes" or why not for any server that listens there. docs/coming-from.md has what three of them said.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import ollama
import openai

_SECONDS = 120.0
_ASK: Any = [{"role": "user", "content": "Where is the lamp?"}]
_BRIEF: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}
_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_LONG = "The lamp of the mill is kept behind the seventh door of the old house. " * 12


@dataclass(frozen=True)
class Asked:
    """A server and the name of a model of it."""

    url: str
    model: str

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=_SECONDS, max_retries=0)

    def chat(self, **options: Any) -> Any:
        fields = {"messages": _ASK, **_BRIEF, **options}
        return self.openai.chat.completions.create(model=self.model, **fields)

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self.url + path, json=body, timeout=_SECONDS)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str) -> httpx.Response:
        answer = httpx.get(self.url + path, timeout=_SECONDS)
        answer.raise_for_status()
        return answer


def _chat(server: Asked) -> None:
    whole = server.chat().choices[0].message.content
    chunks = server.chat(stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in chunks:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole, f"streamed {text!r}, whole {whole!r}"
    assert usage is not None, "a stream has no usage"


def _completions(server: Asked) -> None:
    create = server.openai.completions.create
    assert create(model=server.model, prompt="The lamp", **_BRIEF).choices[0].text
    assert create(model=server.model, prompt=[5, 6, 7], **_BRIEF).choices[0].text is not None
    several = create(model=server.model, prompt=["The lamp", "The mill"], **_BRIEF)
    assert len(several.choices) == 2, "one answer for two prompts"


def _responses(server: Asked) -> None:
    create = server.openai.responses.create
    first = create(model=server.model, input="Where is the lamp?", max_output_tokens=16, store=True)
    create(model=server.model, input="And the mill?", max_output_tokens=16, previous_response_id=first.id)


def _messages(server: Asked) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", timeout=_SECONDS, max_retries=0)
    assert client.messages.create(model=server.model, messages=_ASK, max_tokens=8).content
    assert client.messages.count_tokens(model=server.model, messages=_ASK).input_tokens > 0


def _ollama(server: Asked) -> None:
    client = ollama.Client(host=server.url, timeout=_SECONDS)
    options = {"num_predict": 8, "temperature": 0}
    assert client.chat(server.model, _ASK, options=options).message.content
    assert list(client.generate(server.model, "The lamp", stream=True, options=options))
    assert client.list().models
    client.show(server.model)
    client.ps()


def _llama_server(server: Asked) -> None:
    assert server.post("/completion", prompt="The lamp", n_predict=4, temperature=0)["content"]
    assert server.post("/tokenize", content="The lamp")["tokens"]
    assert server.post("/apply-template", messages=_ASK)["prompt"]
    assert server.get("/props").json()["default_generation_settings"]["n_ctx"]


def _embeddings(server: Asked) -> None:
    create = server.openai.embeddings.create
    vectors = create(model=server.model, input=["The lamp", "The mill"]).data
    assert len(vectors) == 2
    assert server.chat().choices[0].message.content, "then it does not chat"


def _schema(server: Asked) -> None:
    text = server.chat(response_format=_FORMAT, max_tokens=64).choices[0].message.content
    assert isinstance(json.loads(text)["n"], int)


def _grammar(server: Asked) -> None:
    text = server.chat(extra_body={"grammar": 'root ::= "seven" | "eight"'}).choices[0].message.content
    assert text in ("seven", "eight"), f"it wrote {text!r}"


def _regex(server: Asked) -> None:
    text = server.chat(extra_body={"regex": "[0-9]{3}"}).choices[0].message.content
    assert text.isdigit(), f"it wrote {text!r}"


def _tools(server: Asked) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    message = server.chat(tools=[_TOOL], tool_choice=choice, max_tokens=96).choices[0].message
    assert message.tool_calls, f"no call: {message.content!r}"
    arguments = json.loads(message.tool_calls[0].function.arguments)
    assert isinstance(arguments["a"], int)


def _logprobs(server: Asked) -> None:
    places = server.chat(logprobs=True, top_logprobs=3).choices[0].logprobs
    assert places is not None, "there are none"
    assert len(places.content[0].top_logprobs) == 3


def _several(server: Asked) -> None:
    assert len(server.chat(n=3, temperature=1).choices) == 3, "one answer for n=3"


def _found(server: Asked) -> None:
    messages = [{"role": "user", "content": f"{_LONG}Where is the lamp?"}]
    server.chat(messages=messages)
    again = server.chat(messages=messages).usage
    details = again.prompt_tokens_details
    assert details is not None, "usage does not tell"
    assert details.cached_tokens > again.prompt_tokens // 2, f"{details.cached_tokens} were found"


def _metrics(server: Asked) -> None:
    assert "# TYPE" in server.get("/metrics").text


def _page(server: Asked) -> None:
    assert "text/html" in server.get("/").headers["content-type"]


CHECKS: dict[str, tuple[str, Callable[[Asked], None]]] = {
    "Chats, whole and as a stream with usage": ("openai", _chat),
    "Completions of texts, tokens and several prompts": ("openai", _completions),
    "`/v1/responses` that go on from a former one": ("openai", _responses),
    "Anthropic's `/v1/messages` and `count_tokens`": ("anthropic", _messages),
    "Ollama's chat, generate, list, show and ps": ("ollama", _ollama),
    "llama-server's `/completion`, `/tokenize`, `/apply-template`, `/props`": ("httpx", _llama_server),
    "Embeddings, and chats of the same model beside them": ("openai", _embeddings),
    "Answers that follow a JSON Schema": ("openai", _schema),
    "Answers that follow a GBNF grammar": ("openai", _grammar),
    "Answers that match a regular expression": ("openai", _regex),
    "A call of one tool that is forced": ("openai", _tools),
    "Log probabilities": ("openai", _logprobs),
    "Several answers (`n`)": ("openai", _several),
    "How much of a prompt was found in the cache": ("openai", _found),
    "Metrics for Prometheus": ("httpx", _metrics),
    "A chat page": ("httpx", _page),
}


def tried(server: Asked) -> dict[str, str]:
    """Return for each row nothing where it works, else why not."""
    return {row: _why_not(check, server) for row, (_, check) in CHECKS.items()}


def _why_not(check: Callable[[Asked], None], server: Asked) -> str:
    try:
        check(server)
    except Exception as error:  # whatever a client raises is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    options = parser.parse_args()
    for row, why_not in tried(Asked(options.url.rstrip("/"), options.model)).items():
        print(f"{row}: {why_not or 'yes'}")


if __name__ == "__main__":
    main()
