"""The setting of rows: a text of all that shaped them besides their tokens, "model=... window=64/16/4".

The native library writes it with each row and compares it where rows come in: cpp/llama/hooks/setting.h. What
it begins with, the model's file, is named here.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from mixedkv import _core
from mixedkv.errors import InvalidModelFileError
from mixedkv.model.fingerprint import fingerprint, model_header
from mixedkv.model.gguf_file import file_stamp


def name_of_model(path: str, stamp: Any, overrides: Mapping[str, Any] | None) -> str:
    """Return a name for what rows are computed from: a model's file, and metadata that is overridden.

    Where the file cannot be read any more, or is another one by now, no other `Llama` has that name.

    Args:
        path: the file, of a split model the first.
        stamp: of the file that was loaded.
        overrides: metadata that the model has instead of the file's.
    """
    try:
        name = f"model={fingerprint(path)}"
        changed = _changed(path, overrides or {})
        if stamp is not None and file_stamp(path) != stamp:
            raise InvalidModelFileError(f"{path} is not the file that was loaded")
    except (OSError, InvalidModelFileError):
        return f"model=unread-{uuid.uuid4().hex}"
    if not changed:
        return name
    text = json.dumps(changed, separators=(",", ":"))
    return f"{name} overrides={hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _changed(path: str, overrides: Mapping[str, Any]) -> list[list[str]]:
    """Return the overrides that may change rows: not what the file has anyway, nor how text is tokenized."""
    has = model_header(path).metadata
    return sorted(
        [key, type(value).__name__, repr(value)]
        for key, value in overrides.items()
        if not key.startswith("tokenizer.") and (key not in has or not _is_same(has[key], value))
    )


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values of metadata are the same to llama.cpp, which has numbers of 32 bits."""
    if isinstance(one, float) and isinstance(other, float):
        return bool(np.float32(one) == np.float32(other))
    return bool(one == other)


def parts_of(setting: str) -> dict[str, str]:
    """Return the parts of a setting by name."""
    return dict(part.partition("=")[::2] for part in setting.split())


def window_of(setting: str) -> _core.HotWindow:
    """Return which tokens are read in F16 besides, by a setting; none if it does not say."""
    numbers = parts_of(setting).get("window", "0").split("/")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return _core.HotWindow()
    threshold, group_size, sink_tokens = map(int, numbers)
    return _core.HotWindow(threshold, max(1, group_size), sink_tokens)


def difference(setting: str, here: str) -> str:
    """Return in what rows of a setting differ from those that are computed here; "" if in nothing."""
    if setting == here:
        return ""
    if not setting:
        return "nothing says how they were computed"
    theirs, ours = parts_of(setting), parts_of(here)
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    return "; ".join(f"{name} {_short(theirs.get(name))}, here {_short(ours.get(name))}" for name in names)


def _short(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 40 else f"{value[:16]}..."
