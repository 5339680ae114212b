"""Returns the settings of the process of one model, from those of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mixedkv.engine.embed.embedding_context import only_embeds
from mixedkv.model.gguf_file import ModelFile, n_mtp_layers
from mixedkv.server.models import ServedModel
from mixedkv.server.settings import IN_MEMORY, ServerSettings

_PORT = re.compile(r"(tcp://.*:)(\d{1,5})")
_OF_THE_ROUTER = (  # settings that only the router follows
    *("host", "port", "root_path", "tls_cert", "tls_key", "cors_origin", "allowed_host", "access_log"),
    *("keep_alive", "max_loaded", "warm", "warm_text"),
)
_OF_KV = ("store", "store_key_file", "store_remote", "kv_events")  # settings for models that generate


def child_settings(
    settings: ServerSettings, members: Sequence[ServedModel], file: ModelFile, number: int, folder: Path
) -> ServerSettings:
    """Return the settings for a model and its adapters.

    Args:
        members: the model, then its adapters.
        file: the model's header.
        number: 0 for the first model, which has the draft model.
        folder: for the socket, and for sessions that are kept nowhere else.
    """
    model, adapters = members[0], members[1:]
    left_out = (*_OF_THE_ROUTER, *(_OF_KV if only_embeds(file) else ()), "draft_model" if number else "")
    fields: dict[str, Any] = {name: getattr(settings, name) for name in settings.model_fields_set}
    for name in left_out:
        fields.pop(name, None)
    return ServerSettings(
        **fields
        | {
            "model": (str(model.path),),
            "model_name": model.name,
            "model_n_ctx": tuple(f"{each.name}={each.n_ctx}" for each in members if each.n_ctx),
            "lora": tuple(f"{each.name}={each.adapter}@{each.scale:.9f}" for each in adapters),
            "mmproj": (model.mmproj,) if model.mmproj else (),
            "speculation": _speculation(settings, file, number),
            "host": str(folder / f"{number}.sock"),
            "metadata_url": _sessions(settings, folder),
            "restart_when_stuck": True,
        }
        | _events(settings, model.name, number, only_embeds(file))
    )


def _speculation(settings: ServerSettings, file: ModelFile, number: int) -> str:
    """Return how a model drafts: by text that repeats itself where it lacks what the first model has."""
    lacks_layers = settings.speculation == "mtp" and not n_mtp_layers(file)
    if number and (lacks_layers or settings.speculation == "draft-model"):
        return "prompt-lookup"
    return settings.speculation


def _sessions(settings: ServerSettings, folder: Path) -> str:
    """Return the URL of the sessions, which all processes share."""
    if settings.sessions_url != IN_MEMORY:
        return settings.sessions_url
    return f"sqlite:{folder / 'sessions.sqlite3'}"


def _events(settings: ServerSettings, name: str, number: int, embeds: bool) -> dict[str, str]:
    """Return where a model tells its events: each process at a port of its own, from the given one on.

    Raises:
        ValueError: the address has no port to count from.
    """
    if not settings.kv_events or embeds:
        return {}
    if not number:
        return {"kv_events_topic": settings.kv_events_topic.replace("{model}", name)}
    if (found := _PORT.fullmatch(settings.kv_events)) is None:
        raise ValueError(f"kv_events={settings.kv_events!r}: several models need tcp://HOST:PORT")
    return {
        "kv_events": f"{found[1]}{int(found[2]) + number}",
        "kv_events_topic": settings.kv_events_topic.replace("{model}", name),
    }
