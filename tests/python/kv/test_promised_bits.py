"""What `KVStats.bits_problem` promises of a cache, a model and a body of the kernels holds for any cut of a
prompt, and the guarantees page has the table that was measured (docs/tools/bits_table.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import bits_table
from bits_table import BODIES, Row, all_rows, measured, usual_rows, wrong
from mixedkv import Llama
from mixedkv.bundled import model_path

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[3] / "docs" / "server-guarantees.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of all types of weights."""
    return tmp_path_factory.mktemp("bits")


def check(rows: list[Row]) -> None:
    if not rows:
        pytest.skip("this machine cannot run it")
    assert wrong(rows) == []
    # it can fail: where llama.cpp attends, some cut has other bits
    assert any(row.problem and not row.same for row in rows)


@pytest.mark.parametrize("body", BODIES)
def test_what_is_promised_holds_on_each_body(body: str, folder: Path) -> None:
    check(measured(body, usual_rows(), folder))


@pytest.mark.nightly
@pytest.mark.parametrize("body", BODIES)
def test_what_is_promised_holds_with_each_type_of_weights(body: str, folder: Path) -> None:
    check(measured(body, all_rows(), folder))


@pytest.mark.parametrize("body", BODIES)
def test_q4_k_m_is_promised_on_each_body(body: str, folder: Path) -> None:
    rows = measured(
        body,
        [Row("", "Q4_K_M", kv) for kv in ("mixed", "mixed:attention=merged")],
        folder,
    )
    check(rows)
    assert body == "neon" or not rows[0].problem


def promised(rows: list[Row]) -> dict[tuple[str, str], bool]:
    return {(row.weights, row.kv): not row.problem for row in rows if not row.model}


def test_the_page_has_the_promises_of_each_body(folder: Path) -> None:
    """A line of its table: | weights | `cache` | a cell for each body in the heading |."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line] for line in lines]
    bodies = next(line[2:] for line in table if line[:2] == ["weights", "cache"])
    told = {(line[0], line[1].strip("`")): line[2:] for line in table if line[0] in bits_table.WEIGHTS}
    asked = [Row("", weights, kv) for weights, kv in told]
    assert {(row.weights, row.kv) for row in usual_rows() if not row.model} <= set(told)
    for at, body in enumerate(bodies):
        for key, holds in promised(measured(body, asked, folder, n_prompts=1)).items():
            assert (told[key][at] == "same bits") == holds, (body, key)


def test_a_context_says_whether_its_answers_have_the_same_bits() -> None:
    with Llama(model_path(), kv="f16", n_ctx=256, verbose=False) as llm:
        stats = llm.kv.stats()
        assert not stats.same_bits
        assert "llama.cpp's attention" in stats.bits_problem
        told = " ".join(str(stats).split())  # in lines of 80 columns
        assert f"other bits for other cuts of a prompt: {stats.bits_problem}" in told


def test_the_table_has_a_line_for_each_row() -> None:
    row = Row("", "Q4_1", "mixed", "avx2", n_differing=0, n_cuts=5)
    broken = Row("", "Q4_1", "mixed", "amx", n_differing=3, n_cuts=5)
    text = bits_table.markdown({"avx2": [row], "amx": [broken], "neon": []})
    assert text.splitlines()[2] == "| Q4_1 | `mixed` | same bits | BROKEN: 3 of 5 |"
    assert len(wrong([row, broken])) == 1
