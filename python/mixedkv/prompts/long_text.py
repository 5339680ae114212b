"""Long texts for llama.cpp's tokenizer, which would end the process over some of them.

Where llama.cpp has no splitter of its own for a vocabulary's pre-tokenizer it takes std::regex, which calls
itself for each character of a match: 321 bytes of stack in a release build, so 26,000 letters in a row end
the process (https://github.com/ggml-org/llama.cpp/issues/27783). Cutting them would change their tokens.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

MAX_STRETCH = 1 << 18  # characters that a pattern can match at once, as far as can be told from outside
_STACK_PER_CHARACTER = 1024  # a match may span two stretches
_STACK_FOR_ALL = 1 << 20
_ANY_THREAD = 1 << 12  # characters that the stack of any thread has room for
_AT_A_TIME = threading.Semaphore(2)  # a stretch of the greatest length takes 84 MB
_SIZING = threading.Lock()

# `tokenizer.ggml.pre` of what llama.cpp splits without std::regex, or with matches of a few characters.
OWN_SPLITTERS = frozenset({
    "a.x-4.0", "chatglm-bpe", "codeshell", "command-r", "dbrx", "deepseek-r1-qwen", "exaone", "exaone4",
    "f2llmv2", "falcon-h1", "falcon3", "gemma4", "gigachat", "glm4", "glm5", "gpt-2", "granite-docling",
    "granite-embed-multi-311m", "grok-2", "hunyuan", "jais", "jina-de", "jina-es", "jina-v1-en",
    "jina-v2-code", "jina-v2-de", "jina-v2-es", "jina-v5-nano", "kimi-k2", "kormo", "laguna", "lfm2",
    "llama-bpe", "llama-v3", "llama3", "megrez", "mellum", "mellum2", "midm-2.0", "minerva-7b", "modern-bert",
    "mpt", "olmo", "phi-2", "pixtral", "qwen2", "qwen35", "refact", "roberta-bpe", "sarvam-moe", "smaug-bpe",
    "smollm", "solar-open", "stablelm2", "starcoder", "trillion",
})  # fmt: skip

# Where llama.cpp's pattern reads a run to its end at each of its characters: what it is a run of, and how
# many of them take a second or two.
_QUADRATIC = {"superbpe": (r"\d", 1 << 12), "deepseek-llm": (r"\s", 1 << 12), "jais-2": (r"\s", 1 << 16)}

# A line with the white space before it and the newlines after it: no pattern matches beyond the next one's.
_STRETCH = re.compile(r"\s*[^\r\n]*[\r\n]*")
_WHITE_SPACE = re.compile(  # in UTF-8
    rb"(?:[\t-\r ]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)+"
)


def tokenize(pre: str, text: bytes, tokenizer: Callable[[bytes], list[int]]) -> list[int]:
    """Return the tokens of a text, on a stack that is deep enough.

    Args:
        pre: name of the pre-tokenizer, "" for a vocabulary without.
        tokenizer: gives them on the stack it is called on.

    Raises:
        ValueError: no stack would be.
    """
    if pre == "whitespace":  # two in a row fail an assertion in llama.cpp; the model knows words only
        text = _WHITE_SPACE.sub(b" ", text)
    if not pre or pre in OWN_SPLITTERS or len(text) <= _ANY_THREAD:
        return tokenizer(text)
    if pre in _QUADRATIC:
        _check_runs(text, *_QUADRATIC[pre])
    if len(text) > MAX_STRETCH:
        _check_stretches(text)
    stack = _STACK_FOR_ALL + _STACK_PER_CHARACTER * min(len(text), MAX_STRETCH)
    with _AT_A_TIME:
        return _on_stack_of(stack, partial(tokenizer, text))


def _check_stretches(text: bytes) -> None:
    for stretch in _STRETCH.finditer(text.decode("utf-8", "replace")):
        if (n := stretch.end() - stretch.start()) > MAX_STRETCH:
            raise ValueError(
                f"a line of {n} characters is more than the {MAX_STRETCH} that this model's tokenizer takes: "
                f"break it with newlines"
            )


def _check_runs(text: bytes, of: str, most: int) -> None:
    runs = re.finditer(f"{of}+", text.decode("utf-8", "replace"))  # each is read once, whatever its length
    if run := next((run for run in runs if run.end() - run.start() > most), None):
        raise ValueError(
            f"more than {most} characters like {run[0][0]!r} in a row, from character {run.start()}: "
            f"this model's tokenizer takes hours over such runs, break them up"
        )


def _on_stack_of(size: int, call: Callable[[], list[int]]) -> list[int]:
    result: Future[list[int]] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="mixedkv-tokenizer")
    with _SIZING:
        before = threading.stack_size(size + -size % 65536)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    try:
        return result.result()
    finally:
        thread.join()  # an interrupt does not leave it behind with a model that is closed
