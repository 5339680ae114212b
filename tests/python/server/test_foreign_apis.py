"""APIs of other programs: each is a file that the server knows by one line."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from mixedkv_server import compat
from mixedkv_server.api_error import ApiError
from mixedkv_server.app import all_routes
from mixedkv_server.compat.foreign_api import ForeignAPI
from support import REPOSITORY

pytestmark = pytest.mark.core

FILES = sorted(
    path.stem
    for path in (REPOSITORY / "python/mixedkv_server/compat").glob("*.py")
    if path.stem not in ("__init__", "foreign_api")
)


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_served(name: str) -> None:
    api: ForeignAPI = import_module(f"{compat.__name__}.{name}").API
    assert any(api is each for each in compat.APIS)
    paths = {route.path for router in (api.generating, api.others) for route in router.routes}  # type: ignore[attr-defined]
    assert paths
    assert paths <= {route.path for route in all_routes()}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "not_found_error", "message": "no"}}),
        ("/api/chat", {"error": "no"}),
        ("/v1/responses", {"error": {"type": "not_found_error", "message": "no"}}),
        ("/completion", {"error": {"type": "not_found_error", "message": "no"}}),
    ],
)
def test_an_error_has_the_form_of_its_api(path: str, body: dict[str, Any]) -> None:
    found = json.loads(bytes(ApiError(404, "no").response(path).body))
    if isinstance(found["error"], dict):
        found["error"] = {name: found["error"][name] for name in ("type", "message")}
    assert found == body
