"""A small model that is split, and its head."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv_split.export import Exported
from mixedkv_split.head import Head
from support.servers import split_servers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("split")


@pytest.fixture(scope="module")
def parts(folder: Path) -> Exported:
    return split_servers.split(split_servers.write("llama-64", folder), folder)


@pytest.fixture(scope="module")
def head(parts: Exported) -> Iterator[Head]:
    with Head(parts.head, n_threads=1) as head:
        yield head
