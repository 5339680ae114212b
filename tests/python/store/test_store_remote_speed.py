"""How fast rows come out of Redis, beside what its own benchmark gets out of it. With -s it prints them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from mixedkv.store import KVStore
from support.remote_servers import redis_server
from support.store_support import identity, make_block, same, stored_match

WHO, KEY = identity(), b"k" * 32
TOKENS = list(range(8192))
ROUNDS = 7
pytestmark = pytest.mark.bench


def own_benchmark(port: int, names: list[bytes]) -> float:
    """Gigabytes per second of `redis-benchmark`, reading the pieces one after the other."""
    program = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
    if program is None:
        pytest.skip("no redis-benchmark on the path: apt-get install redis-tools")
    command = [program, "-p", str(port), "-n", "400", "-c", "1", "--csv", "GET", names[0].decode()]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return float(line.split(",")[-7].strip('"')) * (2 << 20) / 1e9


def bare_client(port: int, names: list[bytes]) -> float:
    """The same of a socket that is read into memory that stays."""
    buffer, total = memoryview(bytearray(4 << 20)), 0
    with socket.create_connection(("127.0.0.1", port)) as client:
        begin = time.perf_counter()
        for name in names:
            client.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            head, _, rest = client.recv(64).partition(b"\r\n")
            left = int(head[1:]) + 2 - len(rest)
            total += int(head[1:])
            while left:
                left -= client.recv_into(buffer[:left])
        return total / 1e9 / (time.perf_counter() - begin)


def restore(url: str, folder: Path | None, tier: str) -> float:
    """Gigabytes per second of finding and reading 134 MB."""
    with KVStore(folder, remote=url, key=lambda: KEY, max_ram_bytes=2**31) as store:
        begin = time.perf_counter()
        match = stored_match(store, WHO, [*TOKENS, 1])
        found = store.read_from(match)
        seconds = time.perf_counter() - begin
        assert found is not None
        ((block,), where) = found
        assert (len(block), where) == (len(TOKENS), tier)
        return block.nbytes / 1e9 / seconds


def test_rows_out_of_redis(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis", reason="the redis package is not installed")
    block = make_block(TOKENS, n_layers=64)
    with redis_server(tmp_path) as (_, port):
        url = f"redis://127.0.0.1:{port}/0?timeout=10"
        with KVStore(None, remote=url, key=lambda: KEY, max_ram_bytes=2**31) as store:
            store.put(WHO, block)
            assert store._remote is not None
            assert store._remote.flush(60)
        with KVStore(None, remote=url, key=lambda: KEY, max_ram_bytes=2**31) as store:
            match = stored_match(store, WHO, TOKENS)
            (found,) = store.read(match) or []
            assert same(found, block)
        names = sorted(redis.Redis(port=port).keys("*piece*"))
        found = {"redis-benchmark": [], "bare client": [], "memory": [], "folder": [], "disk": []}
        for i in range(ROUNDS):
            found["redis-benchmark"].append(own_benchmark(port, names))
            found["bare client"].append(bare_client(port, names))
            found["memory"].append(restore(url, None, "remote"))
            found["folder"].append(restore(url, tmp_path / f"kv{i}", "remote"))
            found["disk"].append(restore(url, tmp_path / f"kv{i}", "disk"))
            shutil.rmtree(tmp_path / f"kv{i}")
    for name, rates in found.items():
        print(f"{name}: {sorted(rates)[ROUNDS // 2]:.2f} GB/s, best {max(rates):.2f}")
    bound = max(found["redis-benchmark"])
    assert max(found["memory"]) > min(1.0, 0.5 * bound)
