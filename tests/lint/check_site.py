"""The documentation site: it builds without a warning, and no page loads anything from elsewhere.

A warning is a broken link or anchor, a page that the navigation lacks, or a docstring that cannot be read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "docs/site/mkdocs.yml"
# What a browser fetches with a page: scripts, styles, pictures, fonts. Links that a reader follows may leave.
_LOADS = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]*)")
_STYLE = re.compile(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]*)")


def build(folder: Path, config: Path = CONFIG) -> list[str]:
    """Build a site into a folder and return what is wrong, one line each."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]  # --quiet would not count warnings
    done = subprocess.run(
        [*command, "--config-file", str(config), "--site-dir", str(folder)],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("INFO")]
    return (lines or ["mkdocs failed without a message"]) if done.returncode else []


def fetched(folder: Path) -> list[str]:
    """Return what pages and styles of a built site load from other hosts, one line each."""
    problems = []
    for pattern, suffix in ((_LOADS, "*.html"), (_STYLE, "*.css")):
        for path in sorted(folder.rglob(suffix)):
            found = pattern.findall(path.read_text(encoding="utf-8"))
            problems += [f"{path.relative_to(folder)} loads {url}" for url in found]
    return problems


def blind(folder: Path) -> list[str]:
    """Return a problem if a link to nowhere is not found in a site made for that."""
    (folder / "docs").mkdir()
    (folder / "docs/index.md").write_text("# Home\n\n[away](#away)\n")
    (folder / "mkdocs.yml").write_text("site_name: a\nvalidation: {links: {anchors: warn}}\n")
    found = build(folder / "site", folder / "mkdocs.yml")
    return [] if any("#away" in line for line in found) else ["mkdocs does not see a broken link"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as folder:
        problems = blind(Path(small)) or build(Path(folder)) or fetched(Path(folder))
    print("\n".join(problems) or "docs: the site builds, nothing is loaded from elsewhere")
    sys.exit(bool(problems))
