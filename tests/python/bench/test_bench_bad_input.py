"""Requests that cannot be met: exit code 2, and a line that says what to change, before any measurement."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mixedkv.cli import main

SMALL = ["--kv", "q4_0", "--repeats", "1", "--n-prompt", "8", "--n-gen", "2", "--depths", "0"]


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
        (["speed", "--kv", "mixed:best"], "known keys"),
        (["speed", "--depths", "9000"], "use at most 7680"),
        (["speed", "--depths", "4096", "--n-ctx", "2048"], "beyond the context of 2048"),
        (["speed", "--depths", "0,x"], "'x' is not a whole number"),
        (["speed", "--depths", "-5"], "argument --depths"),
        (["speed", "--threads", "0"], "argument --threads"),
        (["speed", "--repeats", "0"], "argument --repeats"),
        (["taste"], "argument TEST: invalid choice"),
        (["streaming"], "--memory is missing"),
        (["streaming", "--stream-layers", "some"], "'some' is not a choice of layers"),
        (["memory", "--budget", "lots"], "'lots' is not a size"),
        (["quality", "--text", "no/such/file.txt"], "no/such/file.txt: No such file"),
        (["quality", "--kv", "mixed:budget=2GiB"], "a budget depends on the context"),
        (["sensitivity", "--kv", "q8_0"], "--kv q8_0: only a mixed cache can have a type for each layer"),
        (["sensitivity", "--bits", "3"], "--bits 3: use numbers from 3.25 to 8.5"),
        (["sensitivity", "--bits", "few"], "'few' is not numbers such as 5,6.5"),
        (["quality", "--n-ctx", "9"], "argument --n-ctx"),
        (["recall", "--n-ctx", "512"], "use 1024 or more"),
        (["speed", "-m", "no-model.gguf"], "no-model.gguf: No such file"),
        (["fleet", "--replicas", "0"], "argument --replicas"),
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
    assert "leave -m out" in refuse(capsys, "recall", "-m", str(zoo_path("llama-64")))


def test_plots_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be made" in refuse(capsys, "speed", "--plot", str(file))


def test_plots_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mixedkv[plot]'" in refuse(capsys, "speed", "--plot", str(tmp_path))


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mixedkv import atomic_write

    path = tmp_path / "out.json"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(atomic_write.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        atomic_write.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
