"""Clients that go, and tenants that look for each other."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from mixedkv.bundled.corpus import make_recall
from support.clients.raw_http import CHAT, KEYS, answer, connected, post, send
from support.patience import wait_for
from support.servers.server import MODEL, Server, running

pytestmark = pytest.mark.nightly

# --- clients that go ---


def test_a_context_whose_client_has_gone_leaves_nothing(tmp_path: Path) -> None:
    """Whether it was registered or not: what is kept and stored is that of sessions that can be deleted.

    They leave at any time between asking and well after the answer.
    """
    options = ("--n-ctx", "4096", "--parallel", "2", "--idle-prefixes", "60", "--store", str(tmp_path))
    r = random.Random(5)
    with running(*options) as server:
        for i in range(40):
            body = {"model": MODEL, "prompt": make_recall(i, 6).text, "ttl": 6000, "session_id": f"s{i}"}
            data = post(body, "Content-Type: application/json", path="/v1/context")
            with connected(server, data) as connection:
                if i % 4 == 0:
                    began = time.monotonic()
                    assert answer(connection)[0] == 201
                    whole = time.monotonic() - began
                else:
                    time.sleep(r.choice((0, 1.5)) * r.random() * whole)
        server.wait_until_idle()
        sessions = [f"/v1/context/s{i}" for i in range(40)]
        lost: list[str] = []

        def are_kept() -> bool:
            """Not at once: the last request may still be on its way."""
            lost[:] = [path for path in sessions if server.status("GET", path) == 404]
            n_kept = sum(seq["state"] == "kept" for seq in server.stats()["sequences"])
            return n_kept == 40 - len(lost)

        wait_for(are_kept)
        assert lost
        assert len(lost) < 40
        for path in set(sessions) - set(lost):
            assert server.status("DELETE", path) == 200
        wait_for(lambda: not server.wait_until_idle()["store"]["n_entries"])
        assert all(seq["state"] != "kept" for seq in server.stats()["sequences"])


def test_the_page_is_not_given_in_a_thousand_ranges(server: Server) -> None:
    ranges = ",".join(f"{i}-{i + 1}" for i in range(0, 9000, 3))
    head = f"GET / HTTP/1.1\r\nHost: localhost\r\nRange: bytes={ranges}\r\n\r\n"
    with connected(server, head.encode()) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


# --- tenants ---


def test_a_session_of_another_tenant_looks_like_none(keyed: Server) -> None:
    made = {"model": MODEL, "prompt": "Where is the key to the house? " * 4, "ttl": 60, "session_id": "mine"}
    assert keyed.request("POST", "/v1/context", made, key=KEYS[0])[0] == 201
    for method, path, body in (
        ("GET", "/v1/context/{}", None),
        ("PATCH", "/v1/context/{}", {"ttl": 5}),
        ("DELETE", "/v1/context/{}", None),
        ("POST", "/v1/completions", {"prompt": "x", "session_id": "{}"}),
        ("POST", "/v1/chat/completions", {"messages": CHAT, "session_id": "{}"}),
    ):

        def ask(name: str) -> tuple[int, str]:
            changed = body and json.loads(json.dumps(body).replace("{}", name))  # noqa: B023
            status, answer, headers = keyed.request(method, path.format(name), changed, key=KEYS[1])  # noqa: B023
            return status, json.dumps([answer, sorted(headers)]).replace(name, "ID")

        assert ask("mine") == ask("none")
        assert ask("mine")[0] == 404
    assert keyed.request("GET", "/v1/context/mine", key=KEYS[0])[1]["ttl"] == 60
    assert keyed.request("POST", "/v1/context", made, key=KEYS[1])[0] == 201  # a name of one's own


@pytest.mark.parametrize(
    "header",
    [
        *("Bearer", "Bearer ", "Bearer \xff", KEYS[0]),
        *(f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}"),
    ],
)
def test_no_door_opens_without_a_key(keyed: Server, header: str) -> None:
    for line in ("GET /v1/models", "GET /v1/stats", "GET /v1/context/mine", "DELETE /v1/context/mine"):
        head = f"{line} HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\n\r\n".encode("latin-1")
        status, body = send(keyed, head)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/warm", {"prompt": "x"}),
        ("/v1/context", {"prompt": "x", "model": MODEL}),
    ):
        headers = (f"Authorization: {header}", "Content-Type: application/json")
        assert send(keyed, post(body, *headers, path=path))[0] == 401


def test_neither_keys_nor_tenants_nor_texts_are_in_the_log(keyed: Server) -> None:
    secret = "xyzzy-4711"
    schema = {"enum": [secret, '\\" | root "'], "pattern": f"^({secret}|{secret})*$", "type": "string"}
    chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    for key in (*KEYS, secret * 2):
        for body in (
            chat,
            {**chat, "response_format": {"type": "json_object", "schema": schema}},
            {**chat, "response_format": {"type": "json_object", "schema": {"pattern": schema["pattern"]}}},
            {**chat, "session_id": secret},
            {**chat, secret: secret},
            {**chat, "messages": [{"role": secret, "content": secret}]},
            {**chat, "model": secret, "user": secret, "metadata": {secret: secret}},
        ):
            keyed.request("POST", "/v1/chat/completions", body, key=key)
        context = {"model": MODEL, "prompt": secret, "session_id": secret}
        keyed.request("POST", "/v1/context", context, key=key)
        keyed.request("GET", f"/v1/context/{secret}", key=key)
        keyed.request("GET", f"/{secret}?{secret}", key=key)
        keyed.request(secret.upper().replace("-", "X"), f"/{secret}", key=key)
    metrics = keyed.metrics()
    everything = (keyed.log + metrics).lower()
    assert "mixedkv_http_requests_total" in metrics
    for word in (secret, "xyzzyx4711", "anna", "ben:", '"ben"', *KEYS):
        assert word not in everything, word
