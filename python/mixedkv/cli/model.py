"""A model for commands that generate text themselves."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from mixedkv.cli.values import layer_count, layers, memory
from mixedkv.llama import Llama
from mixedkv.model.gguf_file import read_model_file
from mixedkv.native import llama_cpp as _llama_cpp
from mixedkv.terminal import LoadingBar

DEFAULT_N_CTX = 8192


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--n-gpu-layers",
        metavar="N",
        type=layer_count,
        default=0,
        help="layers on a GPU, in a build that has one; -1 is all (default: 0)",
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


def open_model(path: Path, args: argparse.Namespace) -> Llama:
    with LoadingBar() as bar:
        return Llama(
            path,
            kv=args.kv,
            n_ctx=args.n_ctx or _default_n_ctx(path),
            n_threads=args.threads,
            n_threads_batch=args.threads,
            n_gpu_layers=args.n_gpu_layers,
            verbose=args.verbose,
            stream_layers=args.stream_layers,
            memory=args.memory,
            progress=bar,
        )


def _default_n_ctx(path: Path) -> int:
    return min(DEFAULT_N_CTX, int(read_model_file(path).get("context_length", DEFAULT_N_CTX)))


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Errors reach the user as exceptions: without llama.cpp's log each is one line."""
    if wanted:
        _llama_cpp.silence_log()
    try:
        yield
    finally:
        if wanted:
            _llama_cpp.show_log()
