"""Control tokens in messages are text in the chats of every API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from mixedkv import Llama
from mixedkv.engine.chat.tokenizer import Tokenizer
from support.models.control_tokens import control_tokens, source, templates, write_model
from support.models.families import TEMPLATES
from support.servers.server import Server, running

pytestmark = pytest.mark.full

OFTEN = ("Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct", "google-gemma-2-2b-it")
CONTEXT = ("--n-ctx", "16384", "--parallel", "1", "--kv", "f16")
_ANY = (llama_cpp.LLAMA_TOKEN_ATTR_CONTROL, "<|channel|>", "<|message|>", "<|start|>", "<|end|>")


def openai(server: Server, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    return int(server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"])


def of_parts(server: Server, text: str) -> int:
    parts = [
        {"type": "text", "text": text[: len(text) // 2]},
        {"type": "text", "text": text[len(text) // 2 :]},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    return int(server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"])


def responses(server: Server, text: str) -> int:
    body = {"input": text, "max_output_tokens": 16}
    return int(server.post("/v1/responses", body)["usage"]["input_tokens"])


def anthropic(server: Server, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    usage = server.post("/v1/messages", body)["usage"]
    return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def ollama(server: Server, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}], "stream": False, "options": {"num_predict": 1}}
    return int(server.post("/api/chat", body)["prompt_eval_count"])


def ollama_generate(server: Server, text: str) -> int:
    body = {"prompt": text, "stream": False, "options": {"num_predict": 1}}
    return int(server.post("/api/generate", body)["prompt_eval_count"])


def counted(server: Server, text: str) -> int:
    body = {"messages": [{"role": "user", "content": text}]}
    return int(server.post("/v1/messages/count_tokens", body)["input_tokens"])


APIS: tuple[Callable[[Server, str], int], ...] = (
    openai,
    of_parts,
    responses,
    anthropic,
    ollama,
    ollama_generate,
    counted,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "controls.gguf")


def cases() -> list[Any]:
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in templates()]


@pytest.mark.parametrize("name", cases())
def test_no_api_reads_a_control_token_in_a_message(name: str, model: Path) -> None:
    """Their prompts have as many tokens as the one whose control tokens are known to be the template's."""
    with Llama(model, vocab_only=True, n_ctx=1 << 15, verbose=False) as llm:
        tokenizer = Tokenizer(llm, "", source(name))
        special = {
            token for token, text, attributes in llm.special_tokens if attributes & _ANY[0] or text in _ANY
        }

        def prompt(text: str) -> list[int]:
            return tokenizer.encode([{"role": "user", "content": text}])[0]

        text = f"What is {' and '.join(control_tokens(name))} or {''.join(control_tokens(name))}?"
        tokens = prompt(text)
        assert [token for token in tokens if token in special] == [
            token for token in prompt("it") if token in special
        ]
        with running("-m", str(model), *CONTEXT, "--chat-format", str(TEMPLATES / f"{name}.jinja")) as server:
            assert {api.__name__: api(server, text) for api in APIS} == {
                api.__name__: len(tokens) for api in APIS
            }


def test_special_is_the_former_way(model: Path) -> None:
    name = "Qwen-Qwen2.5-7B-Instruct"
    options = ("-m", str(model), *CONTEXT, "--chat-format", str(TEMPLATES / f"{name}.jinja"))
    with running(*options, "--content-tokens", "special") as server:
        former = openai(server, "<|im_end|>")
        assert former == openai(server, "i")  # one token, as a letter is one here
    with running(*options) as server:
        assert openai(server, "<|im_end|>") > former
