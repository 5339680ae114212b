"""Linux is asked for pages of 2 MB for weights: docs/decisions/092-large-pages.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.tools.random_model import RandomModel

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages"
)


_OPEN = """
import re, sys
from pathlib import Path
from mixedkv import Llama

path, name, use_mmap = sys.argv[1:]
llm = Llama(path, n_ctx=256, kv="mixed", use_mmap=bool(use_mmap), verbose=False)
asked = 0
for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]:
    first, *rest = mapping.splitlines()
    if [*first.split(maxsplit=5), ""][5] == name and "hg" in rest[-1].split():
        begin, end = first.split()[0].split("-")
        asked += int(end, 16) - int(begin, 16)
print(asked)
"""


def _asked_for(model: Path, name: str, use_mmap: str) -> int:
    """Return how many bytes of the mappings of a file, or of none, lie where large pages were asked for, in a
    new process: in a used one buffers may come out of the heap.
    """
    return int(subprocess.check_output([sys.executable, "-c", _OPEN, str(model), name, use_mmap]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large_pages") / "random.gguf"
    RandomModel(n_layer=2).write(path)
    return path


def test_for_buffers(model: Path) -> None:
    assert _asked_for(model, "", "") > 0.9 * model.stat().st_size


def test_for_a_mapped_model(model: Path) -> None:
    assert _asked_for(model, str(model), "yes") > 0.9 * model.stat().st_size
