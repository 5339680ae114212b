"""What the process of a model is told of the settings of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mixedkv.bundled import model_path
from mixedkv.model.gguf_file import read_model_file
from mixedkv_server.models import served_models
from mixedkv_server.router.model_process import child_settings, without_folders
from mixedkv_server.settings import ServerSettings

pytestmark = pytest.mark.full

BUNDLED = str(model_path())
PLACE = Path("/run/here")


def told(number: int, **given: Any) -> ServerSettings:
    """The settings for one of two models, as its process reads them."""
    settings = ServerSettings(model=(f"one={BUNDLED}", f"two={BUNDLED}"), **given)
    name = ("one", "two")[number]
    members = [each for each in served_models(settings) if name in (each.name, each.parent)]
    child = child_settings(settings, members, read_model_file(BUNDLED), number, PLACE)
    return ServerSettings.model_validate_json(child.model_dump_json())


def test_a_process_serves_one_model_with_its_adapters() -> None:
    given: dict[str, Any] = {
        "lora": ["a=one=a.gguf", "b=two=b.gguf@0.5"],
        "model_n_ctx": ["two=2048", "b=1024"],
    }
    first, second = told(0, **given), told(1, **given)
    assert [(each.name, each.n_ctx, each.scale) for each in served_models(first)] == [
        ("one", 0, 1.0),
        ("a", 0, 1.0),
    ]
    assert [(each.name, each.n_ctx, each.scale) for each in served_models(second)] == [
        ("two", 2048, 1.0),
        ("b", 1024, 0.5),
    ]
    assert [first.routed, second.routed] == [False, False]


def test_what_the_router_does_its_processes_do_not() -> None:
    given = {"host": "0.0.0.0", "port": 80, "api_key_file": "keys", "allow": ["*"], "root_path": "/llm"}
    child = told(1, **given, keep_alive="5m", max_loaded=1, access_log=True, store="kv", parallel=3)
    assert (child.unix_socket, child.host, child.port) == (*2 * (str(PLACE / "1.sock"),), 8000)
    assert (child.allow, child.root_path, child.keep_alive, child.max_loaded) == ((), "", "", 0)
    assert (child.api_key_file, child.store, child.parallel) == ("keys", "kv", 3)
    assert child.restart_when_stuck
    assert not child.access_log


def test_sessions_are_shared() -> None:
    assert told(0).metadata_url == told(1).metadata_url == f"sqlite:{PLACE / 'sessions.sqlite3'}"
    assert told(1, store="kv").metadata_url.endswith("kv/sessions.sqlite3")
    assert told(1, metadata_url="redis://host").metadata_url == "redis://host"


def test_only_the_first_one_has_the_draft_model() -> None:
    assert [told(i, speculation="small.gguf").draft_model for i in (0, 1)] == ["small.gguf", ""]
    assert told(1, speculation="small.gguf").speculation == "prompt-lookup"
    assert [told(i, speculation="mtp").speculation for i in (0, 1)] == ["mtp", "prompt-lookup"]


def test_each_tells_its_events_at_a_port_of_its_own() -> None:
    given = {"kv_events": "tcp://*:5557#kv@{model}"}
    told_of = [told(i, **given).kv_events for i in (0, 1)]
    assert told_of == ["tcp://*:5557#kv@one", "tcp://*:5558#kv@two"]
    with pytest.raises(ValueError, match="kv_events='ipc://here': several models need tcp://HOST:PORT"):
        told(1, kv_events="ipc://here")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "host=/tmp/mixedkv-a1/0.sock: another process listens there",
            "host=its socket: another process listens there",
        ),
        ("/run/user/7/mixedkv-a1/12.sock cannot be listened on", "its socket cannot be listened on"),
        ("/home/anna/my models/x.gguf: No such file", "x.gguf: No such file"),
        ("~/keys: cannot be read; ../other/y", "keys: cannot be read; y"),
        ("tls=(/etc/a/cert.pem, '/etc/b/key.pem')", "tls=(cert.pem, 'key.pem')"),
        ("redis://:secret@cache:6379/0 is out of reach", "redis://cache:6379/0 is out of reach"),
        ("use tcp://HOST:PORT, and/or 1/2 of n_ctx=512", "use tcp://HOST:PORT, and/or 1/2 of n_ctx=512"),
    ],
)
def test_an_error_of_a_models_process_names_no_folder(line: str, shown: str) -> None:
    """Clients read it, and where files lie on the machine is not theirs to know."""
    assert without_folders(line, ["/home/anna/my models/x.gguf"]) == shown
