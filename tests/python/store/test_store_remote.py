"""A server that several stores share: what one wrote another finds, and what is wrong with it is a miss."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mixedkv.store import KVStore, rekey
from mixedkv.store.remote import tier
from mixedkv.store.remote.tier import PART_BYTES
from support import TESTS
from support.patience import PATIENCE, wait_for
from support.servers.remote import PATIENT, Line, redis_server, redis_url, s3_server, s3_url
from support.stores.blocks import identity, make_block, put_chain, same, stored_match

pytestmark = pytest.mark.full

WHO = identity()
TOKENS = list(range(500, 700))
KEY = b"k" * 32


def _of(kind: str, need: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.needs(need))


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (_, port):
        yield port


@pytest.fixture(params=[_of("redis", "redis"), _of("s3", "s3"), _of("file", "obstore")])
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """remote(**options): the URL of an empty server; `port` is of a line to it."""
    if request.param == "file":
        folder = request.getfixturevalue("tmp_path_factory").mktemp("shared")
        yield lambda: f"file://{folder}?timeout=20"
        return
    if request.param == "redis":
        port = request.getfixturevalue("redis_port")
        client(port).flushall()

        def url(port: int = port, **options: object) -> str:
            return redis_url(port, **options)

        url.port = port  # type: ignore[attr-defined]
        yield url
        return
    with s3_server(monkeypatch) as port:

        def url(port: int = port, **options: object) -> str:
            return s3_url(port, **PATIENT | options)

        url.port = port  # type: ignore[attr-defined]
        yield url


@pytest.fixture
def line(remote: Any) -> Iterator[Line]:
    if not hasattr(remote, "port"):
        pytest.skip("no line leads to a folder")
    line = Line(remote.port)
    yield line
    line.close()


@pytest.fixture
def url(redis_port: int) -> str:
    """Of a Redis that holds nothing."""
    client(redis_port).flushall()
    return redis_url(redis_port)


def client(port: int) -> Any:
    import redis

    return redis.Redis(port=port)


def open_store(url: str, folder: Path | None = None, key: bytes | None = KEY, **options: Any) -> KVStore:
    return KVStore(folder, remote=url, key=None if key is None else lambda: key, **options)


def sent(store: KVStore) -> None:
    """Until all that was put is on the server."""
    assert store._remote is not None
    assert store._remote.flush(PATIENCE)


def write(url: str, key: bytes | None = KEY, ends: tuple[int, ...] = (40, 77, 200), who: Any = WHO) -> None:
    with open_store(url, key=key) as store:
        put_chain(store, who, TOKENS, list(ends))
        sent(store)


@pytest.mark.parametrize("key", [KEY, None], ids=["encrypted", "plain"])
@pytest.mark.parametrize("on_disk", [True, False], ids=["folder", "memory"])
def test_what_one_store_wrote_another_finds(
    remote: Callable[..., str], tmp_path: Path, key: bytes | None, on_disk: bool
) -> None:
    with open_store(remote(), tmp_path / "a" if on_disk else None, key) as store:
        put_chain(store, WHO, TOKENS, [40, 77, 200])
        sent(store)
    with open_store(remote(), tmp_path / "b" if on_disk else None, key) as other:
        match = stored_match(other, WHO, [*TOKENS, 1, 2, 3])
        assert (match.n_tokens, match.exact, len(match.links)) == (200, True, 3)
        found = other.read_from(match)
        assert found is not None
        blocks, tier = found
        assert tier == "remote"
        ends = [0, 40, 77, 200]
        expected = [make_block(TOKENS[p0:p1], p0) for p0, p1 in itertools.pairwise(ends)]
        assert all(same(a, b) for a, b in zip(blocks, expected, strict=True))
        again = other.read_from(match)
        assert again is not None
        assert again[1] == "ram"  # it is here now
        assert other.stats().hits == {"remote": 1, "ram": 1}
    if on_disk:  # and stays here, without the remote
        with KVStore(tmp_path / "b", key=None if key is None else lambda: key) as alone:
            assert stored_match(alone, WHO, TOKENS).n_tokens == 200
            assert alone.verify().n_whole == 3


def test_entries_of_many_pieces(
    remote: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "PART_BYTES", 4096)
    write(remote())
    with open_store(remote(), tmp_path) as other:
        match = stored_match(other, WHO, TOKENS)
        assert match.n_tokens == 200
        blocks = other.read(match)
        assert blocks is not None
        assert all(same(a, make_block(TOKENS[a.p0 : a.p1], a.p0)) for a in blocks)


def test_a_folder_that_cannot_be_written_is_a_miss_and_said_once(
    remote: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    write(remote())
    monkeypatch.setattr(tier.RemoteTier, "_take_over", refuse)
    with open_store(remote(), tmp_path) as other:
        for _ in range(2):
            assert other.find(WHO, TOKENS) is None
    said = [each for each in caplog.records if "cannot be written here" in each.getMessage()]
    assert [each.levelname for each in said if each.levelno > logging.DEBUG] == ["WARNING"]


@pytest.mark.needs("redis")
def test_a_second_process_restores_the_same_logits(url: str, tmp_path: Path) -> None:
    """From the remote alone: its folder is empty."""
    from support.children.store_child import continue_greedily, open_llama

    with open_llama("mixed") as llm, KVStore(tmp_path / "a", remote=url) as store:
        tokens = llm.tokenize(b"In the beginning there was a cache, and it was shared by all. " * 8)
        follow_up = tokens[-3:]
        llm.eval(tokens)
        assert store.save(llm).reason == ""
        sent(store)
        ids, logits = continue_greedily(llm, follow_up)
    (tmp_path / "tasks").write_text(json.dumps([[tokens, follow_up]]))
    command = [
        sys.executable,
        "-m",
        "support.children.store_child",
        "mixed",
        tmp_path / "b",
        tmp_path / "tasks",
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=TESTS, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[ids, logits.tobytes().hex()]]


def test_a_longer_prefix_is_taken_over_and_a_shorter_is_not(remote: Callable[..., str]) -> None:
    write(remote(), ends=(100, 200))
    with open_store(remote()) as other:
        put_chain(other, WHO, TOKENS[:120], [120])
        match = other.find(WHO, TOKENS[:130])  # less than a block more
        assert match is not None
        assert match.n_tokens == 120
        stats = other.stats().remote
        assert stats is not None
        assert stats.bytes_read == 0
        match = stored_match(other, WHO, [*TOKENS[:180], 7, 8])
        assert (match.n_tokens, len(match.links)) == (180, 2)
        assert stored_match(other, WHO, [*TOKENS, 1], remote=False).n_tokens == 200


@pytest.mark.needs("redis")
def test_what_it_builds_on_is_sent_again_if_it_is_gone(redis_port: int) -> None:
    url = redis_url(redis_port)
    with open_store(url) as store:
        put_chain(store, WHO, TOKENS[:80], [40, 80])
        sent(store)
        client(redis_port).flushall()
        put_chain(store, WHO, TOKENS, [80, 200])
        sent(store)
    with open_store(url) as other:
        assert stored_match(other, WHO, TOKENS).n_tokens == 200


@pytest.mark.parametrize("change", ["key", "tenant", "settings", "no key"])
def test_others_find_nothing(remote: Callable[..., str], change: str) -> None:
    write(remote())
    who = {"tenant": identity(tenant="b"), "settings": identity("q8_0")}.get(change, WHO)
    key = {"key": b"o" * 32, "no key": None}.get(change, KEY)
    with open_store(remote(), key=key) as other:
        assert other.find(who, TOKENS) is None
        put_chain(other, who, TOKENS, [200])  # nor is what is there overwritten
        sent(other)
    with open_store(remote()) as one:
        match = stored_match(one, WHO, TOKENS)
        assert one.read(match) is not None


@pytest.mark.needs("redis")
def test_nothing_leaves_in_plain_text(redis_port: int) -> None:
    client(redis_port).flushall()
    write(redis_url(redis_port))
    block = make_block(TOKENS[77:200], 77)
    expected = [block.groups[0].layers[0].k.tobytes()[:64], block.tokens.tobytes()[:64]]
    values = [bytes(client(redis_port).get(name)) for name in client(redis_port).keys("*")]
    assert sum(map(len, values)) > 50_000
    assert not any(part in value for value in values for part in expected)


def test_what_is_removed_goes_there_too(remote: Callable[..., str]) -> None:
    with open_store(remote()) as store:
        entries = put_chain(store, WHO, TOKENS, [40, 200])
        sent(store)
        assert store.remove(entries[1]) == 1
        sent(store)
    with open_store(remote()) as other:
        match = stored_match(other, WHO, TOKENS)
        assert match.n_tokens == 40
        session = other.put(WHO, make_block(TOKENS[40:], 40), match, session="chat-7")
        sent(other)
        assert session
        assert other.remove(session="chat-7") >= 1
        sent(other)
    with open_store(remote()) as third:
        assert third.find(WHO, TOKENS[:100]) is None


def test_what_is_evicted_stays_there(remote: Callable[..., str], tmp_path: Path) -> None:
    block = make_block(TOKENS)
    with open_store(remote(), tmp_path / "a", max_kv_size_gb=1.5 * block.nbytes / 1e9) as store:
        store.put(WHO, block)
        sent(store)
        store.put(WHO, make_block([7, *TOKENS[1:]]))
        assert len(store.entries()) == 1
        assert stored_match(store, WHO, TOKENS).n_tokens == 200


@pytest.mark.needs("redis")
def test_what_has_no_room_here_is_not_read(url: str, tmp_path: Path) -> None:
    write(url)
    with open_store(url, tmp_path / "small", max_kv_size_gb=make_block(TOKENS).nbytes / 2e9) as small:
        assert small.find(WHO, TOKENS) is None
        stats = small.stats().remote
        assert stats is not None
        assert (stats.bytes_read, stats.misses) == (0, 1)


@pytest.mark.needs("redis")
def test_what_the_old_key_wrapped_is_sent_anew(redis_port: int, tmp_path: Path) -> None:
    """A store that got another key hashes as before, so the old key's entries lie under its names."""
    client(redis_port).flushall()
    url, new = redis_url(redis_port), b"n" * 32
    for folder in ("a", "b"):
        open_store(url, tmp_path / folder).close()
        rekey(tmp_path / folder, lambda: KEY, lambda: new)
    write(url, ends=(100,))  # by who has not read the new key
    with open_store(url, tmp_path / "a", new) as store:
        assert store.find(WHO, TOKENS[:100]) is None
        store.put(WHO, make_block(TOKENS[:100]))
        sent(store)
    with open_store(url, tmp_path / "b", new) as other:
        assert other.find(WHO, TOKENS[:100]) is not None


