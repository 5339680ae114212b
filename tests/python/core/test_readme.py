"""The Python of README, of the pages and of notebooks runs as it stands there.

Each piece has a process and a folder of its own; those marked `py` are outlines, which need a server.
`model.gguf` is the bundled model, and the server is one for all of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from support import REPOSITORY
from support.patience import PATIENCE
from support.servers.server import Server, running

pytestmark = pytest.mark.full

DOCS = REPOSITORY / "docs"
PAGES = [
    REPOSITORY / "README.md",
    *(DOCS / f"{name}.md" for name in ("quickstart", "choosing-a-cache", "clients", "coming-from")),
    *(DOCS / f"{name}.md" for name in ("chats", "store", "streaming")),
    *sorted((DOCS / "examples").glob("*.ipynb")),
]
CONTINUED = [DOCS / "python.md", DOCS / "passages.md"]  # each piece goes on where the one before it ended


def _pieces(page: Path) -> list[str]:
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text("utf-8"))["cells"]
        return ["\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")]
    pieces = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    return ["\n".join(pieces)] if page in CONTINUED else pieces


BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{i}")
    for page in [*PAGES, *CONTINUED]
    for i, block in enumerate(_pieces(page))
]
TEMPLATE = REPOSITORY / "tests/python/support/models/templates/qwen3.jinja"
_ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Serve the bundled model with a template that knows tools."""
    with running("--n-ctx", "4096", "--chat-format", str(TEMPLATE)) as server:
        yield server


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 12


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.nightly
def test_a_block_runs_as_pasted(block: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if "smollm2" in block:
        request.getfixturevalue("real_model_q4_1")  # skips where it cannot be downloaded
    for name in ("langchain_community", "langchain_openai", "llama_index.llms.openai_like"):
        if f"from {name}" in block:
            pytest.importorskip(name, reason=f"needs the package {name}")
    if _ADDRESS in block:
        pytest.importorskip("openai", reason="needs the package openai")
        block = block.replace(_ADDRESS, request.getfixturevalue("server").url)
    shutil.copy(model_path(), tmp_path / "model.gguf")
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
