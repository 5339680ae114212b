"""How far a model and a prompt are, and Ctrl-C meanwhile."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama, terminal
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.model.gguf_file import read_model_file
from mixedkv_server.engines import load_model
from mixedkv_server.models import served_models
from mixedkv_server.settings import ServerSettings
from support.models.random_model import RandomModel
from support.patience import PATIENCE, wait_for

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loading") / "m.gguf"
    RandomModel(n_layer=4, n_embd=256, n_head=4, n_head_kv=1, head_size=64, n_ff=512, kind="q4_0").write(path)
    return path


@pytest.mark.parametrize("options", [{}, {"stream_layers": 2}, {"stream_mode": "resident"}])
def test_a_load_says_how_far_it_is(model: Path, options: dict[str, Any]) -> None:
    shares: list[float] = []
    with Llama(model, n_ctx=256, kv="f16", verbose=False, progress=shares.append, **options) as llm:
        assert len(shares) > 2
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        llm.eval([3, 4])
        assert llm.evaluated == (2, 2)


def test_what_progress_raises_ends_the_load(model: Path) -> None:
    def stop(share: float) -> None:
        raise LookupError(f"enough at {share:.0f}")

    with pytest.raises(LookupError, match="enough at 0"):
        Llama(model, n_ctx=256, verbose=False, progress=stop)


def test_ctrl_c_ends_a_load(model: Path) -> None:
    """The signal is there when llama.cpp asks, as it is when it comes while weights are read."""
    calls: list[float] = []

    def interrupt(share: float) -> None:
        calls.append(share)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Llama(model, n_ctx=256, verbose=False, progress=interrupt)
    assert len(calls) == 1
    with Llama(model, n_ctx=256, verbose=False) as llm:  # and the next one is whole
        llm.eval([3])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_long_prompt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(terminal, "_EVERY", 0.01)
    monkeypatch.setattr(terminal, "_LATE", 0.0)
    with Llama(model, n_ctx=512, n_batch=32, kv="f16", verbose=False, stream_layers=4) as llm:

        def chunks() -> Iterator[str]:
            llm.eval([3] * 320)
            wait_for(lambda: re.search(r"prompt: 100%.*layer \d of the 4 that are read", shown.getvalue()))
            yield "a"
            yield "b"

        assert list(terminal.with_prompt_bar(llm, chunks())) == ["a", "b"]
    monkeypatch.setattr(sys, "stderr", silent := io.StringIO())
    with Llama(model, n_ctx=256, kv="f16", verbose=False) as llm:
        assert list(terminal.with_prompt_bar(llm, iter("c"))) == ["c"]
    assert silent.getvalue() == ""


def test_ctrl_c_ends_the_command() -> None:
    options = [
        "-m",
        str(model_path()),
        "--stream-layers",
        "2",
        "--n-ctx",
        "8192",
        "--raw",
        "-p",
        make_recall(seed=53_001, n_sentences=12).text,
        "-n",
        "8000",
    ]
    command = [sys.executable, "-m", "mixedkv", "run", *options]
    # what it writes does not fit a small pipe: it cannot end before that is read
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pipesize": 4096}
    child = subprocess.Popen(command, bufsize=0, **pipes)
    assert child.stdout is not None
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("given", "n_batch"),
    [
        ({"stream_layers": "2"}, 2048),
        ({"stream_layers": "2", "n_ctx": 1024}, 1024),
        ({"stream_layers": "2", "n_batch": 64}, 64),
        ({"n_batch": 64}, 64),
        ({}, 512),
    ],
)
def test_a_server_reads_prompts_in_large_steps(model: Path, given: dict[str, Any], n_batch: int) -> None:
    settings = ServerSettings(**{"model": (str(model),), "kv": "f16", "parallel": 1, "n_ctx": 4096, **given})
    (served,) = served_models(settings)
    with load_model(settings, served, read_model_file(model), True, None) as llm:
        assert (llm.n_batch, llm.context_params.n_ubatch) == (n_batch, n_batch)


def test_a_text_that_never_comes_to_a_character_ends(model: Path) -> None:
    """Random weights may say the first byte of a character again and again."""

    def begins_a_character(_: object, scores: Any) -> Any:
        scores[3 + 0xE2] = 1e9
        return scores

    with Llama(model, n_ctx=64, kv="f16", verbose=False) as llm:
        options: dict[str, Any] = {"max_tokens": 4, "logits_processor": [begins_a_character]}
        (*_, last) = llm.create_completion("e", stream=True, **options)
        assert last["choices"][0]["finish_reason"] == "length"
        assert llm.n_tokens == len(llm.tokenize(b"e")) + 4 + 3 - 1  # the last one is not evaluated
        assert len(list(zip(llm.generate([1, 5]), range(20), strict=False))) == 20  # it was for that text
