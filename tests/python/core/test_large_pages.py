"""Linux is asked for pages of 2 MB for weights: docs/decisions/092-large-pages.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mixedkv import Llama
from support.tools.random_model import RandomModel

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages"
)


def _asked_for(name: str) -> int:
    """Return how many bytes of the mappings of a file, or of none, were asked to lie in large pages."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]
    asked = 0
    for mapping in mappings:
        first, *rest = mapping.splitlines()
        of = [*first.split(maxsplit=5), ""][5]
        if of == name and "hg" in rest[-1].split():
            begin, end = first.split()[0].split("-")
            asked += int(end, 16) - int(begin, 16)
    return asked


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large_pages") / "random.gguf"
    RandomModel(n_layer=2).write(path)
    return path


def test_for_buffers(model: Path) -> None:
    before = _asked_for("")
    llm = Llama(str(model), n_ctx=256, kv="mixed", use_mmap=False, verbose=False)
    assert _asked_for("") - before > 0.9 * model.stat().st_size
    llm.close()


def test_for_a_mapped_model(model: Path) -> None:
    llm = Llama(str(model), n_ctx=256, kv="mixed", verbose=False)
    assert _asked_for(str(model)) > 0.9 * model.stat().st_size
    llm.close()
