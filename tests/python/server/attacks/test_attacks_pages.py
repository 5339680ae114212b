"""Pages of other sites, in the browser of who may ask."""

from __future__ import annotations

import pytest

from support.clients.raw_http import KEYS, SHORT, post, send
from support.servers.server import Server

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"])
def test_this_machine_may_be_called_by_its_names(server: Server, host: str) -> None:
    assert send(server, post(SHORT, "Content-Type: application/json", host=host))[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io:80", "0.0.0.0", "x@y", "[::1", "10.0.0.1"],
)
def test_a_name_bound_to_this_machine_is_refused(server: Server, host: str) -> None:
    """DNS rebinding: to the browser evil.example is then the server itself."""
    for path in ("/v1/completions", "/v1/stats"):
        status, body = send(server, post(SHORT, host=host, path=path))
        assert (status, body["error"]["code"]) == (403, "host_not_allowed")
        assert "with --api-key-file" in body["error"]["message"]
        assert "--allow  " not in body["error"]["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://localhost.evil.example"]
)
def test_a_page_of_another_site_is_refused(server: Server, kind: str, origin: str) -> None:
    headers = [f"Origin: {origin}", *([f"Content-Type: {kind}"] if kind else [])]
    status, body = send(server, post(SHORT, *headers))
    assert (status, body["error"]["code"]) == (403, "origin_not_allowed")


def test_the_servers_own_page_may_ask(server: Server) -> None:
    headers = ("Content-Type: application/json", "Origin: http://localhost:8000")
    assert send(server, post(SHORT, *headers, host="localhost:8000"))[0] == 200


def test_who_has_a_key_may_come_from_anywhere(keyed: Server) -> None:
    headers = ("Content-Type: application/json", "Origin: https://a.example")
    key = f"Authorization: Bearer {KEYS[0]}"
    assert send(keyed, post(SHORT, *headers, key, host="a.example"))[0] == 200