def damaged(value: bytes, others: list[bytes], rng: random.Random) -> bytes | None:
    """Cut, forged, of another, or gone."""
    kind = rng.randrange(6)
    if kind == 0 or not value:
        return None
    if kind == 1:
        return value[: rng.randrange(len(value))]
    if kind == 2:
        return rng.choice(others)
    if kind == 3:
        return value + rng.randbytes(rng.choice([1, 4096]))
    if kind == 4:
        return rng.randbytes(len(value))
    changed = bytearray(value)
    for at in rng.sample(range(len(value)), min(len(value), rng.choice([1, 1, 20]))):
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def check_damage(port: int, n: int, key: bytes | None) -> None:
    """Whatever happens to values, rows that are found are the right ones."""
    redis, url = client(port), redis_url(port)
    redis.flushall()
    blocks = [make_block(TOKENS[:100]), make_block(TOKENS[100:], 100)]
    with open_store(url, key=key) as store:
        put_chain(store, WHO, TOKENS, [100, 200])
        put_chain(store, WHO, [9, *TOKENS[1:]], [200])
        sent(store)
    whole = {name: redis.get(name) for name in redis.keys("*")}
    names = sorted(whole)
    found = 0
    for trial in range(n):
        rng = random.Random(trial)
        redis.mset(whole)
        for name in rng.sample(names, rng.choice([1, 1, 2, 5])):
            value = damaged(whole[name], list(whole.values()), rng)
            redis.delete(name) if value is None else redis.set(name, value)
        with open_store(url, key=key) as other:
            match = other.find(WHO, TOKENS)
            read = other.read(match) if match is not None else None
            if match is not None and read is not None:
                found += 1
                expected = [blocks[0], blocks[1].slice(100, max(101, match.n_tokens))]
                if match.n_tokens <= 100:
                    expected = [blocks[0].slice(0, match.n_tokens)]
                assert all(same(a, b) for a, b in zip(read, expected, strict=True)), trial
    assert n // 4 < found < n  # damage did matter, and not always


