"""Opens the model of `mixedkv run` and `mixedkv chat`, which generate text themselves."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mixedkv.cli.words import (
    add,
    add_switch,
    add_words,
    between,
    flags,
    integer,
    last_n,
    layer_count,
    layers,
    length,
    memory,
    positive,
    temperature,
    tokens,
    whole,
)
from mixedkv.config.mixed import HELP as KV_HELP
from mixedkv.limits import RANGES
from mixedkv.llama import Llama
from mixedkv.model.encoder import encoder_beside, encoder_bytes
from mixedkv.model.fit import Beside
from mixedkv.model.gguf_file import default_n_ctx, read_model_file
from mixedkv.model.named_model import is_of_hub
from mixedkv.model.sampling_defaults import sampling_defaults
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.native.chat_formats import chat_formatter, format_name
from mixedkv.nearest_word import did_you_mean
from mixedkv.prompts.content_marks import CONTENT_TOKENS
from mixedkv.terminal import LoadingBar


def add_llama_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `open_model` reads."""
    add(parser, "--kv", "SPEC", KV_HELP)
    add_words(parser)
    text = "tokens of the context, e.g. 4096 or 32k (default, as with --fit: as many as fit into the memory "
    add(parser, flags("n_ctx"), "N", f"{text}that is free, up to the model's)", tokens)
    add_switch(parser, "--swa-full", "keep all rows of layers with a sliding window")
    text = "most tokens that layers compute at a time (default: 512)"
    add(parser, flags("n_ubatch"), "N", text, positive)
    add(parser, "--lora", "FILE", "LoRA adapter on the model")
    add(parser, "--mmproj", "FILE", "image encoder (default: the one beside a model of the hub)")
    text = "chat format of a model without a template: chatml, ..."
    add(parser, "--chat-format", "NAME", text, default="")
    text = "control tokens in messages are text, as all that messages hold, or special (default: text)"
    add(parser, "--content-tokens", "HOW", text, choices=CONTENT_TOKENS, default="text")
    add(parser, flags("threads"), "N", "CPU threads (default: llama_cpp's choice)", positive)
    add(parser, flags("threads_batch"), "N", "CPU threads for prompts (default: as --threads)", positive)
    add_switch(parser, "--verbose", "show llama.cpp's log")
    text = "layers on a GPU, in a build that has one; -1 is all (default: as many as fit)"
    add(parser, flags("n_gpu_layers"), "N", text, layer_count)
    text = "read layers from the file each token: auto, all, ffn, a number, or keep_first=8,keep_last=2"
    add(parser, "--stream-layers", "HOW", text, layers)
    text = "memory that this process may take, e.g. 6GiB; streams the layers that do not fit"
    add(parser, "--memory", "SIZE", text, memory)


