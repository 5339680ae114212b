"""What a test needs of the machine: `pytest.mark.needs("redis")`. Without it the test is skipped.

Packages that a file imports are no needs: `pytest.importorskip` at its top says them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from mixedkv import system
from support.cache.stock_library import stock_library

EMULATED = "QEMU_LD_PREFIX" in os.environ
"""Whether qemu-user runs this (`.ci/aarch64/environment`): twenty times as slowly, but for system calls."""

# what it is: whether the machine has it, and what is missing otherwise
NEEDS: dict[str, tuple[Callable[[], object], str]] = {
    # fixtures named `real_model`... download it, and skip where they cannot
    "real model": (lambda: True, ""),
    "redis": (
        lambda: find_spec("redis") and (shutil.which("valkey-server") or shutil.which("redis-server")),
        "no redis-server on the path, or no package redis: apt-get install redis-server, pip install redis",
    ),
    "s3": (
        lambda: find_spec("obstore") and find_spec("moto") and find_spec("flask"),
        "no server of buckets: pip install obstore 'moto[s3]' flask",
    ),
    "obstore": (lambda: find_spec("obstore"), "the package obstore is not installed"),
    "chromium": (lambda: shutil.which("chromium"), "needs the program chromium (Debian's package chromium)"),
    "promtool": (lambda: shutil.which("promtool"), "needs promtool (Debian's package prometheus)"),
    "stock llama.cpp": (
        stock_library,
        "compares with llama-cpp-python, which is not installed: the extra `peer`",
    ),
    "matplotlib": (lambda: find_spec("matplotlib"), "needs the extra plot"),
    "C compiler": (lambda: shutil.which("cc"), "no C compiler on the path"),
    "root": (
        lambda: hasattr(os, "geteuid") and os.geteuid() == 0,
        "runs as root alone: it gives files away or makes control groups",
    ),
    "two cores": (lambda: system.usable_cpus() > 1, "two threads need two cores"),
    "terminal": (lambda: sys.platform != "win32", "no pseudo-terminals here"),
    "POSIX": (lambda: os.name != "nt", "signals and pipes of POSIX"),
    "Linux": (lambda: sys.platform == "linux", "of Linux alone"),
    "large pages": (
        lambda: Path("/sys/kernel/mm/transparent_hugepage").exists(),
        "this system has no large pages",
    ),
}
# fixtures that start what a test needs: a test that uses one says so
FIXTURES = {"real_model": "real model", "redis_port": "redis", "redis_url": "redis", "browser": "chromium"}


def missing(needs: Iterable[str]) -> str | None:
    """Return what the machine lacks of these, None if it has all."""
    return next((text for has, text in map(NEEDS.__getitem__, needs) if not has()), None)


def undeclared(needs: Iterable[str], fixtures: Iterable[str]) -> list[str]:
    """Return what a test uses by its fixtures and does not say with a mark."""
    used = {need for name in fixtures for start, need in FIXTURES.items() if name.startswith(start)}
    return sorted(used - set(needs))
