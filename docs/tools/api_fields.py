"""Makes docs/openai-fields.md: what the server does with each field of OpenAI's API.

python docs/tools/api_fields.py > docs/openai-fields.md
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from mixedkv_server.api.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from mixedkv_server.compat.responses import ResponsesRequest
from mixedkv_server.fields import IGNORED, REFUSED, Model

ENDPOINTS: dict[str, tuple[type, type[Model]]] = {
    "/v1/chat/completions": (chat_create_params.CompletionCreateParamsBase, ChatRequest),
    "/v1/completions": (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    "/v1/responses": (response_create_params.ResponseCreateParamsBase, ResponsesRequest),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
}
_HEAD = """# Fields of OpenAI's API

What the server does with each field that the package `openai` {version} knows, made by
`python docs/tools/api_fields.py > docs/openai-fields.md`. *Refused* is a 400 that names the field,
unless it asks for what the server does anyway (`"modalities": ["text"]`). What is *not known* is ignored and
said once in the log, as is a field that is in no list; `--strict` refuses both. The response names what
was *ignored* in the header `X-Ignored-Fields`, and an object in `warnings`. *Ours* are those that OpenAI
does not have, most of them llama-server's.
"""


def state(model: type[Model], name: str) -> str:
    field = model.model_fields.get(name)
    if field is None:
        return "not known"
    if field.description == REFUSED:
        return "refused"
    return "ignored" if (field.description or "").startswith(IGNORED) else "taken"


def fields(endpoint: str) -> dict[str, str]:
    """OpenAI's, by name, and what becomes of them."""
    theirs, model = ENDPOINTS[endpoint]
    names = {*theirs.__annotations__, *({"stream"} & model.model_fields.keys())}
    return {name: state(model, name) for name in sorted(names)}


def ours(endpoint: str) -> list[str]:
    return sorted(ENDPOINTS[endpoint][1].model_fields.keys() - fields(endpoint).keys())


def page() -> Iterator[str]:
    yield _HEAD.format(version=openai.__version__)
    for endpoint in ENDPOINTS:
        known = fields(endpoint)
        yield f"## {endpoint}\n"
        yield "| | |\n|---|---|"
        for kind in ("taken", "ignored", "not known", "refused"):
            names = [f"`{name}`" for name in known if known[name] == kind]
            yield f"| {kind} | {', '.join(names) or '-'} |"
        yield f"| ours | {', '.join(f'`{name}`' for name in ours(endpoint)) or '-'} |\n"


if __name__ == "__main__":
    print("\n".join(page()).rstrip())
