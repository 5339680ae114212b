"""A model for commands that generate text themselves."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import _logger

from mixedkv.llama import Llama
from mixedkv.model.gguf_file import read_model_file

DEFAULT_N_CTX = 8192


def open_model(path: Path, args: argparse.Namespace) -> Llama:
    return Llama(
        path,
        kv=args.kv,
        n_ctx=args.n_ctx or _default_n_ctx(path),
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=args.verbose,
    )


def _default_n_ctx(path: Path) -> int:
    return min(DEFAULT_N_CTX, int(read_model_file(path).get("context_length", DEFAULT_N_CTX)))


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Errors reach the user as exceptions: without llama.cpp's log each is one line."""
    if wanted:
        _set_log(_no_log)
    try:
        yield
    finally:
        if wanted:
            _set_log(_logger.llama_log_callback)


def _set_log(callback: Any) -> None:
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))


_no_log = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
