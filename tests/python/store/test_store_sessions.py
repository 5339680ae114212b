"""Names from outside, and removing what belongs to a session."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mixedkv.ids import check_session_id, check_tenant
from mixedkv.store import KVStore
from support.children.store_child import open_llama
from support.stores.blocks import identity, make_block, stored_match

pytestmark = pytest.mark.full

WHO = identity()
SYSTEM = list(range(40))
CHAT_A, CHAT_B = [*SYSTEM, 100, 101], [*SYSTEM, 200, 201]


@pytest.mark.parametrize("session", ["a", "chat-7", "Grüße an 世界", "x" * 256, "a b.c:d@e"])
def test_session_ids(session: str) -> None:
    assert check_session_id(session) == check_tenant(session) == session


REFUSED = ["../x", "..", "a/b", "/etc/passwd", "a\\b", "a\0b", "a\nb", "\x1b[0m", "\x7f", "\u202eb", "\ud800"]


@pytest.mark.parametrize(
    "session", [*REFUSED, "x" * 257, "x" * 10_000_000, ""], ids=lambda name: ascii(name[:9])
)
def test_session_ids_that_are_refused(tmp_path: Path, session: str) -> None:
    with pytest.raises(ValueError, match="session id") as error:
        check_session_id(session)
    assert len(str(error.value)) < 1000
    with KVStore(tmp_path) as store:
        with pytest.raises(ValueError, match="session id"):
            store.put(WHO, make_block(SYSTEM), session=session)
        with pytest.raises(ValueError, match="session id"):
            store.remove(session=session)
        assert store.entries() == []


@pytest.mark.parametrize("tenant", [*REFUSED, "x" * 257])
def test_tenants_that_are_refused(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        identity(tenant=tenant)


@pytest.mark.parametrize("name", [None, 7, b"x", ["x"]])
def test_names_are_strings(name: object) -> None:
    with pytest.raises(TypeError, match="is not a string"):
        check_session_id(name)  # type: ignore[arg-type]


def put(store: KVStore, tokens: list[int], session: str | None, who: object = WHO) -> str:
    parent = store.find(who, tokens)  # type: ignore[arg-type]
    p0 = parent.n_tokens if parent else 0
    return store.put(who, make_block(tokens[p0:], p0), parent, session=session)  # type: ignore[arg-type]


def n_found(store: KVStore, tokens: list[int]) -> int:
    match = store.find(WHO, tokens)
    return match.n_tokens if match else 0


def test_what_sessions_share_stays_until_the_last_is_removed(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        put(store, SYSTEM, None)
        put(store, CHAT_A, "a")
        put(store, CHAT_B, "b")
        assert {entry.n_sessions for entry in store.entries()} == {1, 2}
        assert store.remove(session="a") == 1
        assert (n_found(store, CHAT_A), n_found(store, CHAT_B)) == (40, 42)
        assert store.remove(session="a") == 0
        assert store.remove(session="b") == 2
        assert (n_found(store, CHAT_A), n_found(store, CHAT_B)) == (0, 0)
        assert list(tmp_path.rglob("*.safetensors")) == []


def test_what_builds_on_a_removed_session_goes_too(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        put(store, SYSTEM, "a")
        put(store, CHAT_A, None)
        assert store.remove(session="a") == 2
        assert store.entries() == []


def test_tenants_may_use_the_same_session_id(tmp_path: Path) -> None:
    mine, yours = identity(tenant="me"), identity(tenant="you")
    with KVStore(tmp_path) as store:
        put(store, SYSTEM, "1", mine)
        put(store, SYSTEM, "1", yours)
        assert store.remove(session="1") == 0
        assert store.remove(session="1", tenant="me") == 1
        assert store.find(mine, SYSTEM) is None
        assert store.find(yours, SYSTEM) is not None


def test_remove_an_entry(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        first = put(store, SYSTEM, None)
        put(store, CHAT_A, None)
        assert store.remove("no such entry") == 0
        assert store.remove("../../x") == 0
        assert store.remove(first) == 2
        for arguments in ({}, {"entry": first, "session": "a"}):
            with pytest.raises(ValueError, match="either an entry or a session"):
                store.remove(**arguments)


def test_a_session_is_nowhere_in_a_path(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        put(store, SYSTEM, "my-session")
        assert not any("my-session" in str(path) for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("stored_before", [True, False])
def test_a_removed_session_does_not_come_back(tmp_path: Path, stored_before: bool) -> None:
    """What was under way when it was removed, in another process too, leaves nothing."""
    with KVStore(tmp_path) as store, KVStore(tmp_path) as other:
        put(store, SYSTEM, None)
        if stored_before:
            put(store, CHAT_A, "a")
        assert store.remove(session="a") == 2 * stored_before
        n = len(store.entries())
        for session_store in (store, other):
            with pytest.raises(ValueError, match="session: it has been removed"):
                put(session_store, CHAT_A, "a")
            with pytest.raises(ValueError, match="session: it has been removed"):
                put(session_store, SYSTEM, "a")
        assert len(store.entries()) == n
        assert all(entry.n_sessions == 0 for entry in store.entries())
        put(store, CHAT_A, "b")
        put(store, CHAT_A, "a", identity(tenant="someone else"))


def test_saving_for_a_removed_session_says_so() -> None:
    with open_llama("f16") as llm, KVStore(None) as store:
        llm.eval(SYSTEM)
        store.remove(session="a")
        saved = store.save(llm, session="a")
        assert (saved.entry, saved.n_stored) == ("", 0)
        assert "session: it has been removed" in saved.reason
        assert store.entries() == []


# --- sessions that nobody knows any more ---


def open_owned(folder: Path, owner: str = "sqlite:here") -> KVStore:
    return KVStore(folder, session_owner=owner)


def test_sessions_without_an_owner_are_swept(tmp_path: Path) -> None:
    blocks = {name: make_block(list(range(i, i + 64))) for name, i in (("a", 0), ("b", 100), ("c", 200))}
    with open_owned(tmp_path, "another") as store:
        store.put(WHO, make_block(list(range(300, 364))), session="theirs")
    with KVStore(tmp_path) as store:
        store.put(WHO, make_block(list(range(400, 464))), session="nobody's")
    with open_owned(tmp_path) as store:
        for name, block in blocks.items():
            store.put(WHO, block, session=name)
        store.put(WHO, blocks["a"], session="b")  # which both have
    with open_owned(tmp_path) as store:
        later = time.time() + 1
        assert store.remove_orphans([("", "b")], before=time.time() - 60) == 0
        assert store.remove_orphans([("", "b")], before=later) == 2
        left = [store.find(WHO, list(range(i, i + 64))) is not None for i in (0, 100, 200, 300, 400)]
        assert left == [True, True, False, True, True]
        assert store.remove_orphans([("", "b")], before=later) == 0
        assert store.remove_orphans([("other", "b")], before=later) == 1
    with KVStore(tmp_path) as store:
        assert store.remove_orphans([], before=later) == 0


def test_what_a_session_has_is_found_without_its_tokens(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        store.put(WHO, make_block(SYSTEM), session="a")
        parent = store.find(WHO, SYSTEM)
        store.put(WHO, make_block([100, 101], 40), parent, session="b")
        longest = stored_match(store, WHO, CHAT_A)
        store.add_to_session(longest, "c")
        for session, n in (("a", 40), ("b", 42), ("b", 40), ("b", 17), ("c", 42)):
            match = store.find_session(WHO, session, n)
            assert match is not None
            assert match.tokens.tolist() == CHAT_A[:n]
        assert store.find_session(WHO, "a", 41) is None
        assert store.find_session(WHO, "d", 1) is None
        assert store.find_session(identity(model="b"), "b", 1) is None
        assert store.find_session(identity(tenant="x"), "b", 1) is None
        assert store.stats().misses == {"unknown": 4}
        assert len(store.entries()) == 2
    (tmp_path / "v1" / "index.sqlite3").write_bytes(b"no index")
    with KVStore(tmp_path) as store:
        assert store.find_session(WHO, "b", 1) is None
