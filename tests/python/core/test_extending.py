"""docs/extending.md names the files that a row type and another rule for hot rows need: all of them."""

from __future__ import annotations

import re
import subprocess

import pytest

from support import REPOSITORY

pytestmark = pytest.mark.full

PAGE = (REPOSITORY / "docs/extending.md").read_text("utf-8")
CODE = ("CMakeLists.txt", "cpp", "python", "vendor")
_SUFFIXES = (".h", ".cpp", ".cu", ".py", ".txt", ".patch", "series")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def listed(text: str) -> set[str]:
    """The files in the first columns of a section's table: those of a step, or of the first column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [" ".join(line.split("|")[1:3]) for line in lines]
    return {path for cell in cells for path in re.findall(r"`(CMakeLists\.txt|\w+/[\w./-]+)`", cell)}


def tracked() -> list[str]:
    try:
        done = subprocess.run(
            ["git", "ls-files", *CODE], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout of git")
    return [path for path in done.stdout.splitlines() if path.endswith(_SUFFIXES)]


def test_the_checklist_of_a_row_type_has_every_file_that_names_one() -> None:
    naming = re.compile(r"tc3", re.IGNORECASE)
    named = {path for path in tracked() if naming.search((REPOSITORY / path).read_text("utf-8"))}
    assert len(named) > 20
    assert listed(section("A new row type")) == named


def test_the_files_of_a_rule_are_there_and_ask_it() -> None:
    files = listed(section("Another rule for hot rows"))
    assert len(files) >= 11
    for path in sorted(files):
        text = (REPOSITORY / path).read_text("utf-8")
        assert re.search(r"hot_window|window|HotWindow|sink", text), path


def test_everything_that_asks_the_rule_is_named() -> None:
    """What includes the rule, or asks what it holds or reads, follows it when it changes."""
    asks = re.compile(
        r"\b(?:held_begin|cut_is_exact|is_sink)\(|window\.(?:begin|contains)\(|get_window\(\)\.begin"
    )
    naming = {
        path
        for path in tracked()
        if path.startswith("cpp/") and asks.search((REPOSITORY / path).read_text("utf-8"))
    }
    assert naming - listed(section("Another rule for hot rows")) - {"cpp/llama/cache/hot-slots.h"} == set()
