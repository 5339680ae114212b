"""Describes models for clients: first as their files say, and once they are loaded as they are."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixedkv.config import parse_kv
from mixedkv.engine.chat.chat_template import ChatRenderer
from mixedkv.engine.chat.tokenizer import find_format
from mixedkv.engine.embed.embedding_context import only_embeds, ranks
from mixedkv.engine.sample.sampling import sampling_defaults
from mixedkv.model.fingerprint import model_header
from mixedkv.model.gguf_file import ModelFile, weight_type
from mixedkv.server.api_error import ApiError
from mixedkv.server.models import ServedModel
from mixedkv.server.settings import ServerSettings


@dataclass(kw_only=True)
class Described:
    """One model or adapter of a server. Without `generates` it can only embed.

    Args:
        path: the model's file.
        parent: the model that this one is an adapter of.
        size: of the cache, once it is in memory; `parallel`: how many answers are then made at a time.
        others: the other models by name; only in the default model's description.

    Attributes:
        capabilities: in Ollama's terms.
        sampling: fields of `Sampling` for requests that do not set them.
        loaded: whether it is in memory.
        expires_in: seconds until it leaves memory if no request comes; infinity if it stays.
    """

    settings: ServerSettings
    model_name: str
    path: Path
    generates: bool = True
    ranks: bool = False
    parent: str = ""
    kv: str = ""
    size: str = ""
    parallel: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    capabilities: list[str] = field(default_factory=list)
    chat_template: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def loaded(self) -> bool:
        return True

    @property
    def chats(self) -> bool:
        """False for a base model, which continues texts."""
        return self.generates and bool(self.chat_template or self.settings.chat_format)

    @property
    def expires_in(self) -> float:
        return math.inf

    def file_metadata(self) -> dict[str, Any]:
        """Return the metadata of the model's file, whether the model is in memory or not.

        Raises:
            ApiError: 503, the file cannot be read.
        """
        try:
            return dict(model_header(self.path).metadata)
        except (ValueError, OSError):
            message = f"the file of the model {self.model_name!r} cannot be read"
            raise ApiError(503, message, param="model", code="model_not_loaded") from None


def chat_format(given: str) -> tuple[str, str]:
    """Return the name of a chat format, or else the Jinja template in a file.

    Raises:
        ValueError: it is neither.
    """
    if not given or find_format(given):
        return given, ""
    try:
        return "", Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"chat_format={given}: {why}: give a file, or the name of a format such as chatml"
        ) from None


def description(settings: ServerSettings, model: ServedModel, file: ModelFile) -> dict[str, Any]:
    """Return the fields of `Described` that the files of a model tell."""
    own = str(file.metadata.get("tokenizer.chat_template", ""))
    name, given = chat_format(settings.chat_format)
    template = "" if name else given or own
    renderer = ChatRenderer(template, "", "")
    generates = not only_embeds(file)
    embeds = not model.parent and (settings.embeddings or not generates) and not ranks(file)
    return {
        "settings": settings,
        "model_name": model.name,
        "path": model.path,
        "parent": model.parent,
        "generates": generates,
        "ranks": ranks(file),
        "chat_template": template,
        "kv": str(parse_kv(settings.kv if generates else "f16")),
        "capabilities": capabilities(
            generates=generates,
            tools=bool(template or name),
            thinks=renderer.thinks,
            infills=any(f"tokenizer.ggml.{name}_token_id" in file.metadata for name in ("fim_pre", "prefix")),
            sees=bool(model.mmproj),
            embeds=embeds,
        ),
        "sampling": {**sampling_defaults(file.metadata), **settings.default_sampling},
        "facts": {
            "architecture": file.architecture,
            "n_params": sum(math.prod(tensor.shape) for tensor in file.tensors),
            "quantization": weight_type(file),
            "size_bytes": file.size,
            "n_ctx": (model.n_ctx or int(file.get("context_length", 0))) if generates else None,
            "n_embd": file.get("embedding_length") if embeds else None,
            "embedding_n_ctx": None,
        },
    }


def capabilities(
    *, generates: bool, tools: bool, thinks: bool, infills: bool, sees: bool, embeds: bool
) -> list[str]:
    """Return a model's capabilities in Ollama's terms."""
    can = {
        "completion": generates,
        "tools": generates and tools,
        "thinking": generates and thinks,
        "insert": generates and infills,
        "vision": generates and sees,
        "embedding": embeds,
    }
    return [name for name, is_so in can.items() if is_so]
