"""Linux is asked for pages of 2 MB for weights: docs/decisions/092-large-pages.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.models.random_model import RandomModel

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("large pages"),
]


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


_MOVED = """
import re, sys
from pathlib import Path
import llama_cpp, numpy as np
from mixedkv import Llama

path, use_mmap = sys.argv[1:]
llm = Llama(path, n_ctx=256, verbose=False, **({"use_mmap": True} if use_mmap else {}))
llm.eval([5, 260, 261, 262])
mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)[1:]
mapped = [each for each in mappings if path in each.splitlines()[0]]
print(sum(int(re.search("Rss: +([0-9]+)", each)[1]) << 10 for each in mapped))
print(np.ctypeslib.as_array(llama_cpp.llama_get_logits(llm.ctx), (llm.n_vocab(),)).tobytes().hex())
"""


def _mapped(model: Path, use_mmap: str) -> tuple[float, str]:
    """Return which share of the file stays mapped in a new process, and its logits."""
    text = subprocess.check_output([sys.executable, "-c", _MOVED, str(model), use_mmap], text=True)
    n_bytes, logits = text.splitlines()
    return int(n_bytes) / model.stat().st_size, logits


def test_a_model_in_small_pages_is_moved_and_says_the_same(model: Path, tmp_path: Path) -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("large pages are switched off")
    small = tmp_path / "small.gguf"
    with model.open("rb") as source, small.open("wb") as target:
        while piece := source.read(1 << 16):
            target.write(piece)
    mapped, logits = _mapped(small, "yes")
    assert mapped > 0.9
    moved, same = _mapped(small, "")
    assert moved < 0.1
    assert same == logits
