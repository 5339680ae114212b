"""When a test runs, by marks: docs/decisions/070-three-tiers.md."""

from __future__ import annotations

import re

TIERS = {"core": "core", "full": "full", "nightly": "nightly", "slow": "nightly", "bench": "bench"}


def may_have(text: str, wanted: str) -> bool:
    """Whether a file with this text may have a test of the tier."""
    marks = {TIERS[name] for name in re.findall(rf"\bmark\.({'|'.join(TIERS)})\b", text)}
    if wanted in marks:
        return True
    later = re.search(r"^pytestmark = .*\bmark\.(nightly|slow|bench)\b", text, re.MULTILINE)
    return wanted == "nightly" or (wanted == "full" and not (later and "core" not in marks))
