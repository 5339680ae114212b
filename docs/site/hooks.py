"""Links from the pages to files of the repository that are no pages: the site names the file instead."""

from __future__ import annotations

import re
from typing import Any

_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:python|cpp|tests|vendor|docs/site)/[^)]+|[A-Z]+\.md)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links that leave `docs/` by their text and the file's path."""
    return _TO_A_FILE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, path = link.groups()
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