_SAMPLING = (
    ("--temp", "T", temperature, "temperature; 0 is the likeliest token"),
    ("--top-k", "K", whole, "sample from the K likeliest tokens; 0 is all"),
    (
        "--top-p",
        "P",
        between(*RANGES["top_p"]),
        "sample from the likeliest tokens that together have this probability",
    ),
    ("--min-p", "P", between(*RANGES["min_p"]), "drop tokens less than P times as likely as the likeliest"),
    ("--repeat-penalty", "X", between(*RANGES["repeat_penalty"]), "penalty of repeated tokens; 1 is none"),
    (
        "--repeat-last-n",
        "N",
        last_n,
        "tokens that --repeat-penalty looks at; 0 is none, -1 the whole context",
    ),
    ("--seed", "N", integer, "seed of the sampler, for the same text again (default: another each time)"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `sampling_options` reads."""
    group = parser.add_argument_group(
        "sampling", "default: what the model's file recommends (general.sampling.*), else llama-server's"
    )
    for flag, metavar, kind, text in _SAMPLING:
        add(group, flag, metavar, text, kind)


_AS_ARGUMENTS = {"temp": "temperature", "n_predict": "max_tokens"}  # of `create_completion`
_FIXED = "repeat_last_n"  # of a model that is loaded


def settable(name: str) -> tuple[str, Callable[[str], Any]]:
    """Return an option of the sampling that can change between two answers, and what reads its value.

    Raises:
        ValueError: there is no such option, or it can be given at the start only.
    """
    kinds: dict[str, Callable[[str], Any]] = {"max_tokens": length}
    for flag, _, kind, _ in _SAMPLING:
        option = flag.removeprefix("--").replace("-", "_")
        kinds[_AS_ARGUMENTS.get(option, option)] = kind
    name = _AS_ARGUMENTS.get(name, name)
    if name == _FIXED:
        raise ValueError(f"{name} is fixed when the chat begins: start it with --repeat-last-n")
    del kinds[_FIXED]
    if name not in kinds:
        raise ValueError(f"there is no {name}{did_you_mean(name, kinds)}: use {', '.join(sorted(kinds))}")
    return name, kinds[name]


def sampling_options(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return the sampling arguments of `Llama.create_completion` for a model."""
    given = {name: getattr(args, name) for name in ("top_k", "top_p", "min_p", "repeat_penalty", "seed")}
    given["temperature"] = args.temp
    recommended = sampling_defaults(read_model_file(path).metadata)
    chosen = {name: recommended.get(name) if value is None else value for name, value in given.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def repeat_last_n(args: argparse.Namespace, path: Path) -> int | None:
    """Return how many tokens the penalty of repeated ones looks at; None for llama.cpp's 64."""
    if args.repeat_last_n is not None:
        return int(args.repeat_last_n)
    recommended: int | None = sampling_defaults(read_model_file(path).metadata).get("repeat_last_n")
    return recommended


def image_encoder(args: argparse.Namespace, path: Path) -> Path | None:
    """Return the file of the model's image encoder, None if it has none.

    Raises:
        FileNotFoundError: --mmproj is not a file.
    """
    if args.mmproj is None:
        return encoder_beside(path) if is_of_hub(args.model or "") else None
    if not Path(args.mmproj).is_file():
        raise FileNotFoundError(f"mmproj={args.mmproj}: there is no such file")
    return Path(args.mmproj)


def open_model(path: Path, args: argparse.Namespace, encoder: Path | None = None) -> Llama:
    """Load a model as the options say.

    Args:
        encoder: of the images of a chat, for which memory is left.
    """
    streams = args.stream_layers is not None or args.memory is not None
    names = {"n_ubatch": "n_ubatch", "n_gpu_layers": "n_gpu_layers", "lora": "lora_path"}
    given: dict[str, Any] = {
        name: value for option, name in names.items() if (value := getattr(args, option)) is not None
    }
    if (n := repeat_last_n(args, path)) is not None:
        given["last_n_tokens_size"] = n
    if args.n_ubatch:
        given["n_batch"] = max(args.n_ubatch, 512)
    if args.chat_format:
        chat_formatter(args.chat_format)  # raises an error that lists them
        given["chat_format"] = format_name(args.chat_format)
    if encoder is not None:
        taken = encoder_bytes(encoder)
        given["beside"] = Beside(n_bytes=lambda _: taken)
    with LoadingBar() as bar:
        return Llama(
            path,
            kv=args.kv,
            n_ctx=args.n_ctx or (default_n_ctx(read_model_file(path)) if streams else "fit"),
            n_threads=args.threads,
            n_threads_batch=args.threads_batch or args.threads,
            swa_full=args.swa_full,
            content_tokens=args.content_tokens,
            verbose=args.verbose,
            stream_layers=args.stream_layers,
            memory=args.memory,
            progress=bar,
            **given,
        )


@contextlib.contextmanager
def quiet(enabled: bool) -> Iterator[None]:
    """Silence llama.cpp's log while inside, if `enabled`. Errors reach the user as exceptions of a line."""
    if enabled:
        _llama_cpp.silence_log()
    try:
        yield
    finally:
        if enabled:
            _llama_cpp.show_log()
