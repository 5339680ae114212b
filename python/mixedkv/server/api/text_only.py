"""Refuses parts of messages that are not text, in all APIs, and gives the reason."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BeforeValidator

_IMAGES = ("image", "image_url", "input_image")
_MEDIA = ("image", "audio", "video", "file", "document")


def _check(content: Any, taken: tuple[str, ...]) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in taken:
            continue
        if kind.removeprefix("input_").startswith(_MEDIA):
            what = "texts and images only (no audio or files)" if taken else "texts only"
            raise ValueError(f"{kind[:40]}: this server takes {what} here: leave it out")
    return content


TextOnly = BeforeValidator(partial(_check, taken=()))
TextOrImages = BeforeValidator(partial(_check, taken=_IMAGES))
