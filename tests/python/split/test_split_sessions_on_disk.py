"""Sessions on the server's disk, under keys that their clients hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from mixedkv.cli.main import main
from mixedkv.kv.cache import KVCache
from mixedkv.store import KVStore
from mixedkv_service.keys import Keys
from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from mixedkv_split.client import SplitClient, SplitSession
from mixedkv_split.export import Exported
from mixedkv_split.head import Head
from mixedkv_split.session_key import SessionFile, Unwrapper, new_key, wrap
from support.servers import split_servers

pytestmark = pytest.mark.full

_PROMPT = list(range(3, 103))
_MORE = [7, 8, 9]
_N = 12
_KEYS = {"anna": "anna-has-this-key-0", "bert": "bert-has-this-key-0"}
Code = grpc.StatusCode


def _answer(session: SplitSession, prompt: list[int]) -> list[int]:
    return list(session.generate_tokens(prompt, max_tokens=_N, temperature=0))


def _files(store: Path) -> list[Path]:
    return [path for path in store.rglob("entries/*") if path.is_file()]


@pytest.fixture
def tenants(folder: Path) -> Keys:
    path = folder / "keys"
    path.write_text("".join(f"{tenant}:{key}\n" for tenant, key in _KEYS.items()))
    path.chmod(0o600)
    return Keys.load(str(path))


@pytest.mark.parametrize("kv", ["f16", "mixed:threshold=32,group=8"])
def test_a_session_goes_on_after_a_restart_from_stored_rows(
    parts: Exported, head: Head, tmp_path: Path, kv: str
) -> None:
    key, store = new_key(), str(tmp_path)
    with (
        split_servers.running(parts.body, kv=kv, store=store) as server,
        SplitClient(head, server.address) as client,
    ):
        with client.session() as whole:
            first = _answer(whole, _PROMPT)
            expected = _answer(whole, [*_PROMPT, *first, *_MORE])
        with client.session(key) as session:
            assert _answer(session, _PROMPT) == first
            assert session.keep() == len(session.tokens)
            assert session.keep() == 0
            kept = session.tokens.copy()
    with (
        split_servers.linked(parts, head, kv=kv, store=store) as client,
        client.session(key, kept) as session,
    ):
        prompt = [*_PROMPT, *first, *_MORE]
        assert _answer(session, prompt) == expected
        assert session.n_resends == 0
        n_evaluated = len(session.tokens) - len(kept)
        assert session.n_sent_bytes == 2 * head.width * n_evaluated  # the server knows no others
        assert session.keep() == n_evaluated


def test_a_server_that_ends_between_answers_costs_what_was_not_kept(
    parts: Exported, head: Head, tmp_path: Path
) -> None:
    key, store = new_key(), str(tmp_path)
    with split_servers.running(parts.body, store=store) as server:
        port = server.port
        client = SplitClient(head, server.address)
        session = client.session(key)
        first = _answer(session, _PROMPT)
        n_kept = len(session.tokens)
        session.keep()
        second = _answer(session, [*_PROMPT, *first, *_MORE])
        sent = session.n_sent_bytes
    with split_servers.running(parts.body, store=store, port=port):
        prompt = [*_PROMPT, *first, *_MORE, *second, *_MORE]
        third = _answer(session, prompt)
        assert session.n_resends == 1
        n_new = len(session.tokens) - n_kept
        lost = len([*_PROMPT, *first, *_MORE, *second]) - n_kept
        assert session.n_sent_bytes - sent <= 2 * head.width * (n_new + lost)
        with client.session() as other:
            assert _answer(other, prompt) == third
        session.close()
        client.close()


def test_without_the_key_all_is_sent_again(parts: Exported, head: Head, tmp_path: Path) -> None:
    store = str(tmp_path)
    with (
        split_servers.running(parts.body, store=store) as server,
        SplitClient(head, server.address) as client,
        client.session(new_key()) as session,
    ):
        first = _answer(session, _PROMPT)
        session.keep()
        kept = session.tokens.copy()
    with split_servers.linked(parts, head, store=store) as client:
        with client.session(new_key(), kept) as session:
            _answer(session, [*_PROMPT, *first, *_MORE])
            assert session.n_resends > 0
            assert session.n_sent_bytes >= 2 * head.width * len(session.tokens)
        for key in (None, new_key):
            with KVStore(tmp_path, key=key, check_key=False) as folder:
                assert len(folder.entries()) == 1
                assert all(entry.encrypted for entry in folder.entries())
                assert folder.verify().n_whole == 0


def test_rows_that_cannot_be_loaded_are_sent_again(
    parts: Exported, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, store = new_key(), str(tmp_path)
    with (
        split_servers.running(parts.body, store=store) as server,
        SplitClient(head, server.address) as client,
        client.session(key) as session,
    ):
        first = _answer(session, _PROMPT)
        session.keep()
        kept = session.tokens.copy()
        expected = _answer(session, [*_PROMPT, *first, *_MORE])

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("this does not fit")

    monkeypatch.setattr(KVCache, "load", refuse)
    with split_servers.linked(parts, head, store=store) as client, client.session(key, kept) as session:
        assert _answer(session, [*_PROMPT, *first, *_MORE]) == expected
        assert session.n_resends == 2  # of what was not kept, then of all


def test_what_is_forgotten_is_gone(parts: Exported, head: Head, tmp_path: Path) -> None:
    with split_servers.linked(parts, head, store=str(tmp_path)) as client:
        sessions = [client.session(new_key()) for _ in range(2)]
        for session in sessions:
            _answer(session, _PROMPT)
            session.keep()
        assert len(_files(tmp_path)) == 2  # nothing is shared under two keys
        sessions[0].close()
        assert len(_files(tmp_path)) == 2
        sessions[1].close(forget=True)
        assert len(_files(tmp_path)) == 1


def _stood_at(session: SplitSession) -> dict[str, Any]:
    return {"session": session._name, "position": len(session.tokens), "running_hash": session._hashes[-1]}


def _code(client: SplitClient, head: Head, **fields: Any) -> Code:
    """The status of a message that goes on from a kept session, as F16."""
    data = wire.pack(head.embed([5]), pb.F16)
    message = pb.Vectors(**{"precision": pb.F16, "n": 1, "data": data, **fields})
    try:
        list(client.stub.Evaluate(iter([message]), metadata=client.metadata))
    except grpc.RpcError as error:
        return error.code()
    return Code.OK


def test_keys_places_and_tenants_that_are_wrong(
    parts: Exported, head: Head, tmp_path: Path, tenants: Keys
) -> None:
    key, store = new_key(), str(tmp_path)
    with (
        split_servers.running(parts.body, store=store, keys=tenants) as server,
        SplitClient(head, server.address, key=_KEYS["anna"]) as client,
        client.session(key) as session,
    ):
        _answer(session, _PROMPT)
        session.keep()
        place = _stood_at(session)
    name = place["session"]
    with (
        split_servers.running(parts.body, store=store, keys=tenants) as server,
        SplitClient(head, server.address, key=_KEYS["anna"]) as anna,
        SplitClient(head, server.address, key=_KEYS["bert"]) as bert,
    ):
        public = anna.describe().public_key
        wrapped = wrap(key, public, name)
        for wrong in (
            b"x",
            bytes(len(wrapped)),
            wrapped[:-1] + bytes([wrapped[-1] ^ 1]),
            wrap(key, Unwrapper().public_key, name),  # for another server
            wrap(key, public, bytes(16)),  # for another session
        ):
            assert _code(anna, head, **place, wrapped_key=wrong) == Code.INVALID_ARGUMENT
            request = pb.KeepRequest(**place, wrapped_key=wrong)
            with pytest.raises(grpc.RpcError) as refused:
                anna.stub.Keep(request, metadata=anna.metadata)
            assert refused.value.code() == Code.FAILED_PRECONDITION  # the session is not there
        missing = (
            (anna, {**place, "wrapped_key": wrap(new_key(), public, name)}),
            (anna, {**place, "wrapped_key": wrapped, "position": place["position"] - 1}),
            (anna, {**place, "wrapped_key": wrapped, "running_hash": bytes(16)}),
            (anna, {**place, "wrapped_key": wrapped, "precision": pb.F32, "data": bytes(4 * head.width)}),
            (anna, place),
            (bert, {**place, "wrapped_key": wrapped}),  # who has overheard all of it
        )
        for client, fields in missing:
            assert _code(client, head, **fields) == Code.FAILED_PRECONDITION
        assert _code(anna, head, **place, wrapped_key=wrapped) == Code.OK


def test_a_wrong_key_of_a_session_that_is_there(parts: Exported, head: Head, tmp_path: Path) -> None:
    with (
        split_servers.linked(parts, head, store=str(tmp_path)) as client,
        client.session(new_key()) as session,
    ):
        _answer(session, _PROMPT)
        place = _stood_at(session)
        with pytest.raises(grpc.RpcError) as refused:
            client.stub.Keep(pb.KeepRequest(**place, wrapped_key=bytes(80)))
        assert refused.value.code() == Code.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as refused:
            client.stub.Keep(pb.KeepRequest(**{**place, "position": 1}, wrapped_key=bytes(80)))
        assert refused.value.code() == Code.FAILED_PRECONDITION
        assert _files(tmp_path) == []


def test_a_server_without_a_folder_keeps_nothing(parts: Exported, head: Head) -> None:
    with split_servers.linked(parts, head) as client, client.session(new_key()) as session:
        _answer(session, _PROMPT)
        with pytest.raises(ValueError, match="started without --store"):
            session.keep()
        with pytest.raises(grpc.RpcError) as refused:
            client.stub.Keep(pb.KeepRequest(**_stood_at(session), wrapped_key=bytes(80)))
        assert refused.value.code() == Code.UNIMPLEMENTED
        with client.session() as keyless, pytest.raises(ValueError, match="has no key"):
            keyless.keep()


def test_what_was_not_used_for_long_is_removed_at_the_start(
    parts: Exported, head: Head, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        split_servers.linked(parts, head, store=str(tmp_path)) as client,
        client.session(new_key()) as session,
    ):
        _answer(session, _PROMPT)
        session.keep()
    assert _files(tmp_path)
    with split_servers.running(parts.body, store=str(tmp_path), max_age="1d"):
        assert _files(tmp_path)
    caplog.set_level(logging.INFO, "mixedkv")
    with split_servers.running(parts.body, store=str(tmp_path), max_age="0.001s"):
        assert not _files(tmp_path)
    assert "1 entries were removed that were not used for 0 s" in caplog.text


def test_a_folder_without_room(parts: Exported, head: Head, tmp_path: Path) -> None:
    with (
        split_servers.linked(parts, head, store=str(tmp_path), max_kv_size_gb=1e-6) as client,
        client.session(new_key()) as session,
    ):
        _answer(session, _PROMPT)
        with pytest.raises(grpc.RpcError) as refused:
            session.keep()
        assert refused.value.code() == Code.RESOURCE_EXHAUSTED
        assert _answer(session, [*_PROMPT, *_MORE])


def test_a_tenant_makes_room_for_its_own_sessions_itself(
    parts: Exported, head: Head, tmp_path: Path, folder: Path
) -> None:
    path = folder / "limited"
    path.write_text(f"anna:{_KEYS['anna']} disk_mb=1\nbert:{_KEYS['bert']}\n")
    path.chmod(0o600)
    keys, store = Keys.load(str(path)), tmp_path / "store"
    with (
        split_servers.running(parts.body, store=str(store), keys=keys) as server,
        SplitClient(head, server.address, key=_KEYS["anna"]) as anna,
        SplitClient(head, server.address, key=_KEYS["bert"]) as bert,
    ):
        with bert.session(new_key()) as session:
            _answer(session, _PROMPT)
            session.keep()
            first = set(_files(store))
        for _ in range(12):
            with anna.session(new_key()) as session:
                _answer(session, _PROMPT)
                session.keep()
        files = set(_files(store))
    assert first < files
    assert 1 < len(files - first) < 12
    assert sum(path.stat().st_size for path in files - first) <= 10**6


def test_the_command_line_goes_on_from_a_file(
    parts: Exported, head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = tmp_path / "notes", str(tmp_path / "store")

    def run(port: int, prompt: str, *options: str) -> tuple[int, str, str]:
        address = f"127.0.0.1:{port}"
        code = main(["split", "run", str(parts.head), address, "-p", prompt, "-n", "6", *options])
        return code, *capsys.readouterr()

    with split_servers.running(parts.body, store=store) as server:
        assert run(server.port, "the rain in the night", "--session", str(path))[0] == 0
    first = SessionFile.read(path)
    assert 0 < first.n_kept <= len(first.tokens)
    assert path.stat().st_mode & 0o777 == 0o600
    with split_servers.running(parts.body, store=store) as server:
        code, text, told = run(server.port, " and then", "--session", str(path))
        assert code == 0
        with SplitClient(head, server.address) as client:
            prompt = [*first.tokens, *head.tokenizer.tokenize(" and then", start=False)]
            assert text == "".join(client.generate(prompt, max_tokens=6, temperature=0)) + "\n"
        second = SessionFile.read(path)
        assert second.tokens[: len(first.tokens)] == first.tokens
        n_new = second.n_kept - first.n_kept
        assert f"{2 * head.width * n_new / second.n_kept:.0f} bytes a token sent" in told
        assert run(server.port, "x", "--session", str(path), "--chat")[0] == 2
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        SessionFile.read(path)
    for wrong in ("", "[]", "{}", '{"key": "00", "tokens": [], "n_kept": 0}'):
        path.write_text(wrong)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="not a session that was kept"):
            SessionFile.read(path)


def test_a_key_is_zeros_after_its_use() -> None:
    key, name, unwrapper = new_key(), bytes(16), Unwrapper()
    with unwrapper.open(wrap(key, unwrapper.public_key, name), name) as opened:
        assert opened == key
    assert opened == bytes(32)
    assert key != bytes(32)
