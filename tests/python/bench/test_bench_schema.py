"""The lines of JSON: their documentation, and that bad ones are told from good ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mixedkv_bench.catalog import ROWS
from mixedkv_bench.output import RunHead, read_result
from schema_page import page
from support import REPOSITORY
from support.bench import run

pytestmark = pytest.mark.full

DOCS = REPOSITORY / "docs" / "bench-schema.md"


def test_the_documentation_is_that_of_the_models() -> None:
    """After a change: python docs/tools/schema_page.py > docs/bench-schema.md"""
    assert DOCS.read_text() == page()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "result.json"
    small = ["--depths", "0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2"]
    run(path, "speed", "--kv", "q4_0", *small)
    return path


def test_the_first_line_says_where_it_comes_from(result: Path) -> None:
    head, _ = read_result(result)
    assert head.schema_ == "mixedkv.bench/2"
    assert head.cores >= 1
    assert len(head.llama_commit) >= 9
    assert head.n_layer == 6
    assert "/" not in head.file


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        ({"depth": "0"}, "speed.depth", "int_type"),
        ({"colour": "red"}, "speed.colour", "extra_forbidden"),
        ({"kv": None}, "speed.kv", "string_type"),
        ({"test": "taste"}, "", "union_tag_invalid"),
    ],
)
def test_what_is_wrong_with_a_row_is_found(
    result: Path, change: dict[str, object], where: str, problem: str
) -> None:
    (row,) = read_result(result)[1]
    with pytest.raises(ValidationError) as caught:
        ROWS.validate_python({**row.as_json(), **change})
    (error,) = caught.value.errors()
    assert (".".join(map(str, error["loc"])), error["type"]) == (where, problem)


def test_another_schema_is_refused(result: Path) -> None:
    head, _ = read_result(result)
    with pytest.raises(ValidationError, match="schema"):
        RunHead.model_validate({**head.as_json(), "schema": "other/1"})
