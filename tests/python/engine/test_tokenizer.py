"""Texts that are traps for llama.cpp's tokenizer: whatever a vocabulary cuts them with, the process lives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import pytest

from mixedkv import Llama
from mixedkv.engine.chat.tokenizer import Tokenizer
from mixedkv.errors import ContextLengthError, InvalidModelFileError
from mixedkv.prompts.long_text import MAX_STRETCH, OWN_SPLITTERS
from support.children.tokenize_child import LONG
from support.models import zoo

pytestmark = pytest.mark.full

# Where llama.cpp takes std::regex, which calls itself for each character: those that are widely used, ...
RECURSIVE = (
    "deepseek-v3",
    "deepseek-llm",
    "gpt-4o",
    "tekken",
    "minimax-m2",
    "seed-coder",
    "afmoe",
    "falcon",
    "default",
)
# ... and the others it knows.
OTHERS = (
    "bailingmoe",
    "bloom",
    "chameleon",
    "deepseek-coder",
    "exaone-moe",
    "gpt3-finnish",
    "granite-embed-multi-97m",
    "hunyuan-dense",
    "hy_v4",
    "jais-2",
    "joyai-llm",
    "minicpm5",
    "poro-chat",
    "spark2_5",
    "superbpe",
    "tiny_aya",
    "ufakzeka",
    "viking",
    "whitespace",
    "youtu",
)

# Runs that would take them hours: each character of one is followed to the run's end.
QUADRATIC = {"deepseek-llm": (" ", 1 << 12), "jais-2": (" ", 1 << 16), "superbpe": ("7", 1 << 12)}


def tokenize_in_child(folder: Path, n: int, names: Sequence[str]) -> None:
    command = [sys.executable, "-m", "support.children.tokenize_child", str(folder), str(n), *names]
    tests = Path(__file__).parents[1]
    result = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=900)
    last = result.stdout.splitlines()[-1:]
    assert (result.returncode, last) == (0, ["all"]), (last, result.stderr[-500:])


@pytest.mark.nightly
def test_a_long_run_of_a_character_has_tokens(tmp_path: Path) -> None:
    tokenize_in_child(tmp_path, 40_000, sorted(set(RECURSIVE) - QUADRATIC.keys()))
    tokenize_in_child(tmp_path, MAX_STRETCH, ["tekken"])


@pytest.mark.slow
def test_no_vocabulary_ends_the_process(tmp_path: Path) -> None:
    tokenize_in_child(tmp_path, MAX_STRETCH, sorted({*RECURSIVE, *OTHERS} - QUADRATIC.keys()))
    tokenize_in_child(tmp_path, LONG, sorted(OWN_SPLITTERS))


def test_a_line_that_no_stack_is_deep_enough_for_is_refused(tmp_path: Path) -> None:
    path = zoo.write_byte_vocabulary(tmp_path / "v.gguf", "tekken")
    with Llama(path, vocab_only=True, verbose=False) as llm:
        for run in (b"a", b" ", "\u3000\n".encode(), "\u4e2d".encode()):
            with pytest.raises(ValueError, match="tokenizer takes: break it with newlines"):
                llm.tokenize(run * (MAX_STRETCH + 1))
        text = b"a" * (MAX_STRETCH - 9) + b"\n"
        assert len(llm.tokenize(text * 3, add_bos=False)) == 3 * len(text)
    path = zoo.write_byte_vocabulary(tmp_path / "v.gguf", "llama-bpe")
    with Llama(path, vocab_only=True, verbose=False) as llm:
        assert len(llm.tokenize(b"a" * (MAX_STRETCH + 1), add_bos=False)) == MAX_STRETCH + 1


@pytest.mark.parametrize("pre", QUADRATIC)
def test_a_run_that_would_take_hours_is_refused(tmp_path: Path, pre: str) -> None:
    character, most = QUADRATIC[pre]
    run = (character * most).encode()
    path = zoo.write_byte_vocabulary(tmp_path / "v.gguf", pre)
    with Llama(path, vocab_only=True, verbose=False) as llm:
        assert len(llm.tokenize(b"a" + run + b"!", add_bos=False)) == most + 2
        with pytest.raises(ValueError, match=f"more than {most} characters like '{character}'"):
            llm.tokenize(b"a" + run + character.encode() + b"!")


def test_the_tokens_do_not_depend_on_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("Some text, with 123 numbers and\n\n  lines. " * 500).encode()
    for pre in RECURSIVE:
        path = zoo.write_byte_vocabulary(tmp_path / "v.gguf", pre)
        with Llama(path, vocab_only=True, verbose=False) as llm:
            assert llm.tokenize(text) == llama_cpp.Llama.tokenize(llm, text)


def test_a_vocabulary_without_byte_tokens_is_refused(tmp_path: Path) -> None:
    """llama.cpp throws through C where a text has a character that is not in it."""
    path = zoo.write_vocabulary(tmp_path / "v.gguf", "llama", ["\u2581", "the", "<0x00>"], all_bytes=False)
    with pytest.raises(InvalidModelFileError, match=r"no token for the byte 0x01.*with its byte tokens"):
        Llama(path, vocab_only=True, verbose=False)


def test_a_text_that_cannot_fit_the_context_is_not_read(tmp_path: Path) -> None:
    path = zoo.write_byte_vocabulary(tmp_path / "v.gguf", "tekken")
    with Llama(path, vocab_only=True, n_ctx=256, verbose=False) as llm:
        language, longest = Tokenizer(llm), len("<unk>")
        assert len(language.tokenize("a" * 256 * longest)) == 256 * longest + 1
        with pytest.raises(
            ContextLengthError,
            match=r"1281 bytes, which exceeds .*: 256 tokens of this model have 1280 at most",
        ):
            language.tokenize("a" * (256 * longest + 1))
        with pytest.raises(ContextLengthError, match="shorten it"):
            language.tokenize("\u00e9" * 10, n_ctx=3)
