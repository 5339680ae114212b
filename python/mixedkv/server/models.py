"""Names the models of a server: files, and adapters on them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mixedkv.bundled import model_path
from mixedkv.engine.embed.embedding_context import only_embeds
from mixedkv.limits import INT32_MAX
from mixedkv.model.encoder import encoder_beside
from mixedkv.model.gguf_file import ModelFile
from mixedkv.model.named_model import find_model, is_of_hub
from mixedkv.server.settings import ServerSettings

_NAMED = re.compile(r"([A-Za-z0-9][\w.:@~+-]{0,255})=(.+)", re.ASCII | re.DOTALL)
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
    """
    for option, path in (("lora", model.adapter), ("mmproj", model.mmproj)):
        if path and not Path(path).is_file():
            raise FileNotFoundError(f"{option}={path}: there is no such file")


def _model(given: str, i: int, settings: ServerSettings) -> tuple[str, Path]:
    named = _NAMED.fullmatch(given)
    if named and not Path(given).exists():
        return named[1], find_model(named[2])
    name = settings.model_name if i == 0 else ""
    path = find_model(given)
    return name or (path if is_of_hub(given) else Path(given)).stem, path


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
    return name or Path(file).stem, parent, file, scale


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
