"""Which tier a test is of and what it needs is what its marks say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, TESTS
from support.needs import NEEDS, missing
from support.tiers import may_have

pytestmark = pytest.mark.full

SOME = """
import pytest

pytestmark = pytest.mark.core

def test_of_the_file(): pass

@pytest.mark.nightly
def test_of_its_own(): pass

@pytest.mark.nightly
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.core)])
def test_of_a_parameter(n): pass

@pytest.mark.by_model
@pytest.mark.parametrize("name", ["llama-64", "gemma4", "qwen3", "of_no_model"])
def test_of_a_model(name): pass

@pytest.mark.parametrize("name", ["gemma4", "qwen3"])
def test_of_any_model(name): pass

@pytest.mark.by_model
@pytest.mark.parametrize("attention", ["fused", "merged"])
@pytest.mark.parametrize("name", ["gemma2", "gemma4"])
def test_of_both(name, attention): pass

@pytest.mark.nightly
@pytest.mark.needs("real model")
def test_real(real_model): pass
"""
REST = """
import pytest

pytestmark = pytest.mark.full

def test_with_every_change(): pass

@pytest.mark.parametrize("attention", ["fused", "merged"])
def test_both_attentions(attention): pass

@pytest.mark.merged_nightly
@pytest.mark.parametrize("attention", ["fused", "merged"])
def test_attention(attention): pass
"""
WRONG = {
    "def test_it(): pass": "test_it: no mark says when it runs; write `pytestmark = pytest.mark.full`",
    "@pytest.mark.full\n@pytest.mark.needs('rediss')\ndef test_it(): pass": "needs 'rediss': choose from",
    "@pytest.mark.full\ndef test_it(real_model): pass": "write @pytest.mark.needs('real model')",
}


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
    "of_a_model[of_no_model] of_any_model[gemma4] of_any_model[qwen3]",
    "full": "of_a_model[gemma4] of_both[gemma4-fused] with_every_change both_attentions[fused] "
    "both_attentions[merged] attention[fused]",
    "nightly": "of_its_own of_a_parameter[1] of_a_model[qwen3] of_both[gemma4-merged] real attention[merged]",
}


@pytest.mark.parametrize("tier", OF_TIER)
def test_a_test_is_of_one_tier(collected: dict[str, set[str]], tier: str) -> None:
    assert collected[tier] == {f"test_{name}" for name in OF_TIER[tier].split()}


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("", "core full nightly bench"),  # pytest says that a mark is missing
        ("pytestmark = pytest.mark.core", "core"),
        ("pytestmark = [pytest.mark.core, pytest.mark.by_model]", "core full nightly"),
        ("pytestmark = pytest.mark.full\n@pytest.mark.merged_nightly\ndef test(): pass", "full nightly"),
        ("pytestmark = [pytest.mark.slow, needs_redis]", "nightly"),
        ("pytestmark = pytest.mark.nightly\n@pytest.mark.core\ndef test(): pass", "core nightly"),
        ("pytestmark = pytest.mark.full\n@pytest.mark.bench\ndef test(): pass", "full bench"),
    ],
)
def test_a_file_is_read_for_the_tiers_it_may_have(text: str, tiers: str) -> None:
    assert [tier for tier in ("core", "full", "nightly", "bench") if may_have(text, tier)] == tiers.split()


def test_without_the_option_all_are_there(collected: dict[str, set[str]]) -> None:
    assert len(collected[""]) == 20


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_said_or_misspelt_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "test_wrong.py"
    path.write_text(f"import pytest\n\n{text}\n")
    options = f"-m pytest -c {REPOSITORY / 'pyproject.toml'} -p conftest --collect-only -q".split()
    done = subprocess.run([sys.executable, *options, str(path)], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert WRONG[text] in done.stderr


def test_a_need_that_is_not_met_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDS, "redis", (lambda: False, "no redis"))
    assert missing(["POSIX", "redis"]) == "no redis"
    assert missing(["POSIX"]) is None
