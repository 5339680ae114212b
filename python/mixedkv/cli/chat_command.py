"""`mixedkv chat`: a chat in the terminal, whose history can be kept and continued on another day."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from mixedkv.bundled import limits_of_the_model
from mixedkv.cli.chat_commands import ChatCommands, ChatHistory, SeveralLines
from mixedkv.cli.chat_terminal import StopSignal, markdown_shown, questions, show_markdown
from mixedkv.cli.model import (
    add_llama_arguments,
    add_sampling_arguments,
    image_encoder,
    open_model,
    quiet,
    sampling_options,
)
from mixedkv.cli.words import (
    add,
    add_n_predict,
    add_place,
    add_switch,
    duration,
    flags,
    gigabytes,
    one_model,
    take_words,
)
from mixedkv.config import parse_kv
from mixedkv.engine import Generation, PromptCache, Tokenizer
from mixedkv.errors import StoppedError
from mixedkv.images.prompt_image import PromptImage
from mixedkv.llama import Llama
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.model.named_model import find_model
from mixedkv.store import KVStore
from mixedkv.store.encryption import KeyCipher, KeySource, parse_key_source
from mixedkv.store.eviction import EVICTIONS
from mixedkv.terminal import printable, with_prompt_bar

if TYPE_CHECKING:
    from mixedkv.cli.chat_images import ChatImages

_KV = "kv"
_SHOWN = 6  # messages to show of a continued chat
_SHOWN_LINES = 6  # lines to show of each of its questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Talk to a model. On a terminal Ctrl-D ends the chat and Ctrl-C stops an answer. Piped input is a "
        "question a line, up to an empty one. /help lists commands, such as /undo and /save. With --history "
        "the next call goes on where this one ended, and evaluates nothing of it again."
    )
    add(parser, flags("model"), "MODEL", MODEL_HELP)
    add_place(parser, nargs="?")
    add(parser, "--history", "DIR", "folder of this chat: messages and their KV (default: none)")
    add(parser, "--key", "SOURCE", "encrypt --history with the key in env:NAME or file:PATH")
    add_switch(parser, "--new", "begin anew: forget the messages in --history")
    add(parser, "--system", "TEXT", "first message of a chat that begins")
    add_n_predict(parser, 512)
    add_llama_arguments(parser)
    add_sampling_arguments(parser)
    text = "most disk space for the KV in --history, in 10^9 bytes or as 20GiB (default: 8)"
    add(parser, "--max-kv-size-gb", "SIZE", text, gigabytes, default=8.0)
    parser.add_argument(
        "--eviction", choices=EVICTIONS, default="lru", help="which KV of --history leaves first"
    )
    add(parser, "--max-age", "TIME", "remove KV that was not used for this long, e.g. 30d, 12h", duration)
    add_switch(parser, "--plain", "show answers as they are written, markdown and all")
    parser.set_defaults(command=chat)


def chat(args: argparse.Namespace) -> None:
    take_words(args)
    parse_kv(args.kv or "mixed")  # before a model is read
    if args.new and args.history is None:
        raise ValueError("--new: there is no --history to forget")
    if args.key and args.history is None:
        raise ValueError("--key: there is no --history to encrypt")
    key = parse_key_source(args.key) if args.key else None
    args.model = one_model(args)
    path = find_model(args.model)
    folder = Path(args.history) if args.history is not None else None
    history = ChatHistory(folder, args.new, KeyCipher(key) if key is not None else None)
    if history.encrypted_now:
        _print_note("the messages were kept in plain text: they are encrypted now")
    if not (args.chat_format or "tokenizer.chat_template" in read_model_file(path).metadata):
        raise ValueError(
            f"{path.name} is a base model, not tuned for chat. Make it continue a text with "
            "`mixedkv run`, or chat all the same with --chat-format chatml"
        )
    if args.model is None:
        _print_note(limits_of_the_model())
    encoder = image_encoder(args, path)
    if encoder is None and any(message.get("images") for message in history.messages):
        raise ValueError("this chat has images: give the model's image encoder with --mmproj FILE")
    options = {"max_tokens": args.n_predict, **sampling_options(args, path)}
    with quiet(not args.verbose), ExitStack() as stack:
        llm = stack.enter_context(open_model(path, args, encoder))
        store = stack.enter_context(_store(history, args, key))
        images: ChatImages | None = None
        if encoder is not None:
            from mixedkv.cli.chat_images import ChatImages

            images = ChatImages(llm, encoder)
        tokenizer = Tokenizer(llm, args.chat_format)
        cache = stack.enter_context(PromptCache(llm, store, overflow="slide", tokenizer=tokenizer))
        _talk(llm, cache, images, history, args, options)


def _talk(
    llm: Llama,
    cache: PromptCache,
    images: ChatImages | None,
    history: ChatHistory,
    args: argparse.Namespace,
    options: dict[str, Any],
) -> None:
    if history.messages:
        _show(history.messages, args.plain)
    elif args.system:
        history.add({"role": "system", "content": args.system})
    if sys.stdin.isatty() and sys.stderr.isatty():
        name = Path(llm.model_path).name
        what = str(llm.fitted or f"{llm.n_ctx():,} tokens, {args.kv or 'mixed'}")
        _print_note(f"{name}, {what}; /? lists commands, Ctrl-D ends")
    took = ""
    read = images.read if images is not None else None
    commands = ChatCommands(llm, history, lambda: took, read, options)
    for text in _questions(history):
        if commands.ends(text):
            return
        if (again := commands.again(text)) is not None:
            before, question = again
        elif (told := commands.run(text)) is not None:
            _print_note(told)
            continue
        else:
            before, question = history.messages, {"role": "user", "content": text, **commands.take_images()}
        begin = time.perf_counter()
        result, stopped = _answer(llm, cache, images, [*before, question], args.plain, options)
        if result is not None and (result.text or not stopped):
            if again is not None:
                history.replace(before)
            history.add(question, result.message)
            took = _took(result, time.perf_counter() - begin)
            _print_note(("stopped; " if stopped else "") + took)
        else:
            kept = "the former answer stays" if again is not None else "the question is not kept"
            _print_note(f"stopped before the answer began: {kept}")
        if stopped and not sys.stdin.isatty():
            raise KeyboardInterrupt


def _show(messages: list[dict[str, Any]], plain: bool) -> None:
    """Tell how long a continued chat is, and on a terminal show its end."""
    _print_note(f"{len(messages)} messages so far")
    if sys.stdin.isatty() and sys.stderr.isatty():
        for message in messages[-_SHOWN:]:
            if message["role"] == "user":
                print(f"> {printable(_beginning(message['content']))}", file=sys.stderr)
            else:
                show_markdown(message["content"], sys.stderr, plain)


def _beginning(text: str) -> str:
    """Return the first lines of a question."""
    lines = text.splitlines()
    if len(lines) <= _SHOWN_LINES:
        return text
    return "\n".join([*lines[:_SHOWN_LINES], f"... ({len(lines) - _SHOWN_LINES} more lines)"])


def _answer(
    llm: Llama,
    cache: PromptCache,
    images: ChatImages | None,
    messages: Sequence[Mapping[str, Any]],
    plain: bool,
    options: dict[str, Any],
) -> tuple[Generation | None, bool]:
    """Print an answer, and return it and whether Ctrl-C stopped it."""
    shown: Sequence[PromptImage] = ()
    if images is not None:
        messages, shown = images.of(messages)
    thinks = False
    with StopSignal(llm) as stop:
        with (
            cache.stream(messages, images=shown, **options) as answer,
            markdown_shown(sys.stdout, plain) as show,
            suppress(StoppedError),
        ):
            for chunk in with_prompt_bar(llm, answer, lambda: answer.evaluated):
                delta = chunk["choices"][0]["delta"]
                if thinks and delta.get("content"):
                    show("\n\n")
                thinks = bool(delta.get("reasoning_content"))
                show(delta.get("content") or delta.get("reasoning_content") or "")
                if stop.came:
                    break
        return answer.result, stop.came


def _questions(history: ChatHistory) -> Iterator[str]:
    if sys.stdin.isatty() and sys.stderr.isatty():
        return questions([message["content"] for message in history.messages if message["role"] == "user"])
    return _piped_questions()


def _piped_questions() -> Iterator[str]:
    """Yield a question for each line up to an empty one, and for the lines between two marks."""
    several = SeveralLines()
    for line in sys.stdin:
        text = several.add(line.rstrip("\n") if several.is_open else line.strip())
        if text is None:
            continue
        if not text:
            return
        yield text
    if several.is_open:
        raise ValueError('standard input ends within a question that began with """: end it with """')


def _took(result: Generation, seconds: float) -> str:
    where = {"ram": " (from memory)", "disk": " (from disk)", "remote": " (from the remote)"}.get(
        result.tier, ""
    )
    first = result.ttft_ms / 1000
    text = (
        f"{result.prompt_tokens} tokens: {result.cached} from cache{where}, "
        f"{result.evaluated} evaluated; first token after {first:.2f} s"
    )
    if result.completion_tokens > 1 and seconds > first:
        text += f", then {(result.completion_tokens - 1) / (seconds - first):.0f} tok/s"
    return f"{text}; {result.dropped} dropped" if result.dropped else text


def _print_note(text: str) -> None:
    """Print a message of the program, which is dim on a terminal."""
    text = text if "\n" in text else f"[{text}]"
    Console(file=sys.stderr).print(Text(text, "dim"), soft_wrap=True)


def _store(history: ChatHistory, args: argparse.Namespace, key: KeySource | None) -> KVStore:
    if history.folder is None:
        return KVStore(None)
    return KVStore(
        history.folder / _KV,
        max_kv_size_gb=args.max_kv_size_gb,
        eviction=args.eviction,
        max_age_seconds=args.max_age,
        key=key,
    )
