"""The project's checks by name: `nox -s lint`, `core`, `full`, `docs`. Without a name: lint and core."""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "core"]
nox.options.reuse_existing_virtualenvs = True
PROJECT = nox.project.load_toml("pyproject.toml")
TESTS = "--config-settings=cmake.define.MIXEDKV_TESTS=ON"
FOLDER = "build/release"


@nox.session
def lint(session: nox.Session) -> None:
    """Check what needs no build."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("tests/lint/run", external=True)


@nox.session
def core(session: nox.Session) -> None:
    """Run README's tests."""
    session.install(".[test]", TESTS)
    session.run("ctest", "--test-dir", FOLDER, "-L", "core", "-j2", "--output-on-failure")


@nox.session
def full(session: nox.Session) -> None:
    """Run the tests of every change."""
    session.install(".[test]", TESTS)
    session.run("ctest", "--test-dir", FOLDER, "-LE", "nightly|bench", "-j2", "--output-on-failure")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site and check it."""
    session.install(*nox.project.dependency_groups(PROJECT, "docs"))
    session.run("python", "tests/lint/check_site.py")
