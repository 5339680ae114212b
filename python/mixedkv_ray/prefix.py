"""Extracts the part of a request that decides where its KV lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

BLOCK = 256  # characters
_MAX_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a prompt.

    Args:
        blocks: a hash of each 256 characters and all before them, and of whose they are.
        length: characters of the prompt.
        ends: a hash of all up to the end of each of its messages; the last one is the whole prompt's.
        session: of the conversation it says it is of, "" for none.
    """

    blocks: tuple[int, ...] = ()
    length: int = 0
    session: str = ""
    ends: tuple[int, ...] = ()


def prefix_of(body: bytes, owner: str = "", session: str = "") -> Prefix:
    """Return the prefix of a request's body; of what is no prompt, an empty one.

    Args:
        owner: what tells tenants apart: KV is found by its own only.
        session: named beside the body.
    """
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        fields = {}
    if not isinstance(fields, dict):
        fields = {}
    texts = list(_texts(fields))
    text = "\n".join(texts)
    named = session or fields.get("session_id") or ""
    blocks, ends = [], []
    name = hashlib.sha256(owner.encode()).digest()
    all_before = hashlib.sha256(name)
    for one in texts:
        all_before.update(one.encode(errors="replace") + b"\n")
        ends.append(_number(all_before.digest()))
    for begin in range(0, min(len(text), BLOCK * _MAX_BLOCKS) - BLOCK + 1, BLOCK):
        name = hashlib.sha256(name + text[begin : begin + BLOCK].encode(errors="replace")).digest()
        blocks.append(_number(name))
    whose = hashlib.sha256(f"{owner}\n{named}".encode(errors="replace")).hexdigest()[:32] if named else ""
    return Prefix(tuple(blocks), len(text), whose, tuple(ends))


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "big")


def _texts(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a chat, a completion or a response, in the order in which templates write it."""
    for name in ("tools", "system", "instructions", "prompt", "input"):
        if value := fields.get(name):
            yield value if isinstance(value, str) else json.dumps(value)
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else []:
        yield json.dumps(message)
