"""Opens the model of `mixedkv run` and `mixedkv chat`, which generate text themselves."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_cpp.llama_chat_format import chat_formatter_to_chat_completion_handler

from mixedkv.cli.values import layer_count, layers, memory, positive
from mixedkv.cli.words import add_words, flags, tokens
from mixedkv.config.mixed import HELP as KV_HELP
from mixedkv.llama import Llama
from mixedkv.model.encoder import encoder_beside, encoder_bytes
from mixedkv.model.fit import Beside
from mixedkv.model.gguf_file import default_n_ctx, read_model_file
from mixedkv.model.named_model import is_of_hub
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.terminal import LoadingBar


def add_llama_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `open_model` reads."""
    parser.add_argument("--kv", metavar="SPEC", help=KV_HELP)
    add_words(parser)
    parser.add_argument(
        *flags("n_ctx"),
        metavar="N",
        type=tokens,
        help="tokens of the context, e.g. 4096 or 32k (default, as with --fit: as many as fit into the "
        "memory that is free, up to the model's)",
    )
    parser.add_argument(
        "--swa-full", action="store_true", help="keep all rows of layers with a sliding window"
    )
    parser.add_argument(
        *flags("n_ubatch"),
        metavar="N",
        type=positive,
        help="most tokens that layers compute at a time (default: 512)",
    )
    parser.add_argument("--lora", metavar="FILE", help="LoRA adapter on the model")
    parser.add_argument(
        "--mmproj", metavar="FILE", help="image encoder (default: the one beside a model of the hub)"
    )
    parser.add_argument(
        "--chat-format",
        metavar="NAME",
        default="",
        help="chat format of a model without a template: chatml, ...",
    )
    parser.add_argument(
        *flags("threads"), metavar="N", type=positive, help="CPU threads (default: llama_cpp's choice)"
    )
    parser.add_argument(
        *flags("threads_batch"),
        metavar="N",
        type=positive,
        help="CPU threads for prompts (default: as --threads)",
    )
    parser.add_argument("--verbose", action="store_true", help="show llama.cpp's log")
    parser.add_argument(
        *flags("n_gpu_layers"),
        metavar="N",
        type=layer_count,
        help="layers on a GPU, in a build that has one; -1 is all (default: as many as fit)",
    )
    parser.add_argument(
        "--stream-layers",
        metavar="HOW",
        type=layers,
        help="read layers from the file each token: auto, all, ffn, a number, or keep_first=8,keep_last=2",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=memory,
        help="memory that this process may take, e.g. 6GiB; streams the layers that do not fit",
    )


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
        encoder: of the images of an `ImageChat`, which needs sequences of its own.
    """
    streams = args.stream_layers is not None or args.memory is not None
    names = {"n_ubatch": "n_ubatch", "n_gpu_layers": "n_gpu_layers", "lora": "lora_path"}
    given: dict[str, Any] = {
        name: value for option, name in names.items() if (value := getattr(args, option)) is not None
    }
    if args.n_ubatch:
        given["n_batch"] = max(args.n_ubatch, 512)
    if args.chat_format:
        from mixedkv.engine.chat.tokenizer import chat_formatter

        given["chat_handler"] = chat_formatter_to_chat_completion_handler(chat_formatter(args.chat_format))
    if encoder is not None:
        taken = encoder_bytes(encoder)
        given |= {"n_seq_max": 2, "kv_unified": True, "beside": Beside(n_bytes=lambda _: taken)}
    with LoadingBar() as bar:
        return Llama(
            path,
            kv=args.kv,
            n_ctx=args.n_ctx or (default_n_ctx(read_model_file(path)) if streams else "fit"),
            n_threads=args.threads,
            n_threads_batch=args.threads_batch or args.threads,
            swa_full=args.swa_full,
            verbose=args.verbose,
            stream_layers=args.stream_layers,
            memory=args.memory,
            progress=bar,
            **given,
        )


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Silence llama.cpp's log while inside, if wanted. Errors reach the user as exceptions, a line each."""
    if wanted:
        _llama_cpp.silence_log()
    try:
        yield
    finally:
        if wanted:
            _llama_cpp.show_log()
