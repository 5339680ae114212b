"""What `cpp/llama` repeats of llama.cpp, or rests on: it says so when upstream has changed it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "vendor"))
import copied

pytestmark = pytest.mark.core

SOURCE = REPOSITORY / "build" / "release" / "llama.cpp"
SUPPORT = REPOSITORY / "cpp" / "llama" / "hooks" / "support.cpp"


@pytest.fixture(scope="module")
def source() -> Path:
    """The patched llama.cpp that a build in this tree has unpacked."""
    if not SOURCE.is_dir():
        pytest.skip(f"needs {SOURCE}: build in this tree")
    return SOURCE


@pytest.mark.parametrize("entry", copied.read_list(), ids=lambda entry: entry.what)
def test_what_was_copied_has_not_changed(source: Path, entry: copied.Copied) -> None:
    assert entry.hash_of(source) == entry.sha256, copied.describe(entry)


@pytest.mark.parametrize("entry", copied.read_list(), ids=lambda entry: entry.what)
def test_the_list_is_true_of_our_side(entry: copied.Copied) -> None:
    assert (REPOSITORY / entry.test).is_file()
    file, functions = entry.ours.split(": ")
    text = (REPOSITORY / file).read_text()
    for function in functions.split(", "):
        assert function in text, f"{file} has no {function}"


def test_a_change_is_named_and_can_be_accepted(source: Path, tmp_path: Path) -> None:
    vendor, tree = tmp_path / "vendor", tmp_path / "llama.cpp"
    vendor.mkdir()
    for name in ("copied.py", "copied.toml"):
        shutil.copy(REPOSITORY / "vendor" / name, vendor)
    for entry in copied.read_list():
        (tree / entry.upstream).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / entry.upstream, tree / entry.upstream)
    file = tree / "src" / "llama-kv-cache.cpp"
    text = file.read_text()

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, vendor / "copied.py", tree, *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    file.write_text(text.replace("// check the cell is not SWA-masked", "// another comment"))
    assert run().returncode == 0
    file.write_text(text.replace("add_cell = !is_masked;", "add_cell = true;"))
    changed = run()
    assert changed.returncode == 1
    assert "saved_cells" in changed.stderr
    assert len(changed.stderr.splitlines()) == 1
    assert run("--accept").returncode == 0
    assert run().returncode == 0
    file.write_text(text)
    assert run().returncode == 1


def architectures(text: str) -> set[str]:
    return set(re.findall(r"case (LLM_ARCH_\w+):", text))


def test_architectures_without_a_cache_are_upstreams(source: Path) -> None:
    """`check_memory` refuses by name what `create_memory` makes no memory for."""
    upstream = (source / "src" / "llama-model.cpp").read_text()
    body = upstream[upstream.index("llama_memory_i * llama_model::create_memory(") :]
    theirs = architectures(body[: body.index("res = nullptr;", body.index("case LLM_ARCH_"))])
    ours = SUPPORT.read_text()
    ours = ours[: ours.index("reads its whole input at once")]
    assert len(theirs) > 10
    assert architectures(ours) == theirs
