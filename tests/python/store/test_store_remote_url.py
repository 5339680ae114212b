"""What a URL of a remote says that is wrong, and servers that do not let anybody in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv.store import KVStore
from support.patience import PATIENCE
from support.servers.remote import PATIENT, free_port, redis_server, redis_url, s3_server, s3_url
from support.stores.blocks import identity, put_chain, stored_match

pytestmark = pytest.mark.full

WHO = identity()
TOKENS = list(range(500, 700))


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (_, port):
        yield port


@pytest.mark.needs("redis", "obstore")
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://somewhere", "'http' is not the URL of a remote: use redis://"),
        ("redis:", "'redis' is not the URL of a remote"),
        ("s3://", "'s3' is not the URL of a remote"),
        ("redis://127.0.0.1:1/0?ttl=soon", "ttl=soon: use a number of seconds"),
        ("redis://127.0.0.1:1/0?timeout=0", "timeout=0: use a number of seconds"),
        ("redis://127.0.0.1:PORT/0?colour=red", "colour"),
        ("redis://127.0.0.1:PORT/0?protocol=9", "protocol"),
        ("redis://127.0.0.1:PORT/0?decode_responses=True", "values are bytes"),
        ("unix:///tmp/redis.sock?colour=red", "colour"),
        ("redis://127.0.0.1:notaport/0", "remote: "),
        ("s3://kv/x?colour=red", "unknown option 'colour'"),
        ("s3://kv/x?endpoint=minio.example:9000", "use http://HOST:PORT"),
        ("file://host/folder", "use s3://BUCKET/PREFIX or file:///FOLDER"),
        ("file:///tmp/x?region=y", "unknown option 'region' of file://"),
        ("redis://127.0.0.1:PORT/99?timeout=20", "refuses: DB index is out of range"),
    ],
)
def test_a_wrong_url(url: str, message: str, redis_port: int) -> None:
    with pytest.raises(ValueError, match=message):
        KVStore(None, remote=url.replace("PORT", str(redis_port)))


@pytest.mark.needs("redis")
def test_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with (
        redis_server(tmp_path, "--unixsocket", str(path)),
        KVStore(None, remote=f"unix://{path}?db=0&timeout=20") as store,
    ):
        put_chain(store, WHO, TOKENS, [200])
        assert store.find(WHO, TOKENS) is not None
        remote = store.stats().remote
        assert remote is not None
        assert remote.url == f"unix://{path}"


@pytest.mark.needs("redis")
def test_a_password(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", "secret") as (_, port):
        for user in ("", ":wrong@"):
            with pytest.raises(ValueError, match="refuses") as error:
                KVStore(None, remote=f"redis://{user}127.0.0.1:{port}/0?timeout=20")
            assert "wrong@" not in str(error.value)
        url = f"redis://:secret@127.0.0.1:{port}/0?timeout=20"
        with KVStore(None, remote=url) as store:
            put_chain(store, WHO, TOKENS, [200])
            assert store.find(WHO, TOKENS) is not None
            assert "secret" not in str(store.stats().remote)


@pytest.mark.needs("s3")
def test_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server(monkeypatch) as port, pytest.raises(ValueError, match="no such bucket"):
        KVStore(None, remote=s3_url(port, "nobodys", **PATIENT))


@pytest.mark.needs("s3")
def test_wrong_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    with s3_server(monkeypatch) as port:
        # look at them from now on
        httpx.post(f"http://127.0.0.1:{port}/moto-api/reset-auth", content=b"0", timeout=PATIENCE)
        try:
            with pytest.raises(ValueError, match="refuses the credentials"):
                KVStore(None, remote=s3_url(port, **PATIENT))
        finally:
            httpx.post(f"http://127.0.0.1:{port}/moto-api/reset-auth", content=b"inf", timeout=PATIENCE)


@pytest.mark.needs("obstore")
@pytest.mark.parametrize("scheme", ["redis", "s3"])
def test_a_server_that_is_gone_at_the_start(
    scheme: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    port = free_port()
    url = redis_url(port) if scheme == "redis" else s3_url(port)
    with KVStore(None, remote=url) as store:
        assert "does not answer: the store goes without it" in caplog.text
        put_chain(store, WHO, TOKENS, [200])
        assert stored_match(store, WHO, [*TOKENS, *range(100)]).n_tokens == 200
