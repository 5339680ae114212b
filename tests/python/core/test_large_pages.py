"""Weights lie in pages of 2 MB where Linux has them: docs/decisions/092-large-pages.md."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from mixedkv import Llama
from support.tools.random_model import RandomModel

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="this system has no large pages"
)


def _large(kind: str) -> int:
    """Return how many bytes of this process lie in large pages of a kind."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large_pages") / "random.gguf"
    RandomModel(n_layer=2).write(path)
    return path


def test_buffers_lie_in_large_pages(model: Path) -> None:
    before = _large("AnonHugePages")
    llm = Llama(str(model), n_ctx=256, kv="mixed", use_mmap=False, verbose=False)
    assert _large("AnonHugePages") - before > model.stat().st_size // 2
    llm.close()


def test_a_mapped_model_lies_in_large_pages(model: Path) -> None:
    path = model.with_name("pieces.gguf")
    with open(path, "wb", 32 << 20) as file:
        file.write(model.read_bytes())
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:: 1 << 16]
        if not _large("FilePmdMapped"):
            pytest.skip("this file system has no large pages")
    llm = Llama(str(path), n_ctx=256, kv="mixed", verbose=False)
    assert _large("FilePmdMapped") > path.stat().st_size // 2
    llm.close()
