"""The documentation site: built as it stands, and its generated pages are those of the code."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import command_page
from support import REPOSITORY

CHECK = REPOSITORY / "tests/lint/check_site.py"
REFERENCE = REPOSITORY / "docs/reference"

sys.path.insert(0, str(CHECK.parent))
from check_site import fetched  # noqa: E402

pytestmark = pytest.mark.full


@pytest.mark.skipif(
    not all(find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")),
    reason="needs the packages of the group docs: pip install --group docs",
)
def test_the_site_builds_without_a_warning() -> None:
    done = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_that_pages_name_are_there() -> None:
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    named = re.compile(
        r"\b(?:python/mixedkv\w*|tests/python|tests/cpp|cpp|docs)/[\w./-]+\.(?:py|h|cpp|c|md|yml)\b"
    )
    missing = [
        f"{page.relative_to(REPOSITORY)}: {path}"
        for page in pages
        for path in named.findall(page.read_text("utf-8"))
        if not (REPOSITORY / path).is_file()
    ]
    assert not missing


def path_of(named: str) -> str:
    """A file of C++ or of a package beside the core has the package's name; one of the core has none."""
    if named.startswith("cpp/"):
        return named
    return f"python/{named}" if named.startswith("mixedkv_") else f"python/mixedkv/{named}"


def test_rules_stand_where_the_architecture_says() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text("utf-8")
    table = page.partition("## Where a rule stands")[2].partition("\n## ")[0]
    named = re.findall(r"((?:`[\w.]+`(?: and )?)+) in `([\w/.-]+)`", table)
    assert len(named) > 10
    for names, path in named:
        file = REPOSITORY / path_of(path)
        code = file.read_text("utf-8")
        for name in re.findall(r"[\w.]+", names.replace(" and ", " ")):
            missing = [part for part in name.split(".") if not re.search(rf"\b{part}\b", code)]
            assert not missing, f"{path} has no {name}"


def test_what_is_loaded_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://example.org"></a><script src="https://example.org/a.js">'
    )
    (tmp_path / "a.css").write_text("@import url(https://example.org/font.css); a { background: url(b.png) }")
    assert fetched(tmp_path) == [
        "a.html loads https://example.org/a.js",
        "a.css loads https://example.org/font.css",
    ]


def test_the_page_of_the_command_line_is_that_of_the_parsers() -> None:
    """After a change: python docs/tools/command_page.py > docs/reference/cli.md"""
    assert (REFERENCE / "cli.md").read_text("utf-8") == command_page.page()


def test_the_page_of_the_endpoints_is_that_of_the_server() -> None:
    """After a change: python docs/tools/http_page.py > docs/reference/http.md"""
    pytest.importorskip("fastapi", reason="needs the extra server")
    import http_page

    assert (REFERENCE / "http.md").read_text("utf-8") == http_page.page()
