"""Hide the other packages and the extras, as if the core were alone: `pytest -p support.core_alone`, with
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1, since plugins of other packages would look for them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from types import ModuleType
from typing import Any

from support import REPOSITORY

OTHER_PACKAGES = {path.name for path in (REPOSITORY / "python").glob("mixedkv_*")}
_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "cmake", "pip", "setuptools")  # of tests of the core too
_SAME_NAME = ("llama-cpp-python",)  # the stock library: its module is named as the one that the core carries
_EXTRA = re.compile(r";.*extra\s*==")


def _name(requirement: str) -> str:
    """Return the name of a distribution as it is compared."""
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else "").lower()


def _with_theirs(requirements: Iterable[str]) -> set[str]:
    """Return the names of installed distributions, and of all that they need."""
    found, left = set[str](), list(requirements)
    while left:
        name = _name(left.pop())
        if name not in found and name not in ("mixedkv", *_SAME_NAME):
            found.add(name)
            try:
                left += [each for each in requires(name) or () if not _EXTRA.search(each)]
            except PackageNotFoundError:
                continue
    return found


def _hidden_modules() -> set[str]:
    """Return the modules of the extras in pyproject.toml that neither the core nor its tests' tools need."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    hidden = _with_theirs(extras) - _with_theirs((*project["dependencies"], *_TOOLS))
    modules = packages_distributions().items()
    return {name for name, owners in modules if {_name(owner) for owner in owners} <= hidden}


HIDDEN = {*OTHER_PACKAGES, *_hidden_modules()}


class Hidden(MetaPathFinder):
    """Finds nothing in place of what is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r} (hidden by a test)", name=fullname)
        return None


sys.meta_path.insert(0, Hidden())
