"""Packs answers as JSON, a chunk at a time, off the event loop and in turns of tenants: encoding a large
object in one call holds Python's lock. The next chunk is made when the client has taken the one before, so
that an answer's size is no matter of memory.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeAlias

from starlette.responses import Response, StreamingResponse

from mixedkv_server.pools import Pools

Answer: TypeAlias = dict[str, Any] | list[Any]
CHUNK = 1 << 18  # bytes: a few milliseconds of work
_TOGETHER = 32  # items of a long list
_TEXT = 1 << 16  # characters of a text that are encoded in one call
_JSON = "application/json"


class Long:
    """A long list in an answer, whose items are made when they are encoded, once."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


def _as_list(value: Any) -> Any:
    """Return a `Long` as a list, for an encoder in one call."""
    if isinstance(value, Long):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


encode = json.JSONEncoder(separators=(",", ":"), default=_as_list).encode
encode_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_list).encode


def json_chunks(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value in chunks, none of which takes long to make."""
    if isinstance(value, dict):
        for i, (key, item) in enumerate(value.items()):
            yield f"{',' if i else '{'}{encode(key)}:"
            yield from json_chunks(item)
        yield "}" if value else "{}"
    elif isinstance(value, Long):
        items, comma = iter(value), "["
        while some := list(islice(items, _TOGETHER)):
            yield comma + encode(some)[1:-1]
            comma = ","
        yield "]" if comma == "," else "[]"
    elif isinstance(value, list) and any(isinstance(item, dict | list | Long) for item in value):
        for i, item in enumerate(value):
            yield "," if i else "["
            yield from json_chunks(item)
        yield "]"
    elif isinstance(value, str) and len(value) > _TEXT:
        yield '"'
        for i in range(0, len(value), _TEXT):
            yield encode(value[i : i + _TEXT])[1:-1]
        yield '"'
    else:
        yield encode(value)


class _Chunks:
    """The text of an answer in chunks of about `CHUNK` bytes."""

    def __init__(self, begin: Callable[[], Iterator[str]]) -> None:
        self._begin = begin
        self._rest: Iterator[str] | None = None
        self.done = False

    def take(self) -> bytes:
        """Return the next chunk."""
        if self._rest is None:
            self._rest = self._begin()
        found, size = [], 0
        for chunk in self._rest:
            found.append(chunk)
            size += len(chunk)
            if size >= CHUNK:
                break
        else:
            self.done = True
        return "".join(found).encode()


async def packed(pools: Pools, tenant: str, begin: Callable[[], Iterator[str]]) -> Response:
    """Answer with JSON in chunks, which `begin` returns. It is called off the event loop, and so are they."""
    chunks = _Chunks(begin)
    first = await pools.answers.run(tenant, chunks.take)
    if chunks.done:
        return Response(first, media_type=_JSON)
    return StreamingResponse(_rest(pools, tenant, chunks, first), media_type=_JSON)


async def _rest(pools: Pools, tenant: str, chunks: _Chunks, first: bytes) -> AsyncIterator[bytes]:
    yield first
    while not chunks.done:
        yield await pools.answers.run(tenant, chunks.take)
