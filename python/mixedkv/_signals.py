"""Signals while a server starts: SIGHUP is remembered until `mixedkv_service.signals` follows it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import PurePath

_PROGRAM, _COMMANDS = "mixedkv", (["serve"], ["split", "serve"])
_MODULES = ("mixedkv_server", "mixedkv_server.model_child")
_came: list[int] = []


def remember_hangups() -> None:
    """Remember SIGHUP, whose default would end the process, for `take_remembered`."""
    if hasattr(signal, "SIGHUP"):  # not on Windows
        signal.signal(signal.SIGHUP, lambda number, _: _came.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # a router blocks it for its processes


def take_remembered() -> bool:
    """Return whether SIGHUP came since it is remembered, and forget it."""
    came = bool(_came)
    _came.clear()
    return came


def prepare_server() -> None:
    """Remember SIGHUP if this process was started to be a server, whose imports take seconds. Ctrl-C ends
    these without a traceback.
    """
    if starts_server(sys.orig_argv):
        remember_hangups()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_at_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again after `prepare_server`."""
    if starts_server(sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def starts_server(words: Sequence[str]) -> bool:
    """Return whether the words of a command line start one of our servers."""
    for i, word in enumerate(words[:8]):  # behind the interpreter and its options
        if word == "-m" and words[i + 1 : i + 2] and words[i + 1] in _MODULES:
            return True
        if PurePath(word).name == _PROGRAM:
            return any(list(words[i + 1 : i + 1 + len(command)]) == command for command in _COMMANDS)
    return False
