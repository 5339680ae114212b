"""llama.cpp's own tests of llama-server pass with this server in its place, but for those that are listed."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from mixedkv.cli.main import make_parser
from mixedkv.cli.words import unknown
from support.clients.llama_server.exceptions import EXCEPTIONS, FILES, known
from support.clients.llama_server.suite import compare, files, run, unpack

pytestmark = pytest.mark.full

_MOST_OF_OURS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-server")
    unpack(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES)
def test_what_fails_is_listed_and_the_rest_passes(folder: Path, file: str) -> None:
    found = run(folder, file)
    compared = compare(found, file)
    assert compared.as_expected, (compared, (folder / f"{file}.log").read_text()[-20_000:])


@pytest.mark.nightly
def test_there_are_no_other_files(folder: Path) -> None:
    assert files(folder / "llama.cpp") == sorted(FILES)


@pytest.mark.nightly
def test_no_option_of_llama_server_gets_a_hint_at_another(folder: Path) -> None:
    text = (folder / "llama.cpp/tools/server/README.md").read_text("utf-8")
    lines = re.findall(r"^\| `(-.+?)` \|", text, re.M)
    names = {
        name for line in lines for name in re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", line.split("`")[0])
    }
    assert len(names) > 300
    parser = make_parser()
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    serve = commands.choices["serve"]
    serve.add_arguments()
    taken = set(serve._option_string_actions)
    hinted = {name for name in names - taken if "did you mean" in unknown([name], taken, serves=True)}
    assert not hinted


def test_few_are_left_to_be_mended() -> None:
    assert sum(len(each.tests) for each in EXCEPTIONS if each.kind == "ours") <= _MOST_OF_OURS
    names = [name for each in EXCEPTIONS for name in each.tests]
    assert len(names) == len(set(names))
    assert {name.split("::")[0] for name in names} <= set(FILES)
    for each in EXCEPTIONS:
        assert all(known(name.removesuffix("*")) is not None for name in each.tests)


def test_a_test_that_begins_to_fail_or_to_pass_is_found() -> None:
    name = next(name for each in EXCEPTIONS for name in each.tests if not name.endswith("*"))
    file = name.split("::")[0]
    others = {test: "failed" for each in EXCEPTIONS for test in each.tests if test.startswith(f"{file}::")}
    others = {test.removesuffix("*"): how for test, how in others.items()}
    assert compare(others, file).as_expected
    assert compare({**others, name: "passed"}, file).gone == [name]
    assert compare({**others, f"{file}::test_new": "failed"}, file).new == [f"{file}::test_new"]
    assert compare({**others, f"{file}::test_new": "skipped"}, file).as_expected
