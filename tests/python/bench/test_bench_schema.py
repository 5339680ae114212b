"""The JSON object: its documentation, and that bad objects are told from good ones."""

from __future__ import annotations

import copy

import pytest

from mixedkv.bench.output import schema
from support import REPOSITORY
from support.bench_support import run

DOCS = REPOSITORY / "docs" / "bench-schema.md"


def test_every_field_is_documented() -> None:
    text = DOCS.read_text()
    assert schema.SCHEMA in text
    nested = [*schema.ITEMS.values(), schema.AGREEMENT, schema.MACHINE, schema.VERSIONS, schema.MODEL]
    fields = {key for part in (schema.OBJECT, *schema.ROWS.values(), *nested) for key in part}
    missing = [key for key in sorted(fields) if f"`{key}`" not in text]
    assert missing == []


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "result.json"
    return run(
        path, "speed", "--kv", "q4_0", "--depths", "0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2"
    )


def test_the_object_says_where_it_comes_from(result: dict) -> None:
    assert result["schema"] == schema.SCHEMA
    assert result["machine"]["cores"] >= 1
    assert len(result["versions"]["llama_commit"]) >= 9
    assert result["model"]["n_layer"] == 6
    assert "/" not in result["model"]["file"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data.pop("rows"), "lacks rows"),
        (lambda data: data.update(schema="other/1"), "other/1"),
        (lambda data: data["rows"][0].update(depth="0"), "depth='0' has the wrong type"),
        (lambda data: data["rows"][0].update(colour="red"), "unknown field colour"),
        (lambda data: data["rows"][0].pop("kv"), "lacks kv"),
        (lambda data: data["rows"][0].update(test="taste"), "no known test"),
        (lambda data: data["machine"].pop("cpu"), "lacks cpu"),
    ],
)
def test_what_is_wrong_is_found(result: dict, change, problem: str) -> None:
    data = copy.deepcopy(result)
    change(data)
    found = schema.problems(data)
    assert len(found) == 1
    assert problem in found[0]
