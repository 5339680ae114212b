"""The tests of the core need neither the other packages nor the extras: here these are hidden."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import TESTS

pytestmark = pytest.mark.full

ROOMS = ("chat", "chunks", "core", "engine", "kv", "model", "sessions", "store", "streaming")
HIDING = [sys.executable, "-m", "pytest", "-p", "support.core_alone", "-q", "-p", "no:cacheprovider", *ROOMS]


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*HIDING, *arguments], cwd=TESTS, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def test_the_other_packages_are_hidden() -> None:
    program = "import support.core_alone, mixedkv_server"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert "No module named 'mixedkv_server'" in done.stderr


def test_tests_of_the_core_tier_import_the_core_alone() -> None:
    assert "kv/test_blocks.py" in run("--tier", "core", "--collect-only")


@pytest.mark.nightly
def test_tests_of_the_core_tier_pass_with_the_core_alone() -> None:
    assert " passed" in run("--tier", "core")
