"""APIs of other programs, one file each. A new one is a file with an `API`, and a line here."""

from mixedkv_server.api_error import ERROR_FORMS
from mixedkv_server.compat import anthropic, llama_server, ollama, rerank, responses
from mixedkv_server.compat.foreign_api import ForeignAPI

APIS: tuple[ForeignAPI, ...] = (
    rerank.API,
    responses.API,
    llama_server.API,
    anthropic.API,
    ollama.API,
)
for api in APIS:
    ERROR_FORMS.update(api.errors)
