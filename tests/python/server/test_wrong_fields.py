"""A wrong field is refused by every API, in the form of its errors, which name the field."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.model.gguf_file import read_model_file
from support.models.families import ADD, template_path
from support.models.fim import write_fim_model
from support.models.images import data_url, png
from support.models.zoo import Shape
from support.models.zoo.encoder import decoding_ranker, ranker
from support.models.zoo.projector import write_projector
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.full

LIMIT = 300  # tokens that can be embedded
TOO_LONG = 400, "exceed_context_size_error"
USER = {"role": "user", "content": "Hello"}


class Wrong(NamedTuple):
    """A request that is refused.

    `param` is the field that the error names, `messages*` one that begins so, None where it names none;
    `says` stands in the message.
    """

    server: str
    path: str
    body: dict[str, Any]
    param: str | None
    says: str = ""
    status: int = 400
    kind: str = "invalid_request_error"


CASES: list[Any] = []


def wrong(
    server: str,
    path: str,
    body: dict[str, Any],
    *rows: tuple[Any, ...],
    nightly: str = "",
    core: bool = False,
) -> None:
    """Add a row of the table for each change of a body that is right: what changes, the field that the error
    names, what the message says, the status if it is not 400 and the error's type if it is not that of wrong
    requests. `nightly` names a server that is asked the same every night.
    """
    for change, param, *rest in rows:
        name = f"{path} {' '.join(change) or 'nothing'}"
        given = {name: value for name, value in {**body, **change}.items() if value is not ...}
        marks = [pytest.mark.core] if core else []
        CASES.append(
            pytest.param(Wrong(server, path, given, param, *rest), id=f"{server} {name}", marks=marks)
        )
        if nightly:
            case = Wrong(nightly, path, given, param, *rest)
            CASES.append(pytest.param(case, id=f"{nightly} {name}", marks=pytest.mark.nightly))


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


# --- OpenAI's chats and completions ---

CHAT = {"model": MODEL, "messages": [USER], "max_tokens": 4}
TEXT = {"prompt": "The code of the mill is", "max_tokens": 4}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
DEEP = json.loads("[" * 80 + "]" * 80)

wrong(
    "plain",
    "/v1/chat/completions",
    CHAT,
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n", "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"max_completion_tokens": 0, "max_tokens": ...}, "max_completion_tokens"),
    ({"max_completion_tokens": -2, "max_tokens": ...}, "max_completion_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"logit_bias": {"99999": 1}}, "logit_bias*"),
    ({"logit_bias": {"-1": 1}}, "logit_bias*"),
    ({"logit_bias": {"5": True}}, "logit_bias*"),
    ({"logit_bias": {"": 1}}, "logit_bias*"),
    ({"logit_bias": {"1": float("inf")}}, "logit_bias*"),
    ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop*"),
    ({"stop": ""}, "stop*", "at least 1"),
    ({"stop": ["a"] * 17}, "stop*", "at most 16"),
    ({"stop": "x" * 1001}, "stop*"),
    ({"stop": 5}, "stop*", "a text or a list"),
    ({"stop": [5]}, "stop*", "stop.0: Input should be a valid string"),
    ({"top_k": -2}, "top_k"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["x"]}, "messages*", "messages.0: Input should be an object"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages*"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages*"),
    ({"messages": [{**USER, "content": 5}]}, "messages*", "content: give a text or a list"),
    (said({"type": "text"}), "messages*", "content.0.text.text: Field required"),
    (said({"type": "txt"}), "messages*", "content.0: 'txt' is none of 'text', 'input_text'"),
    (said({"type": "file", "file": {"file_id": "f"}}), "messages*", "file"),
    (said({"type": "input_audio", "input_audio": {}}), "messages*", "input_audio"),
    (said(DOCUMENT), "messages*", "document"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": 'root ::= root "a"'}, "grammar"),
    ({"grammar": "(" * 5000}, "grammar"),
    ({"grammar": 'root ::= "a"{5,2}'}, "grammar"),
    ({"regex": "("}, "regex"),
    ({"regex": "a", "grammar": 'root ::= "a"'}, "regex"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"response_format": NO_SCHEMA}, "response_format*"),
    (
        {"json_schema": {"const": 1}, "response_format": {"type": "json_object"}},
        None,
        "json_schema and response_format both",
    ),
    ({"n": 64, "max_tokens": 4096, "logprobs": True, "top_logprobs": 20}, "max_tokens"),
    ({"session_id": "../etc/passwd"}, "session_id"),
    ({"tool_choice": {"type": "function"}}, "tool_choice*", "tool_choice.function: Field required"),
    ({"tool_choice": 5}, "tool_choice*", "tool_choice: give none, auto, required, or a function"),
    ({"prediction": "text"}, "prediction*"),
    ({"prediction": {}}, "prediction*"),
    ({"prediction": {"type": "content"}}, "prediction*"),
    ({"prediction": {"type": "content", "content": "a" * 200_000}}, "prediction*"),
    (
        {"prediction": {"type": "content", "content": [{"type": "text"}]}},
        "prediction*",
        "prediction.content.0.text: Field required",
    ),
    ({"overflow": "drop"}, "overflow", "'refuse' or 'slide'"),
    ({"overflow": ""}, "overflow", "'refuse' or 'slide'"),
    ({"overflow": 1}, "overflow", "'refuse' or 'slide'"),
    ({"overflow": True}, "overflow", "'refuse' or 'slide'"),
    ({"verbose": True, "stream": True}, None),
    ({"audio": {}}, None, "audio"),
    ({"functions": [1]}, None, "functions"),
    core=True,
)
wrong(
    "plain",
    "/v1/completions",
    TEXT,
    ({"prompt": ["a", 5]}, "prompt*", "prompt.1: Input should be a valid string"),
    ({"prompt": [5, -1]}, "prompt*", "prompt.1: Input should be greater than or equal to 0"),
    ({"prompt": ["a"] * 65}, "prompt*", "prompt: List should have at most 64 items"),
    ({"prompt": [[5], "a"]}, "prompt*", "prompt.1: Input should be a valid list"),
    ({"prompt": {}}, "prompt*", "prompt: give a text, a list of texts, a list of token ids"),
    ({"prompt": "The lamp lies in the market. " * 2000}, None, "", *TOO_LONG),
    ({"stop": 5}, "stop*", "a text or a list"),
    ({"stop": [5]}, "stop*", "stop.0: Input should be a valid string"),
    ({"stop": ""}, "stop*", "at least 1"),
    ({"stop": ["x"] * 17}, "stop*", "at most 16"),
    ({"top_k": -2}, "top_k"),
    ({"typical_p": 2}, "typical_p"),
    ({"mirostat": 3}, "mirostat"),
    ({"dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers*"),
    ({"dry_sequence_breakers": ["\0"]}, "dry_sequence_breakers*"),
    ({"adaptive_decay": 1}, "adaptive_decay"),
    ({"xtc_probability": -1}, "xtc_probability"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids*"),
    ({"stop_token_ids": [-1]}, "stop_token_ids*"),
    ({"return_progress": True}, None),
    ({"prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs"),
    ({"prompt_logprobs": 1, "overflow": "slide", "prompt": "The lamp. " * 2000}, "prompt_logprobs"),
    ({"logprobs": 20, "max_tokens": 200_001, "overflow": "slide"}, "max_tokens"),
    ({"speculation": "magic"}, "speculation"),
    ({"speculation": "draft-model"}, "speculation"),
    ({"speculation": "mtp"}, "speculation"),
    ({"verbose": True, "stream": True}, None),
)
wrong("plain", "/v1/warm", {}, ({"prompt": [5, {}]}, "prompt*", "prompt.1: Input should be a valid integer"))

# --- thoughts ---

wrong(
    "thinks",
    "/v1/chat/completions",
    {"messages": [USER]},
    ({"reasoning_effort": "enormous"}, "reasoning_effort", "high"),
    ({"reasoning_budget_tokens": -1}, "reasoning_budget_tokens", "0"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs*", "true or false"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs*", "leave it out"),
    ({"chat_template_kwargs": {"no name": 1}}, "chat_template_kwargs*"),
    ({"chat_template_kwargs": {f"v{i}": 1 for i in range(65)}}, "chat_template_kwargs*", "64"),
    ({"chat_template_kwargs": {"a": "b" * 70_000}}, "chat_template_kwargs*", "65536"),
    ({"chat_template_kwargs": {"a": DEEP}}, "chat_template_kwargs*", "nested"),
    ({"continue_final_message": True}, "continue_final_message", "assistant"),
)

# --- tools: of a template that knows them, and of one that does not ---

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}


def parameters(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


for server, nightly in (("tools", "other tools"), ("plain", "")):
    wrong(
        server,
        "/v1/chat/completions",
        {"messages": [USER], "tools": [ADD], "max_tokens": 1},
        ({"tools": [{"type": "function"}]}, "tools*", "function"),
        ({"tools": [{"type": "retrieval", "function": FUNCTION}]}, "tools*", "function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools*", "name"),
        ({"tools": [ADD, ADD]}, "tools*", "two tools 'add'"),
        ({"tools": [ADD] * 129}, "tools*", "128"),
        (parameters({"type": "array"}), "tools*", '"type": "object"'),
        (parameters({"properties": {}}), "tools*", '"type": "object"'),
        (parameters({"type": "object", "properties": 5}), "tools*", "properties"),
        (parameters({"type": "object", "required": "a"}), "tools*", "required"),
        (parameters(json.loads('{"type": "object", "a": ' * 70 + "1" + "}" * 70)), "tools*", "nested"),
        ({"tool_choice": "sometimes"}, "tool_choice*", "required"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice*", "no tool 'g'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice*", "give tools"),
        ({"response_format": {"type": "json_object"}}, "response_format*", "tool_choice to none"),
        ({"regex": "a"}, "regex", "tool_choice to none"),
        ({"grammar": 'root ::= "a"'}, "grammar", "tool_choice to none"),
        ({"functions": [FUNCTION]}, None, "functions"),
        ({"messages": [USER, RESULT]}, "messages*", "messages[1].tool_call_id"),
        ({"messages": [USER, CALLED, {**RESULT, "tool_call_id": "other"}]}, "messages*", "'other'"),
        ({"messages": [USER, CALLED, RESULT, RESULT]}, "messages*", "messages[3]"),
        ({"messages": [USER, {"role": "tool", "content": "3"}]}, "messages*", "is missing"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages*", "only assistants call"),
        ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages*", "role tool only"),
        ({"messages": [USER, {**CALLED, "tool_calls": [CALL, CALL]}]}, "messages*", "tool_calls[1].id"),
        nightly=nightly,
    )

# --- Anthropic's messages, and OpenAI's responses ---

TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}


def document(**source: Any) -> dict[str, Any]:
    return said({"type": "document", "source": source})


wrong(
    "tools",
    "/v1/messages",
    {"model": MODEL, "max_tokens": 12, "messages": [USER], "temperature": 0},
    ({"max_tokens": None}, None, "max_tokens"),
    ({"top_k": -2}, None, "top_k"),
    ({"system": 5}, None, "system: give a text or a list"),
    (said({"type": "image", "source": {}}), None, "image"),
    ({"tools": [TOOL, TOOL]}, None, "two tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, None, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, None, "give tools"),
    (document(type="base64", media_type="application/pdf", data="JVBE"), None, "base64"),
    (document(type="url", url="https://x.example/a.pdf"), None, "url"),
    (document(type="file", file_id="file_1"), None, "file"),
    (document(type="text"), None, "data"),
    (said({"type": "container_upload", "file_id": "f"}), None, "container_upload"),
    nightly="plain",
)
wrong(
    "tools",
    "/v1/responses",
    {"input": "Hello"},
    ({"input": 5}, "input*", "input: give a text or a list"),
    ({"input": []}, "input*", "at least 1"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, None, "item_reference"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, None, "give a message, function_call"),
    ({"input": [{"type": "item_reference", "id": "a"}, {"content": "a"}]}, None, "item_ref"),
    ({"input": [USER, {"type": "item_reference", "id": "a"}]}, None, "input.1: item"),
    (
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "1"}]},
        None,
        "unanswered call",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input*",
        "input.0.content.0.text: Field required",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input*", "input_file"),
    ({"tool_choice": {"type": "function"}}, "tool_choice*", "tool_choice.name: Field"),
    ({"conversation": "conv_1"}, None, "previous_response_id"),
    ({"previous_response_id": "../x"}, None, "previous_response_id"),
    ({"background": True}, None, "background"),
    nightly="plain",
)

# --- llama-server's ---

wrong(
    "plain",
    "/completion",
    {"prompt": "The lamp lies in the", "n_predict": 8, "temperature": 0},
    ({"n_predict": -2}, "n_predict"),
    ({"prompt": [1, None]}, "prompt*"),
    ({"prompt": ["a", 1.5]}, "prompt*"),
    ({"prompt": []}, "prompt*"),
    ({"samplers": ["top_q"]}, "samplers*", "top_k"),
    ({"samplers": "q"}, "samplers*", "letter"),
    ({"repeat_last_n": -2}, "repeat_last_n", "repeat_last_n"),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora*", "0 adapters"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, None, "grammar and json_schema"),
    ({"logit_bias": [[1]]}, "logit_bias*"),
    ({"session_id": "x"}, None, "session_id"),
    ({"json_schema": {"type": "nothing"}}, "json_schema*"),
)
wrong("plain", "/tokenize", {}, ({"content": "x" * 1_000_000}, "content*", "", *TOO_LONG), ({}, "content*"))
wrong("plain", "/detokenize", {}, ({"tokens": [10**6]}, "tokens*"), ({"tokens": [-1]}, "tokens*"))
wrong("plain", "/apply-template", {}, ({"messages": []}, "messages*"))
wrong(
    "infill",
    "/infill",
    {"input_prefix": "The code of the mill is ", "input_suffix": " and no other.", "temperature": 0},
    ({"input_extra": [{"filename": "a"}]}, "input_extra.0.text"),
    ({"input_suffix": ...}, "input_suffix"),
    ({"session_id": "nobody"}, None),
)
wrong(
    "infill",
    "/v1/completions",
    {"prompt": "a", "suffix": "b"},
    ({"prompt": ["a"]}, None),
    ({"prompt": [1, 2]}, None),
)

# --- Ollama's ---

wrong(
    "embeddings",
    "/api/chat",
    {"messages": [USER]},
    ({"options": {"temperature": -1}}, None, "options.temperature"),
    ({"messages": [{"role": "user", "images": [base64.b64encode(b"x").decode()]}]}, None, "images"),
    ({"format": 5}, None, "format: give json or a JSON Schema"),
    ({"think": 5}, None, "think: give true, false, low"),
    ({"keep_alive": [1]}, None, "keep_alive: give seconds, or a text"),
)
wrong(
    "embeddings",
    "/api/generate",
    {"prompt": "a"},
    ({"template": "x"}, None, "template"),
    ({"context": [1]}, None, "/api/chat"),
    ({"suffix": "b"}, None, "infilling"),
    ({"raw": True, "system": "Say b."}, None, "system"),
    ({"options": {"top_k": -2}}, None, "top_k"),
    ({"options": {"stop": ["x"] * 17}}, None, "at most 16"),
    ({"options": {"stop": 5}}, None, "a text or a list"),
    ({"options": {"stop": [5]}}, None, "stop.0: Input should be a valid string"),
    ({"options": {"stop": ""}}, None, "at least 1"),
)
wrong("embeddings", "/api/embed", {}, ({"input": 5}, None, "input: give a text or a list"))
wrong("embeddings", "/api/nothing", {}, ({}, None, "there is no", 404))

# --- vectors and ranks ---

wrong(
    "embeddings",
    "/v1/embeddings",
    {},
    ({"input": ""}, "input", "it is empty"),
    ({"input": []}, "input", "it is empty"),
    ({"input": ["a", ""]}, "input", "input 1 is empty"),
    ({"input": [[1, 2], []]}, "input", "input 1 is empty"),
    ({"input": ["a"] * 2049}, "input", "2049 inputs, at most 2048"),
    ({"input": ["a", "word " * LIMIT * 2]}, "input", f"1 to {LIMIT} can be embedded"),
    ({"input": [10**6]}, "input", "token 1000000 is not one of"),
    ({"input": ["a", 1.5]}, "input.1", "token ids and texts"),
    ({"input": {"text": "a"}}, "input.0.prompt_string", "required"),
    ({"input": {"content": "a"}}, "input.0.content", "list"),
    ({"input": {"content": [{"type": "image_url"}]}}, "input.0.content", "texts only"),
    ({"input": {"prompt_string": "a", "multimodal_data": ["x"]}}, "input", "texts only"),
    ({"input": "a", "dimensions": 8}, "dimensions", "cannot be cut"),
)
for server, too_long in (("ranker", TOO_LONG), ("decoding ranker", ())):
    wrong(
        server,
        "/v1/rerank",
        {"query": "in the end", "documents": ["the hen", "a"]},
        ({"documents": []}, "documents", "at least 1"),
        ({"documents": ["a", ""]}, "documents.1", "at least 1"),
        ({"documents": ["a"] * 2049}, "documents", "2048"),
        ({"documents": ["a", "the " * 3000]}, "documents", "document 1", *too_long),
        ({"query": ""}, "query", "at least 1"),
        ({"top_n": 0}, "top_n", "greater"),
    )

# --- images: of a model without an encoder, and of one with it ---


def link(text: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": text}}


def image(data: bytes) -> dict[str, Any]:
    return link(data_url(data))


def gif(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("1", size).save(file, "GIF")
    return file.getvalue()


AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
IMAGE_URL = "data:image/png;base64,AAAA"
INLINE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
ASK = {"max_tokens": 8, "temperature": 0}

wrong(
    "plain",
    "/v1/chat/completions",
    {},
    (said({"type": "text", "text": "What is this?"}, link(IMAGE_URL)), "messages*", "image"),
    (said(AUDIO), "messages*", "audio"),
)
wrong("plain", "/v1/messages", {"max_tokens": 1}, (said({"type": "image", "source": INLINE}), None, "image"))
wrong("plain", "/apply-template", {}, (said(link(IMAGE_URL)), "messages*", "image"))
wrong(
    "plain",
    "/v1/responses",
    {},
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE_URL}]}]},
        "messages*",
        "image",
    ),
)
wrong(
    "images",
    "/v1/chat/completions",
    ASK,
    (said(link("https://example.org/a.png")), "messages*", "fetches nothing"),
    (said(link("file:///etc/passwd")), "messages*", "fetches nothing"),
    (said(link("data:image/png;base64,A*A")), "messages*", "Base64"),
    (said(link(IMAGE_URL)), "messages*", "cannot be read"),
    (said(image(png()[:200])), "messages*", "cannot be read"),
    (said(image(b"GIF89a" + b"\xff" * 50)), "messages*", "cannot be read"),
    (said(image(gif((8000, 8000)))), "messages*", "pixels"),
    (said(image(gif((2000, 1)))), "messages*", "pixels"),
    (said(*[image(png())] * 65), "messages*", "65 images"),
    (said(*[image(png())] * 64, {"type": "text", "text": "and " * 1500}), "messages*", "context", *TOO_LONG),
    ({**said(image(png())), "prompt_logprobs": 1}, "*", "prompt_logprobs"),
    ({**said(image(png())), "overflow": "slide"}, "*", "overflow"),
    ({**said(image(png())), "speculation": "prompt-lookup"}, "*", "speculation"),
    ({"messages": [{"role": "assistant", "content": [image(png())]}]}, "messages*", "role assistant"),
    ({"messages": [{"role": "system", "content": [image(png())]}]}, "messages*", "role system"),
    (said(AUDIO), "messages*", "no audio"),
)


# --- the servers ---

INFILL_TOKENS = ("<|user|>", "<|end|>", "<|assistant|>")
RANKERS = {
    "ranker": ranker(Shape("ranker", "bert", n_head=2, head=32, kv_layers=(), rope="none")),
    "decoding ranker": decoding_ranker(Shape("qwen3-ranker", "qwen3", rope="neox")),
}
TEMPLATES = {
    "tools": "Qwen-Qwen2.5-7B-Instruct",
    "other tools": "mistralai-Mistral-Nemo-Instruct-2407",
    "thinks": "Qwen-Qwen3-0.6B",
}


def options_of(name: str, folder: Path) -> list[str]:
    """Return what a server is started with."""
    if name in TEMPLATES:
        return ["--n-ctx", "8192", "--chat-format", str(template_path(TEMPLATES[name]))]
    if name in RANKERS:
        RANKERS[name].write(folder / "ranker.gguf")
        return ["-m", str(folder / "ranker.gguf"), "--parallel", "1"]
    if name == "images":
        width = int(read_model_file(model_path()).get("embedding_length"))
        return ["--n-ctx", "2048", "--mmproj", str(write_projector("mlp", width, folder))]
    if name == "infill":
        with Llama(model_path(), vocab_only=True, verbose=False) as llm:
            ids = [llm.tokenize(text.encode(), add_bos=False, special=True)[0] for text in INFILL_TOKENS]
        return ["-m", str(write_fim_model(folder / "fim.gguf", (ids[0], ids[1], ids[2]))), "--n-ctx", "1024"]
    return {
        "plain": ["--n-ctx", "4096", "--parallel", "4"],
        "embeddings": ["--n-ctx", "2048", "--embeddings", "--embedding-n-ctx", str(LIMIT)],
    }[name]


@pytest.fixture(scope="module")
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """server_of(name): a server, started where a test first asks for it."""
    servers: dict[str, Server] = {}
    with ExitStack() as stack:

        def find(name: str) -> Server:
            if name not in servers:
                folder = tmp_path_factory.mktemp("server")
                servers[name] = stack.enter_context(running(*options_of(name, folder)))
            return servers[name]

        yield find


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_field_is_named(server_of: Callable[[str], Server], case: Wrong) -> None:
    status, answer, _ = server_of(case.server).request("POST", case.path, case.body)
    assert status == case.status, answer
    if case.path.startswith("/api/"):
        assert answer.keys() == {"error"}
        assert case.says in answer["error"]
        return
    error = answer["error"]
    assert error["type"] == case.kind
    assert case.says in error["message"]
    if case.path == "/v1/messages":
        assert answer["type"] == "error"
        return
    param = error["param"]
    assert "function-" not in (param or "")
    if case.param is None:
        return
    assert param, "the error names no field"
    assert param.startswith(case.param[:-1]) if case.param.endswith("*") else param == case.param


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", None, 400, "the body is empty: send a JSON object"),
        ("/v1/chat/completions", [5], 400, "the body is not a JSON object"),
        ("/v1/chat/completion", {}, 404, "no POST /v1/chat/completion (did you mean /v1/chat/completions?)"),
        ("/v1/models", {}, 405, "POST does not go with /v1/models: use GET"),
    ],
)
def test_what_is_no_request_is_refused(
    server_of: Callable[[str], Server], path: str, body: Any, status: int, says: str
) -> None:
    found, answer, _ = server_of("plain").request("POST", path, body)
    assert found == status
    assert says in answer["error"]["message"]
