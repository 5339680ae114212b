"""What a tenant's requests hold in memory leaves room for others: bodies, and answers until they are read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mixedkv.engine import Request, Sampling
from mixedkv.work.presence import presence
from mixedkv_server.api.request_limits import answer_bytes
from mixedkv_server.api_error import ApiError
from mixedkv_server.http.middleware import HOLD_ANSWER, BodyLimit
from mixedkv_server.http.tenant_bytes import MAX_ANSWER_BYTES, SMALL, TenantBytes
from mixedkv_service.keys import Keys
from support.servers.server import key_file

pytestmark = pytest.mark.full


@pytest.mark.core
def test_a_tenant_has_an_equal_share_whatever_others_hold() -> None:
    held = TenantBytes(8_000_000, RuntimeError)
    assert held.has_room("a", 8_000_000)
    held.add("a", 8_000_000)
    assert not held.has_room("a", 1)
    assert held.has_room("b", 4_000_000)
    assert not held.has_room("b", 4_000_001)
    held.add("b", 4_000_000)
    held.add("a", -8_000_000)
    assert held.has_room("a", 4_000_000)


def test_what_was_added_and_taken_away_leaves_nothing() -> None:
    rng, held, added = random.Random(7), TenantBytes(1_000_000, RuntimeError), list[tuple[str, int]]()
    for _ in range(1000):
        if added and rng.random() < 0.5:
            name, n = added.pop(rng.randrange(len(added)))
            held.add(name, -n)
        else:
            added.append((rng.choice("abc"), rng.randrange(200_000)))
            held.add(*added[-1])
    for name, n in added:
        held.add(name, -n)
    assert not held._held


def test_a_request_without_room_is_refused_unless_it_is_small() -> None:
    held = TenantBytes(200_000, lambda: RuntimeError("full"))
    held.hold("a", 200_000)
    with pytest.raises(RuntimeError, match="full"):
        held.hold("a", SMALL + 1)
    held.hold("a", SMALL)
    held.hold("a", 10, total=SMALL)
    with pytest.raises(RuntimeError, match="full"):
        held.hold("a", 10, total=SMALL + 1)
    assert held._held["a"] == 200_000 + SMALL + 10


def test_logprobs_are_counted_before_they_are_made() -> None:
    sampling = Sampling()
    request = Request(prompt=range(50), max_tokens=1000, sampling=sampling, n_logprobs=4)
    assert answer_bytes([request], 4096) == 1000 * 5 * 100
    assert answer_bytes([request, request], 500) == 2 * 500 * 5 * 100  # the context ends an answer
    request = Request(prompt=range(50), max_tokens=1, sampling=sampling, prompt_logprobs=20)
    assert answer_bytes([request], 4096) == 50 * 21 * 100
    assert answer_bytes([Request(prompt=range(50), max_tokens=1000, sampling=sampling)], 4096) == 0


class _Count:
    def labels(self, *_: str) -> _Count:
        return self

    def inc(self) -> None: ...


def test_large_answers_of_a_tenant_are_bounded_until_they_are_read(tmp_path: Path) -> None:
    """The ninth answer of 64 MB is refused. Another tenant's is not, nor the next one when one is read."""

    async def scene() -> None:
        go_on = asyncio.Event()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            status = 200
            try:
                scope[HOLD_ANSWER](MAX_ANSWER_BYTES)
                await go_on.wait()
            except ApiError as error:
                status = error.status
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        keys = Keys.load(str(key_file(tmp_path, "a:key-of-a-0123456789", "b:key-of-b-0123456789")))
        app: Any = BodyLimit(
            application, max_bytes=1000, read_seconds=60, seconds=60, keys=keys, count=_Count()
        )

        def ask(tenant: str) -> asyncio.Task[int]:
            return asyncio.create_task(_ask(app, f"key-of-{tenant}-0123456789"))

        held = [ask("a") for _ in range(8)]
        await asyncio.sleep(0.05)
        assert await ask("a") == 429
        beside = ask("b")
        await asyncio.sleep(0.05)
        assert not beside.done()
        go_on.set()
        assert await asyncio.gather(*held, beside) == [200] * 9
        assert await ask("a") == 200
        assert not app._answers._held

    asyncio.run(scene())


def test_a_body_has_the_time_that_it_was_made_to_wait(tmp_path: Path) -> None:
    """8 MB take half a second beside another tenant. The client sends them at once, or stops in between."""

    async def scene() -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            size = len((await receive())["body"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": str(size).encode()})

        keys = Keys.load(str(key_file(tmp_path, "a:key-of-a-0123456789")))
        app: Any = BodyLimit(
            application, max_bytes=10_000_000, read_seconds=0.2, seconds=60, keys=keys, count=_Count()
        )
        parts = [bytes(1_000_000)] * 8
        with presence.of("b"):
            assert await _ask(app, "key-of-a-0123456789", parts) == 200
            assert await asyncio.wait_for(_ask(app, "key-of-a-0123456789", [*parts, None]), 5) == 408
        assert await asyncio.wait_for(_ask(app, "key-of-a-0123456789", [b"", None]), 5) == 408
        assert not app._bodies._held

    asyncio.run(scene())


async def _ask(app: Any, key: str, parts: Sequence[bytes | None] = (b"{}",)) -> int:
    """The status of an answer. A body stops coming at None."""
    found: list[int] = []
    left = list(parts)

    async def receive() -> Any:
        part = left.pop(0) if left else None
        if part is None:
            await asyncio.Future()
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    headers = [(b"authorization", b"Bearer " + key.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await app(scope, receive, send)
    return found[0]
