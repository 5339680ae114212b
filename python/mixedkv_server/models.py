"""Names the models of a server, files and adapters on them, and describes them to clients: first as their
files say, and once they are loaded as they are.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixedkv.bundled import model_path
from mixedkv.config import parse_kv
from mixedkv.engine import Tokenizer
from mixedkv.limits import INT32_MAX
from mixedkv.model.adapter import check_adapter
from mixedkv.model.embedding_model import only_embeds, ranks
from mixedkv.model.encoder import encoder_beside
from mixedkv.model.fingerprint import model_header
from mixedkv.model.gguf_file import ModelFile, weight_type
from mixedkv.model.named_model import find_model, is_of_hub
from mixedkv.model.sampling_defaults import sampling_defaults
from mixedkv.native.chat_formats import find_format
from mixedkv_server.api_error import ApiError
from mixedkv_server.settings import ServerSettings

_NAMED = re.compile(r"([A-Za-z0-9][\w.:@~+/-]{0,255})=(.+)", re.ASCII | re.DOTALL)
_SCALED = re.compile(r"(.+)@(-?\d{1,9}(?:\.\d{1,9})?)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model or an adapter, by the name that clients use.

    Args:
        path: GGUF file.
        n_ctx: tokens of its cache; 0 for the default.
        adapter: GGUF file of a LoRA adapter on it, "" for none.
        parent: the name of the model without the adapter; "" for a model itself.
        mmproj: GGUF file of its image encoder, "" for none.
        scale: strength of the adapter.
    """

    name: str
    path: Path
    n_ctx: int
    adapter: str = ""
    parent: str = ""
    mmproj: str = ""
    scale: float = 1.0


def served_models(settings: ServerSettings) -> list[ServedModel]:
    """Return the models to serve. The first one is the default; adapters come after their model.

    Raises:
        ValueError: a name is used twice or is missing; the message begins with the option.
    """
    sizes = _sizes(settings.model_n_ctx)
    named = settings.model or [str(model_path())]
    models = [_model(given, i, settings) for i, given in enumerate(named)]
    found = {name: _encoder_of_hub(given, path) for given, (name, path) in zip(named, models, strict=True)}
    adapters = [_adapter(given, models) for given in settings.lora]
    names = [name for name, _ in models] + [name for name, _, _, _ in adapters]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"model, lora: there are two {name!r}: name one with NAME=FILE")
    if unknown := sorted(sizes.keys() - set(names)):
        raise ValueError(
            f"model_n_ctx: no model or adapter is named {unknown[0]!r}; there are {_list(names)}"
        )
    encoders = dict(_encoder(given, models) for given in settings.mmproj)
    out = []
    for name, path in models:
        size = sizes.get(name, settings.n_ctx)
        out.append(ServedModel(name, path, size, mmproj=encoders.get(name, found[name])))
        for own, parent, file, scale in adapters:
            if parent == name:
                out.append(ServedModel(own, path, sizes.get(own, size), file, parent, scale=scale))
    return out


def check_adapters(models: Sequence[ServedModel], file: ModelFile) -> None:
    """Check that a model that has adapters generates text.

    Raises:
        ValueError: it only embeds.
    """
    if len(models) > 1 and only_embeds(file):
        raise ValueError(f"lora: {models[0].name!r} only embeds texts, adapters are for models that answer")


def check_keeps(settings: ServerSettings, files: Sequence[ModelFile]) -> None:
    """Check that a model generates text where KV is to be kept.

    Raises:
        ValueError: they all only embed.
    """
    keeps = settings.store or settings.store_remote or settings.warm
    if keeps and all(map(only_embeds, files)):
        raise ValueError(
            "store, store_remote, warm: this model generates nothing, it has no KV to keep: serve it without"
        )


def check_files(model: ServedModel) -> None:
    """Check that the files beside a model exist, before it is loaded.

    Raises:
        FileNotFoundError: a file is missing.
        UnsupportedModelError: the adapter does what is not supported.
    """
    for option, path in (("lora", model.adapter), ("mmproj", model.mmproj)):
        if path and not Path(path).is_file():
            raise FileNotFoundError(f"{option}={path}: there is no such file")
    if model.adapter:
        check_adapter(model.adapter)


def _model(given: str, i: int, settings: ServerSettings) -> tuple[str, Path]:
    named = _NAMED.fullmatch(given)
    if named and not Path(given).exists():
        return named[1], find_model(named[2])
    path = find_model(given)
    name = settings.model_name if i == 0 else ""
    return name or _file_name(path if is_of_hub(given) else Path(given)), path


def _file_name(path: Path) -> str:
    """Return a file's name without `.gguf`; other dots are part of a name, as in qwen2.5-coder."""
    return path.name.removesuffix(".gguf")


def _adapter(given: str, models: Sequence[tuple[str, Path]]) -> tuple[str, str, str, float]:
    """Return an adapter's name, the model it is for, its file and its strength."""
    named = _NAMED.fullmatch(given)
    name, file = (named[1], named[2]) if named else ("", given)
    scale, parent = 1.0, models[0][0]
    for model, _ in models:
        if file.startswith(f"{model}=") and not Path(file).exists():
            parent, file = model, file.removeprefix(f"{model}=")
            break
    if (scaled := _SCALED.fullmatch(file)) and not Path(file).exists():
        file, scale = scaled[1], float(scaled[2])
    return name or _file_name(Path(file)), parent, file, scale


def _encoder(given: str, models: Sequence[tuple[str, Path]]) -> tuple[str, str]:
    """Return the model that an encoder is for, and its file."""
    for model, _ in models:
        if given.startswith(f"{model}=") and not Path(given).exists():
            return model, given.removeprefix(f"{model}=")
    if not Path(given).is_file():
        raise FileNotFoundError(f"mmproj={given}: there is no such file")
    return models[0][0], given


def _encoder_of_hub(given: str, path: Path) -> str:
    """Return the image encoder beside a model of the hub, "" if there is none."""
    named = _NAMED.fullmatch(given)
    of_hub = is_of_hub(named[2] if named and not Path(given).exists() else given)
    return str(encoder_beside(path) or "") if of_hub else ""


def _sizes(given: Sequence[str]) -> dict[str, int]:
    sizes = {}
    for each in given:
        name, _, number = each.rpartition("=")
        if not (name and number.isascii() and number.isdigit() and 0 < int(number) <= INT32_MAX):
            raise ValueError(f"model_n_ctx={each!r}: use NAME=N, with tokens of that model's cache")
        sizes[name] = int(number)
    return sizes


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


@dataclass(kw_only=True)
class Described:
    """One model or adapter of a server. Without `generates` it can only embed.

    Args:
        path: the model's file.
        parent: the model that this one is an adapter of; `adapter` and `scale`: its file and strength.
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
    adapter: str = ""
    scale: float = 1.0
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
    generates = not only_embeds(file)
    embeds = not model.parent and (settings.embeddings or not generates) and not ranks(file)
    return {
        "settings": settings,
        "model_name": model.name,
        "path": model.path,
        "parent": model.parent,
        "adapter": Path(model.adapter).name,
        "scale": model.scale,
        "generates": generates,
        "ranks": ranks(file),
        "chat_template": template,
        "kv": str(parse_kv(settings.kv if generates else "f16")),
        "capabilities": capabilities(
            generates=generates,
            tools=bool(template or name),
            thinks=Tokenizer.template_thinks(template),
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
