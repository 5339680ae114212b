"""What the engine exports is little, and all that its users take of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tests/lint"))
from check_modules import ENGINE, MOST_EXPORTS, beyond, check, exported

pytestmark = pytest.mark.full


def test_the_engine_exports_few_names_that_are_there() -> None:
    import mixedkv.engine

    assert sorted(exported((REPOSITORY / ENGINE).read_text("utf-8"))) == mixedkv.engine.__all__
    assert len(mixedkv.engine.__all__) <= MOST_EXPORTS
    assert all(hasattr(mixedkv.engine, name) for name in mixedkv.engine.__all__)


def test_users_of_the_engine_take_what_it_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert not [problem for problem in check([Path("python/mixedkv")]) if " takes " in problem]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from mixedkv.engine.jobs.job import Job", "mixedkv.engine.jobs.job"),
        ("from mixedkv.engine import Engine, jobs", "jobs"),
        ("import mixedkv.engine.inbox", "mixedkv.engine.inbox"),
    ],
)
def test_what_is_taken_beyond_is_found(
    line: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "server.py").write_text(f"def late() -> None:\n    {line}\n")
    (problem,) = check([tmp_path])
    assert problem.endswith(f"server.py:2 takes {name}: use what mixedkv.engine exports, or export it")


def test_an_export_too_many_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / ENGINE
    package.parent.mkdir(parents=True)
    package.write_text("".join(f"from engine import e{i} as e{i}\n" for i in range(MOST_EXPORTS + 1)))
    monkeypatch.chdir(tmp_path)
    assert check([]) == [f"{ENGINE} exports 26 names, more than 25: its users need fewer"]


def test_names_that_are_exported_may_be_taken() -> None:
    assert not beyond(
        "from mixedkv.engine import Engine\nfrom mixedkv.work.turns import Limits\n", ["Engine"]
    )
