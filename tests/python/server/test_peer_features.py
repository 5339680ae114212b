"""docs/coming-from.md: what it says of this server is so, by the clients that people use."""

from __future__ import annotations

import re

import pytest

from support import REPOSITORY
from support.clients.peer_features import CHECKS, Asked, tried
from support.servers.server import MODEL, running

pytestmark = pytest.mark.nightly

TEMPLATE = REPOSITORY / "tests/python/support/models/templates/qwen3.jinja"


def test_each_row_works() -> None:
    with running("--n-ctx", "4096", "--embeddings", "--chat-format", str(TEMPLATE)) as server:
        why_not = {row: why for row, why in tried(Asked(server.url, MODEL)).items() if why}
    assert not why_not


def test_the_page_has_these_rows() -> None:
    page = (REPOSITORY / "docs" / "coming-from.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| yes \|", page, re.M)
    assert rows == [(row, client) for row, (client, _) in CHECKS.items()]
