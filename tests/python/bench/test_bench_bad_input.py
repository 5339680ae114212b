"""Requests that cannot be met: exit code 2, and a line that says what to change, before any measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixedkv.bundled import model_path
from mixedkv.cli import main
from mixedkv.model.packaged_model import write_f16

pytestmark = pytest.mark.full


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a run that must be refused."""
    try:
        code = main(["bench", *arguments])
    except SystemExit as end:  # argparse
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("mixedkv: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed", "--kv", "q3"], "kv='q3' names no cache: use one of"),
        (["speed", "--kv", "mixed:window=3"], "unknown key 'window'"),
        (["speed", "--kv", "mixed:best"], "neither a preset"),
        (["speed", "--depths", "9000"], "use at most 7680"),
        (["speed", "--depths", "0,x"], "'x' is not a whole number"),
        (["speed", "--depths", "-5"], "argument --depths"),
        (["speed", "--threads", "0"], "argument --threads"),
        (["speed", "--repeats", "0"], "argument --repeats"),
        (["taste"], "there is no command"),
        (["quality", "--text", "no/such/file.txt"], "no/such/file.txt: No such file"),
        (["quality", "--kv", "mixed:budget=2GiB"], "a budget depends on the context"),
        (["sensitivity", "--kv", "q8_0"], "--kv q8_0: only a mixed cache can have a type for each layer"),
        (["sensitivity", "--bits", "3"], "--bits 3: use numbers from 3.25 to 8.5"),
        (["sensitivity", "--bits", "few"], "'few' is not numbers such as 5,6.5"),
        (["quality", "--n-ctx", "9"], "argument --n-ctx"),
        (["quality", "--task", "recall", "--n-ctx", "512"], "use 1024 or more"),
        (["speed", "-m", "no-model.gguf"], "no-model.gguf: No such file"),
        (["speed", "--json", "no/such/folder/out.json"], "cannot be written"),
        (["speed", "--json", "."], "is a directory"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in refuse(capsys, *arguments)


def test_a_text_too_short_for_the_context(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("Ada's kite is red.")
    message = refuse(capsys, "quality", "--text", str(text), "--n-ctx", "256")
    assert "a context of 256 needs" in message
    assert "longer --text or a smaller --n-ctx" in message


def test_a_text_that_is_no_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "image.png"
    text.write_bytes(b"\x89PNG\xff\xfe")
    assert "is not UTF-8 text" in refuse(capsys, "quality", "--text", str(text))


def test_recall_of_a_model_that_was_not_taught(capsys: pytest.CaptureFixture[str], zoo_path) -> None:
    assert "leave -m out" in refuse(capsys, "quality", "--task", "recall", "-m", str(zoo_path("llama-64")))


def test_weights_in_f16_have_no_products_to_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f16.gguf"
    write_f16(model_path(), path)
    assert "its weights are not quantised" in refuse(capsys, "products", "-m", str(path))
