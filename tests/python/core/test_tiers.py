"""Which tier a test is of: the closest mark counts, and three models of the zoo are core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, TESTS
from support.tiers import may_have

SOME = """
import pytest

pytestmark = pytest.mark.core

def test_of_the_file(): pass

@pytest.mark.nightly
def test_of_its_own(): pass

@pytest.mark.nightly
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.core)])
def test_of_a_parameter(n): pass

@pytest.mark.parametrize("name", ["llama-64", "gemma4", "qwen3", "of_no_model"])
def test_of_a_model(name): pass

@pytest.mark.parametrize("attention", ["fused", "merged"])
@pytest.mark.parametrize("name", ["gemma2", "gemma4"])
def test_of_both(name, attention): pass

def test_real(real_model): pass
"""
REST = """
import pytest

def test_without_a_mark(): pass

def test_real(real_model_q4_1): pass

@pytest.mark.parametrize("attention", ["fused", pytest.param("merged", marks=pytest.mark.full)])
def test_marked(attention): pass

@pytest.mark.parametrize("attention", ["fused", "merged"])
def test_attention(attention): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    (folder / "test_some.py").write_text(SOME)
    (folder / "test_rest.py").write_text(REST)
    return folder


COLLECT = """
import sys, pytest
for tier in ("core", "full", "nightly", ""):
    print("tier:" + tier)
    pytest.main([*sys.argv[1:], *(["--tier", tier] if tier else [])])
"""


@pytest.fixture(scope="module")
def collected(folder: Path) -> dict[str, set[str]]:
    """The tests of each tier, and under no name all."""
    options = f"-c {REPOSITORY / 'pyproject.toml'} -p conftest --collect-only -q".split()
    command = [sys.executable, "-c", COLLECT, *options, str(folder)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [part.splitlines() for part in done.stdout.split("tier:")[1:]]
    return {name: {line.rpartition("::")[2] for line in rest if "::" in line} for name, *rest in parts}


OF_TIER = {
    "core": "of_the_file of_a_parameter[2] of_a_model[llama-64] of_both[gemma2-fused] of_both[gemma2-merged] "
    "of_a_model[of_no_model]",
    "full": "of_a_model[gemma4] of_both[gemma4-fused] without_a_mark marked[fused] marked[merged] "
    "attention[fused]",
    "nightly": "of_its_own of_a_parameter[1] of_a_model[qwen3] of_both[gemma4-merged] real attention[merged]",
}


@pytest.mark.parametrize("tier", OF_TIER)
def test_a_test_is_of_one_tier(collected: dict[str, set[str]], tier: str) -> None:
    assert collected[tier] == {f"test_{name}" for name in OF_TIER[tier].split()}


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("", "full nightly"),
        ("pytestmark = pytest.mark.core", "core full nightly"),  # a model's test is of another tier
        ("pytestmark = [pytest.mark.slow, needs_redis]", "nightly"),
        ("pytestmark = pytest.mark.bench", "nightly bench"),
        ("pytestmark = pytest.mark.nightly\n@pytest.mark.core\ndef test(): pass", "core full nightly"),
        ("@pytest.mark.bench\ndef test(): pass", "full nightly bench"),
    ],
)
def test_a_file_is_read_for_the_tiers_it_may_have(text: str, tiers: str) -> None:
    assert [tier for tier in ("core", "full", "nightly", "bench") if may_have(text, tier)] == tiers.split()


def test_without_the_option_all_are_there(collected: dict[str, set[str]]) -> None:
    assert len(collected[""]) == 18