@pytest.mark.needs("redis")
@pytest.mark.parametrize(
    ("key", "piece", "n"),
    [(KEY, PART_BYTES, 60), (None, 8192, 60), pytest.param(KEY, PART_BYTES, 1000, marks=pytest.mark.slow)],
    ids=["encrypted", "plain", "many"],
)
def test_damaged_values(
    redis_port: int,
    key: bytes | None,
    piece: int,
    n: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.CRITICAL, "mixedkv.store")
    monkeypatch.setattr(tier, "PART_BYTES", piece)
    check_damage(redis_port, n, key)


@pytest.mark.parametrize("mode", ["silent", "slow", "cut"])
def test_a_bad_line_is_a_miss_and_then_nobody_asks(
    remote: Callable[..., str], line: Line, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(remote())
    with open_store(remote(line.port, timeout=0.3)) as other:
        other._remote._breaker._clock = lambda: 0.0  # type: ignore[union-attr]  (its seconds take for ever)
        line.mode = mode
        for _ in range(3):
            assert other.find(WHO, TOKENS) is None
        stats = other.stats().remote
        assert stats is not None
        assert not stats.up
        n = stats.failures
        assert other.find(WHO, TOKENS) is None
        assert other.stats().remote.failures == n  # type: ignore[union-attr]
        assert sum("does not answer" in record.getMessage() for record in caplog.records) == 1
        line.mode = "open"

        found: list[Any] = []

        def is_found() -> bool:
            other._remote._breaker._backoff._until = 0.0  # type: ignore[union-attr]  (the seconds are over)
            found[:] = [other.find(WHO, TOKENS)]
            return found[0] is not None

        wait_for(is_found)
        assert found[0].n_tokens == 200
        assert "answers again" in caplog.text


@pytest.mark.needs("redis")
def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (server, port):
        store = open_store(redis_url(port, timeout=0.3))
        server.kill()
        server.wait()
        put_chain(store, WHO, TOKENS, [100, 200])
        assert store.find(WHO, [9, *TOKENS]) is None
    with redis_server(tmp_path, port=port):
        store._remote._breaker._backoff._until = 0.0  # type: ignore[union-attr]
        store.close()  # sends what waited
        with open_store(redis_url(port)) as other:
            match = other.find(WHO, TOKENS)
            assert match is None or match.n_tokens in (100, 200)


@pytest.mark.needs("redis")
def test_what_waits_to_be_sent_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes while too much waits is kept here and not sent, and that is said once."""
    monkeypatch.setattr(tier, "_MAX_WAITING", 4)
    with redis_server(tmp_path) as (server, port), open_store(redis_url(port)) as store:
        server.send_signal(signal.SIGSTOP)
        try:
            for i in range(20):
                assert store.put(WHO, make_block([i, *TOKENS]))
            stats = store.stats().remote
            assert stats is not None
            assert (stats.waiting, stats.dropped) == (4, 16)
        finally:
            server.send_signal(signal.SIGCONT)
        assert sum("takes less than is stored" in record.getMessage() for record in caplog.records) == 1
        sent(store)
        for i in range(20):
            assert stored_match(store, WHO, [i, *TOKENS]).n_tokens == len(TOKENS) + 1
        assert [open_and_find(port, [i, *TOKENS]) for i in range(20)] == [i < 4 for i in range(20)]


@pytest.mark.needs("redis")
def test_a_full_server_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as (_, port):
        with open_store(redis_url(port)) as store:
            for i in range(30):
                store.put(WHO, make_block([i, *TOKENS]))
            sent(store)
            stats = store.stats().remote
            assert stats is not None
            assert stats.refused > 0
            assert (stats.up, stats.failures) == (True, 0)
            found = sum(open_and_find(port, [i, *TOKENS]) for i in range(30))
            assert 0 < found < 30
        assert sum("takes no more" in record.getMessage() for record in caplog.records) == 1


def open_and_find(port: int, tokens: list[int]) -> bool:
    with open_store(redis_url(port)) as other:
        match = other.find(WHO, tokens)
        return match is not None and match.n_tokens == len(tokens)


@pytest.mark.needs("redis")
def test_entries_end_with_their_time(redis_port: int) -> None:
    client(redis_port).flushall()
    write(redis_url(redis_port, ttl=100))
    redis = client(redis_port)
    assert all(0 < redis.ttl(name) <= 100 for name in redis.keys("*"))


@pytest.mark.needs("redis")
def test_who_takes_over_the_same_leaves_the_others_file(url: str, tmp_path: Path) -> None:
    """Both give it the same name: who comes second must not remove it."""
    write(url)
    both = threading.Barrier(2)
    with open_store(url, tmp_path) as one, open_store(url, tmp_path) as other:
        pieces = tier.RemoteTier._parts
        with pytest.MonkeyPatch.context() as patch:

            def slowly(self: Any, expected: Any, until: float) -> Any:
                both.wait(PATIENCE)
                return pieces(self, expected, until)

            patch.setattr(tier.RemoteTier, "_parts", slowly)
            with ThreadPoolExecutor() as pool:
                found = list(pool.map(lambda store: store.find(WHO, TOKENS), (one, other)))
        assert [match and match.n_tokens for match in found] == [200, 200]
    with KVStore(tmp_path, key=lambda: KEY) as alone:
        match = stored_match(alone, WHO, TOKENS)
        assert match.n_tokens == 200
        assert alone.read(match) is not None


def test_no_more_names_at_once_than_the_server_answers_in_time(
    remote: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 512 names 16 at a time are answered by a bucket: together they would take longer than one answer."""
    with open_store(remote()) as store:
        assert store._remote is not None
        backend: Any = store._remote._backend
        sizes: list[int] = []
        for name in ("get", "put"):
            ask = getattr(backend, name)
            monkeypatch.setattr(backend, name, lambda what, ask=ask: sizes.append(len(what)) or ask(what))
        store.put(WHO, make_block([n % 900 for n in range(4096)], 0))
        sent(store)
        assert 1 < max(sizes) <= backend.fan


@pytest.mark.needs("redis")
def test_who_may_only_read_reads(redis_port: int, tmp_path: Path) -> None:
    client(redis_port).flushall()
    write(redis_url(redis_port))
    client(redis_port).execute_command("ACL", "SETUSER", "ro", "on", ">pw", "~*", "+@read", "+@connection")
    url = redis_url(redis_port).replace("redis://", "redis://ro:pw@")
    with open_store(url) as store:
        store.put(WHO, make_block(list(range(64)), 0))
        sent(store)
        assert stored_match(store, WHO, TOKENS).n_tokens == 200
        stats = store.stats().remote
        assert stats is not None
        assert (stats.up, stats.refused, stats.failures) == (True, 1, 0)


@pytest.mark.needs("redis")
def test_a_closed_store_misses(redis_port: int) -> None:
    store = open_store(redis_url(redis_port))
    store.close()
    assert store.find(WHO, TOKENS) is None
