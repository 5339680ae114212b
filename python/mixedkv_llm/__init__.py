"""A plugin for the tool `llm` (https://llm.datasette.io): models on mixedkv, as `llm -m mixedkv/smollm2`.

It imports nothing of mixedkv: llm loads every plugin at each call, and another one may have its own
llama.cpp. The model runs in `mixedkv serve`, a child that starts with the first prompt and ends with us.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import llm
import openai
from pydantic import Field

_PREFIX = "mixedkv/"
_NAMES = ("bundled", "smollm2", "smollm2:f16")
_VARIABLE = "MIXEDKV_LLM_MODELS"  # more of them: NAME=FILE, or what -m takes, with commas between
_KEPT = "mixedkv-kv"  # in llm's folder
_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG
_STOP_SECONDS = 30.0
_BASE = "schemas and tools need a model that is tuned for chat, or -o chat_format chatml"
_LOADING = "mixedkv: the model was not loaded"


@llm.hookimpl
def register_models(register: Any) -> None:
    """Tell llm of the bundled model, SmolLM2, and those in MIXEDKV_LLM_MODELS."""
    given = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
    for name in [*_NAMES, *given]:
        register(MixedKVModel(name))


class Options(llm.Options):
    """Options that `-o` takes."""

    # the server checks their ranges
    temperature: float | None = Field(None, description="0 takes the likeliest token")
    top_k: int | None = Field(None, description="of the likeliest tokens; 0 is all")
    top_p: float | None = Field(None, description="of those with this probability together")
    min_p: float | None = Field(None, description="of those at least so many times the likeliest")
    repeat_penalty: float | None = Field(None, description="1 is none")
    repeat_last_n: int | None = Field(None, description="tokens repeat_penalty looks at; 0 none, -1 all")
    seed: int | None = Field(None, description="the same answer again")
    max_tokens: int | None = Field(None, ge=1, description="of the answer")
    kv: str | None = Field(None, description="the cache, as in `mixedkv run`: mixed:balanced")
    n_ctx: int | None = Field(None, ge=1, description="tokens of the context")
    chat_format: str | None = Field(
        None, description="chat with a base model in this format, e.g. chatml; without, it continues texts"
    )
    keep: bool | None = Field(
        None, description="keep KV on disk, so that `llm -c` evaluates what is new; default: yes"
    )


class MixedKVModel(llm.Model):
    """One model. The first prompt starts a server with the options `kv`, `n_ctx` and `keep`."""

    can_stream = True
    supports_schema = True
    supports_tools = True

    class Options(Options):
        pass

    def __init__(self, name: str) -> None:
        shown, _, path = name.partition("=")
        self.model_id = _PREFIX + shown
        self._model = path or shown
        self._servers: dict[tuple[str, ...], _Server] = {}

    def execute(
        self, prompt: Any, stream: bool, response: Any, conversation: Any
    ) -> Iterator[str | llm.parts.StreamEvent]:
        """Yield the answer's text in chunks, and calls of tools."""
        options = prompt.options
        body = {
            name: value
            for name in ("temperature", "top_p", "seed", "max_tokens")
            if (value := getattr(options, name)) is not None
        }
        extra = {
            name: value
            for name in ("top_k", "min_p", "repeat_penalty", "repeat_last_n")
            if (value := getattr(options, name)) is not None
        }
        server = self._server(options)
        if not server.chats:
            yield from self._continue(prompt, response, server, {**body, "extra_body": extra})
            return
        if prompt.schema:
            form = {"name": "schema", "schema": prompt.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if prompt.tools:
            body["tools"] = [_tool(tool) for tool in prompt.tools]
        chunks = server.client.chat.completions.create(
            model=self.model_id,
            messages=[message for each in prompt.messages for message in _messages(each)],
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
            **body,
        )
        calls: dict[int, list[str]] = {}
        for chunk in chunks:
            if chunk.usage is not None:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                response.set_usage(
                    input=chunk.usage.prompt_tokens,
                    output=chunk.usage.completion_tokens,
                    details={"cached_tokens": cached},
                )
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or ():
                    if call.id:
                        calls[call.index] = [call.id, call.function.name, ""]
                    calls[call.index][2] += call.function.arguments or ""
                if choice.delta.content:
                    yield choice.delta.content
        for call_id, name, arguments in calls.values():
            response.add_tool_call(
                llm.ToolCall(name=name, arguments=_arguments(arguments), tool_call_id=call_id)
            )

    def _continue(self, prompt: Any, response: Any, server: _Server, body: dict[str, Any]) -> Iterator[str]:
        """Have a base model continue the text of all messages."""
        if prompt.schema or prompt.tools:
            raise llm.ModelError(f"{self.model_id} continues texts: {_BASE}")
        text = "".join(each["content"] for message in prompt.messages for each in _messages(message))
        chunks = server.client.completions.create(
            model=self.model_id, prompt=text, stream=True, stream_options={"include_usage": True}, **body
        )
        for chunk in chunks:
            if chunk.usage is not None:
                response.set_usage(input=chunk.usage.prompt_tokens, output=chunk.usage.completion_tokens)
            yield from (choice.text for choice in chunk.choices if choice.text)

    def _server(self, options: Any) -> _Server:
        settings = [] if self._model == "bundled" else ["--model", self._model]
        if options.kv:
            settings += ["--kv", options.kv]
        if options.chat_format:
            settings += ["--chat-format", options.chat_format]
        if options.n_ctx:
            settings += ["--n-ctx", str(options.n_ctx)]
        if options.keep is not False:
            settings += ["--store", str(llm.user_dir() / _KEPT)]
        key = tuple(settings)
        if key not in self._servers:
            for other in self._servers.values():  # one at a time in memory
                other.stop()
            self._servers.clear()
            self._servers[key] = _Server(settings)
        return self._servers[key]


class _Server:
    """A `mixedkv serve` of our own, at a socket that only we can open.

    Raises:
        llm.ModelError: it did not start; the message says why.
    """

    def __init__(self, settings: list[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mixedkv-llm-")
        path = Path(self._folder.name) / "socket"
        log = Path(self._folder.name) / "log"
        command = [
            sys.executable,
            "-m",
            "mixedkv",
            "serve",
            "--host",
            str(path),
            "--parallel",
            "1",
            *settings,
        ]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                preexec_fn=_begin if os.name == "posix" else None,
            )
        atexit.register(self.stop)
        http = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=None)
        self.client = openai.OpenAI(
            base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
        )
        while not self._is_ready(http):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)
                lines = log.read_text("utf-8", "replace").strip().splitlines() or [_LOADING]
                raise llm.ModelError(lines[-1])

        meta = http.get("http://localhost/v1/models").json()["data"][0]["meta"]
        self.chats: bool = meta["chats"]

    def _is_ready(self, http: httpx.Client) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return http.get("http://localhost/ready").status_code == 200
        return False

    def stop(self) -> None:
        """End the server, which stores its KV first."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _begin() -> None:
    """Prepare the child process: on Linux it ends when its parent ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends an answer, not the model
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


def _messages(message: Any) -> Iterator[dict[str, Any]]:
    """Convert a message of llm's to OpenAI's; each result of a tool becomes one message."""
    texts = [part.text for part in message.parts if isinstance(part, llm.parts.TextPart)]
    calls = [part for part in message.parts if isinstance(part, llm.parts.ToolCallPart)]
    results = [part for part in message.parts if isinstance(part, llm.parts.ToolResultPart)]
    for part in results:
        yield {"role": "tool", "tool_call_id": part.tool_call_id, "content": str(part.output)}
    if texts or calls or not results:
        out: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
        if calls:
            out["tool_calls"] = [_call(part) for part in calls]
        yield out


def _call(part: Any) -> dict[str, Any]:
    function = {"name": part.name, "arguments": json.dumps(part.arguments)}
    return {"id": part.tool_call_id, "type": "function", "function": function}


def _tool(tool: Any) -> dict[str, Any]:
    schema = tool.input_schema or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
    return {"type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut off, none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
