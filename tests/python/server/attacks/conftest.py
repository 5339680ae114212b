"""Servers to attack: for everybody, with keys, and with little time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.clients.raw_http import KEYS
from support.servers.server import Server, key_file, running

OPTIONS = ("--n-ctx", "1024", "--parallel", "2", "--max-body-mb", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that gives a request all the time it needs."""
    with running(*OPTIONS, "--read-timeout", "1000") as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """A server that gives a request up after a second."""
    with running(*OPTIONS, "--read-timeout", "1") as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As `server`, with keys."""
    keys = key_file(tmp_path_factory.mktemp("keys"), f"anna:{KEYS[0]}", f"ben:{KEYS[1]}")
    with running(*OPTIONS, "--read-timeout", "1000", "--api-key-file", str(keys)) as server:
        yield server
