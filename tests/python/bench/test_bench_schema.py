"""The JSON object: its documentation, and that bad objects are told from good ones."""

from __future__ import annotations

import copy

import pytest
from pydantic import ValidationError

from mixedkv_bench.catalog import Document
from support import REPOSITORY
from support.bench_support import run
from support.tools.schema_page import page

DOCS = REPOSITORY / "docs" / "bench-schema.md"


def test_the_documentation_is_that_of_the_models() -> None:
    """After a change: python tests/python/support/tools/schema_page.py > docs/bench-schema.md"""
    assert DOCS.read_text() == page()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "result.json"
    return run(
        path, "speed", "--kv", "q4_0", "--depths", "0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2"
    )


def test_the_object_says_where_it_comes_from(result: dict) -> None:
    assert result["schema"] == "mixedkv.bench/1"
    assert result["machine"]["cores"] >= 1
    assert len(result["versions"]["llama_commit"]) >= 9
    assert result["model"]["n_layer"] == 6
    assert "/" not in result["model"]["file"]


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        (lambda data: data.pop("rows"), "rows", "missing"),
        (lambda data: data.update(schema="other/1"), "schema", "literal_error"),
        (lambda data: data["rows"][0].update(depth="0"), "rows.0.speed.depth", "int_type"),
        (lambda data: data["rows"][0].update(colour="red"), "rows.0.speed.colour", "extra_forbidden"),
        (lambda data: data["rows"][0].pop("kv"), "rows.0.speed.kv", "missing"),
        (lambda data: data["rows"][0].update(test="taste"), "rows.0", "union_tag_invalid"),
        (lambda data: data["machine"].pop("cpu"), "machine.cpu", "missing"),
    ],
)
def test_what_is_wrong_is_found(result: dict, change, where: str, problem: str) -> None:
    data = copy.deepcopy(result)
    change(data)
    with pytest.raises(ValidationError) as caught:
        Document.model_validate(data)
    (error,) = caught.value.errors()
    assert (".".join(map(str, error["loc"])), error["type"]) == (where, problem)
