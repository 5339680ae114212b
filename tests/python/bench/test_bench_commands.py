"""The commands of `mixedkv bench` that the pages show, and what each test's help says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mixedkv.cli.main import make_parser
from mixedkv_bench.arguments import COMMON
from mixedkv_bench.catalog import TESTS

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
COMMAND = re.compile(r"mixedkv bench ([a-z]+ -[^`\n#;|]*)")  # one with flags


def commands(page: Path) -> list[str]:
    """Commands in full; `$x` and `...` stand for some text."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`\n]+\n[^`\n]+`", lambda inline: inline[0].replace("\n", " "), text)
    return [found[1].strip() for found in COMMAND.finditer(text)]


SHOWN = [pytest.param(each, id=f"{page.stem}-{i}") for page in PAGES for i, each in enumerate(commands(page))]


def test_there_are_some() -> None:
    assert len(SHOWN) > 20


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_of_a_page_is_one(command: str) -> None:
    args = make_parser().parse_args(["bench", *shlex.split(command)])
    assert args.test == command.split()[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_that_a_page_names_exist(page: Path) -> None:
    for script in re.findall(
        r"tests/(?:measure|python/support)/[\w/]+\.py", page.read_text(encoding="utf-8")
    ):
        assert (ROOT / script).is_file(), script


@pytest.mark.parametrize("name", TESTS)
def test_the_help_of_a_test_has_its_flags_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["bench", name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert set(re.findall(r"^  (?:-m MODEL, )?(--[a-z-]+)", out, re.M)) == {*COMMON, *TESTS[name].flags}
    assert TESTS[name].measures in " ".join(out.split())


def test_a_flag_of_another_test_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["bench", "quality", "--depths", "3"])
    assert end.value.code == 2
    assert "there is no option --depths" in capsys.readouterr().err
