"""`mixedkv run`: writes the answer to stdout, and a line of numbers to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mixedkv.bundled import limits_of_the_model
from mixedkv.bundled.corpus import Recall, make_recall
from mixedkv.cli.model import (
    add_llama_arguments,
    add_sampling_arguments,
    image_encoder,
    open_model,
    quiet,
    sampling_options,
)
from mixedkv.cli.piped import read_piped, read_stdin
from mixedkv.cli.words import add, add_n_predict, add_switch, flags, is_model, take_words
from mixedkv.config import parse_kv
from mixedkv.kv.stats import KVStats, format_saving
from mixedkv.llama import Llama
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.model.named_model import find_model, is_of_hub
from mixedkv.sizes import format_bytes
from mixedkv.terminal import shown_on, with_prompt_bar

_DEMO_SEED, _DEMO_SENTENCES = 7, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Generate text: the answer to a question, or with --raw what follows a text. Without a prompt the "
        "bundled model is asked about a fact in a short journal."
    )
    add(parser, flags("model"), "MODEL", MODEL_HELP)
    add(parser, "words", "TEXT", "prompt; before it a model, as with -m, or only its file", nargs="*")
    add(parser, "-p --prompt", "TEXT", "the prompt, as an option")
    text = "append a text to the prompt; - is stdin, which is read unasked when it is a pipe or a file"
    add(parser, "-f --file", "FILE", text)
    add(parser, "--image", "FILE", "image to ask about; repeat for more", action="append", default=[])
    text = "continue the prompt as it is (default: a question, if the model has a chat template)"
    add_switch(parser, "--raw", text)
    add_n_predict(parser)
    add_llama_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> None:
    take_words(args)
    parse_kv(args.kv or "mixed")  # before a model is read
    args.text = _take_model(args)
    if args.text is not None and args.prompt is not None:
        raise ValueError("-p is not allowed with TEXT: give the prompt once")
    text = _read_prompt(args)
    demo = make_recall(_DEMO_SEED, _DEMO_SENTENCES, where=0.1) if text is None else None
    path = find_model(args.model)
    encoder = image_encoder(args, path)
    if args.image:
        _see(args, path, encoder, text or "")
        return
    with quiet(not args.verbose), open_model(path, args) as llm:
        if llm.fitted is not None and sys.stderr.isatty():
            print(llm.fitted, file=sys.stderr)
        if demo and sys.stderr.isatty():
            print(_introduce(demo), file=sys.stderr)
        if args.model is None and demo is None:
            print(f"mixedkv: warning: {limits_of_the_model()}", file=sys.stderr)
        options = {"max_tokens": args.n_predict, "stream": True, **sampling_options(args, path)}
        if demo and args.temp is None:
            options["temperature"] = 0.0  # the question has one right answer
        has_format = bool(args.chat_format) or "tokenizer.chat_template" in llm.metadata
        is_chat = not args.raw and has_format
        if not has_format and not args.raw:
            print(f"{path.name} is a base model: it continues your text", file=sys.stderr)
        prompt: str | list[dict[str, str]]
        if text is None:
            assert demo is not None
            prompt = demo.messages
        else:
            prompt = [{"role": "user", "content": text}] if is_chat else text
        clock = _Clock(llm)
        for chunk in clock.watch(with_prompt_bar(llm, _stream(llm, prompt, options))):
            print(shown_on(sys.stdout, chunk), end="", flush=True)
        print(flush=True)
        print(_summary(clock, llm.kv.stats()), file=sys.stderr)


def _take_model(args: argparse.Namespace) -> str | None:
    """Take the model that stands before the prompt, and return the prompt."""
    words = list(args.words)
    two = len(words) == 2 and is_of_hub(words[0])
    if args.model is None and words and (is_model(words[0]) or two):
        args.model = words.pop(0)
    if len(words) > 1:
        raise ValueError(f"{words[1]!r} is one argument too many: put quotes around a prompt with spaces")
    return words[0] if words else None


def _see(args: argparse.Namespace, path: Path, encoder: Path | None, text: str) -> None:
    """Answer a question about images."""
    if encoder is None:
        raise ValueError("--image: the model needs an image encoder: give it with --mmproj FILE")
    from mixedkv.cli.chat_images import ChatImages
    from mixedkv.engine import PromptCache, Tokenizer

    options = {"max_tokens": args.n_predict, **sampling_options(args, path)}
    question = {"role": "user", "content": text, "images": args.image}
    with quiet(not args.verbose), open_model(path, args, encoder) as llm:
        messages, images = ChatImages(llm, encoder).of([question])
        with PromptCache(llm, overflow="slide", tokenizer=Tokenizer(llm, args.chat_format)) as cache:
            answer = cache.stream(messages, images=images, **options)
            for chunk in with_prompt_bar(llm, answer, lambda: answer.evaluated):
                text = chunk["choices"][0]["delta"].get("content") or ""
                print(shown_on(sys.stdout, text), end="", flush=True)
        print(flush=True)
        stats = llm.kv.stats()
    assert answer.result is not None
    print(f"{answer.result.prompt_tokens} tokens; {_cache(stats)}", file=sys.stderr)


def _introduce(demo: Recall) -> str:
    return (
        f"The bundled model reads a journal of {len(demo.journal)} sentences. One of the first is\n"
        f"  {demo.fact.statement}\n"
        f"Then it is asked: {demo.fact.question}\n"
    )


def _read_prompt(args: argparse.Namespace) -> str | None:
    """Return TEXT or -p's, and after an empty line what -f names and what is piped in; None for the demo.

    Raises:
        ValueError: a model was named and nothing was given, or all that was given is empty.
        OSError: a file cannot be read.
    """
    prompt = args.text if args.prompt is None else args.prompt
    texts = [] if prompt is None else [prompt]
    if args.file not in (None, "-"):
        texts.append(_decoded(Path(args.file).read_bytes(), args.file))
    if args.file == "-":
        texts.append(_decoded(read_stdin(), "stdin"))
    elif (piped := read_piped(wait=bool(texts) or args.model is not None)) is not None:
        texts.append(_decoded(piped, "stdin"))
    if not texts:
        if args.model is None:
            return None
        raise ValueError(
            f"{args.model}: a model of your own needs a prompt: add TEXT or -f FILE, or pipe a text in"
        )
    if not (text := "\n\n".join(text for text in texts if text)):
        raise ValueError("the prompt is empty")
    return text


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a text in UTF-8 (byte {error.start}): convert it first") from None


def _stream(llm: Llama, prompt: str | list[dict[str, str]], options: dict[str, Any]) -> Iterator[str]:
    chunks: Any  # llama_cpp's chunks are typed dictionaries of several shapes
    if isinstance(prompt, str):
        chunks = llm.create_completion(prompt, **options)
        yield from (chunk["choices"][0]["text"] for chunk in chunks)
    else:
        messages: Any = prompt
        chunks = llm.create_chat_completion(messages, **options)
        yield from (chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


class _Clock:
    """Times the prompt and the text separately: the first chunk comes when the prompt is done."""

    def __init__(self, llm: Llama) -> None:
        self.llm = llm
        self.n_prompt = self.n_text = 0
        self.t_prompt = self.t_text = 0.0

    def watch(self, chunks: Iterator[str]) -> Iterator[str]:
        start = first = time.perf_counter()
        for chunk in chunks:
            if not self.n_prompt:
                self.n_prompt, first = self.llm.n_tokens, time.perf_counter()
            yield chunk
        self.t_prompt, self.t_text = first - start, time.perf_counter() - first
        self.n_text = self.llm.n_tokens - self.n_prompt


def _summary(clock: _Clock, stats: KVStats) -> str:
    return (
        f"prompt {_rate(clock.n_prompt, clock.t_prompt)}, text {_rate(clock.n_text, clock.t_text)} tok/s; "
        f"{_cache(stats)}"
    )


def _cache(stats: KVStats) -> str:
    return (
        f"cache {format_bytes(stats.bytes_total)}, {stats.bits_per_element:.2f} bits/element, "
        f"{format_saving(stats.saving)}"
    )


def _rate(n: int, seconds: float) -> str:
    if n <= 0 or seconds <= 0:
        return "-"
    return f"{n / seconds:.0f}" if n >= 10 * seconds else f"{n / seconds:.2g}"
