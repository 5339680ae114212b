"""What several tests share: models, caches, reference computations, servers, child processes."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]  # the folder that child processes import `support` from
REPOSITORY = TESTS.parents[1]
