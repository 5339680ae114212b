"""Servers to attack: one for everybody, one with keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.raw_http import KEYS
from support.server_support import Server, key_file, running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("--n-ctx", "1024", "--parallel", "2", "--max-body-mb", "1", "--read-timeout", "1") as server:
        yield server


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys that gives a request all the time it needs."""
    keys = key_file(tmp_path_factory.mktemp("keys"), f"anna:{KEYS[0]}", f"ben:{KEYS[1]}")
    options = ("--n-ctx", "1024", "--parallel", "2", "--max-body-mb", "1", "--read-timeout", "1000")
    with running(*options, "--api-key-file", str(keys)) as server:
        yield server
