"""Whose a request is is found out once, before its body is read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mixedkv.doors.keys import Keys
from mixedkv.server.api_error import ApiError
from mixedkv.server.http.middleware import BodyLimit
from mixedkv.server.state import tenant
from support.server_support import key_file

KEY = "0123456789abcdef"


async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Ask twice, as a router's dependency and an endpoint do."""
    request = Request(scope, receive)
    try:
        response: Response = JSONResponse([tenant(request), tenant(request)])
    except ApiError as error:
        response = error.response()
    await response(scope, receive, send)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({"Authorization": f"Bearer {KEY}"}, 200), ({"x-api-key": KEY}, 200), ({"x-api-key": KEY[1:]}, 401)],
)
def test_a_key_is_compared_once_in_a_request(
    headers: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    compare = Keys.tenant

    def counted(self: Keys, *args: Any) -> str | None:
        asked.append(args)
        return compare(self, *args)

    monkeypatch.setattr(Keys, "tenant", counted)
    count = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))
    keys = Keys.load(str(key_file(tmp_path, f"anna:{KEY}")))
    app = BodyLimit(endpoint, max_bytes=1000, read_seconds=9, seconds=9, keys=keys, count=count)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast("Any", app))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/", headers=headers, json={})

    response = asyncio.run(main())
    assert response.status_code == expected
    assert len(asked) == 1
    if expected == 200:
        assert response.json() == ["anna", "anna"]
