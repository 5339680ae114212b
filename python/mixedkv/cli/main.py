"""The command line `mixedkv`, with a module for each command."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, NoReturn

from mixedkv import __version__, _core
from mixedkv._native import processor_plugin
from mixedkv._signals import raise_at_ctrl_c
from mixedkv.cli.words import as_options, is_model, unknown
from mixedkv.errors import EngineError
from mixedkv.nearest_word import did_you_mean

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_NEEDS_NO_OUTPUT = ("serve", "split")
_CONTROLS = dict.fromkeys([*range(32), *range(0x7F, 0xA0)], 0xFFFD)  # a message may quote a file's
_COMMANDS = {
    "run": "generate text from a prompt",
    "chat": "talk to a model, and go on another day",
    "pull": "download a model",
    "models": "list the models on this machine, and what each can do",
    "rm": "remove a downloaded model",
    "info": "show what each cache would take",
    "serve": "serve a model over HTTP, as OpenAI does",
    "ps": "list the models that a running server has in memory",
    "stop": "unload a model of a running server",
    "split": "run a model on two machines: layers and cache on one, embeddings and output head on the other",
    "cache": "list, check and clean stored KV",
    "bench": "measure speed, memory, quality and recall of cache settings, kept KV, the server",
    "help": "show the options of a command",
}
_ALSO = {"models": ["list", "ls"], "info": ["show"]}  # names of the same commands in other programs
_INSTEAD = {  # commands of other programs
    "create": "there is nothing to create: give --system, --lora or --chat-format to run, chat or serve",
    "cp": "a model's name is its file's: serve it under another with mixedkv serve -m NAME=FILE",
    "push": "upload with the program of your hub, e.g. hf upload",
    "load": "a server loads a model when a request names it: mixedkv serve",
    "unload": "use mixedkv stop MODEL",
    "status": "use mixedkv ps",
    "get": "use mixedkv pull NAME",
    "download": "use mixedkv pull NAME",
    "start": "use mixedkv serve",
    "server": "use mixedkv serve",
    "version": "use mixedkv --version",
    "quantize": "use llama.cpp's program llama-quantize",
}


# commands of packages beside this one, which name their modules by entry points, and the extras they need
_BESIDE = {"serve": "server", "split": "split", "bench": "bench"}


def module_of(command: str) -> str:
    """Return the module of a command.

    Raises:
        ValueError: the command's package is not installed.
    """
    if command not in _BESIDE:
        return f"mixedkv.cli.{command}_command"
    for point in entry_points(group="mixedkv.commands", name=command):
        if find_spec(point.value.partition(".")[0]) is not None:  # a wheel of the core alone names it too
            return point.value
    raise ValueError(
        f"this installation has no {command}, only the cache and its commands: "
        f"pip install 'mixedkv[{_BESIDE[command]}]'"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 where the model failed, 2 for bad input, 130 after
    Ctrl-C.
    """
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    raise_at_ctrl_c()
    options: Collection[str] = ()
    closed = open_missing_streams()
    try:
        args = make_parser().parse_args(argv)
        options = args.options
        if "stdout" in closed and args.called not in _NEEDS_NO_OUTPUT:
            raise ValueError("the standard output is closed: there is nowhere to write to. Use > FILE")
        args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ValueError, OSError, LookupError) as error:
        print(f"mixedkv: error: {as_options(_one_line(error), options)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except EngineError as error:
        print(f"mixedkv: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def open_missing_streams() -> set[str]:
    """Open /dev/null in the place of each standard stream that is closed, and return their names. Python has
    None for these, and the next file that is opened would get their number.
    """
    closed = set()
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        closed.add(name)
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    return closed


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"mixedkv: warning: {_one_line(message)}", file=sys.stderr)


def _one_line(error: Exception | str) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()).translate(_CONTROLS)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like all errors of this program.

    A command's module is imported only when the command is used, since some need packages of an extra.
    """

    def __init__(self, *, command: str = "", **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._command = command

    def add_arguments(self) -> None:
        """Import the command's module, which adds the command's arguments and its description."""
        if self._command:
            importlib.import_module(module_of(self._command)).add_arguments(self)

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        self.add_arguments()
        found, rest = super().parse_known_args(*args, **options)
        if rest:
            self.error(unknown(rest, self._option_string_actions, serves=self.prog.endswith(" serve")))
        if "options" not in found:  # the innermost command's come first
            found.options = frozenset(self._option_string_actions)
        return found, rest

    def _get_option_tuples(self, option_string: str) -> Any:
        """Take `-c4096` for `-c 4096`, but not `-cnv` for `-c nv`: that is another program's option."""
        if re.match(r"-[A-Za-z]([A-Za-z-]|$)", option_string):
            return []
        return super()._get_option_tuples(option_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Answer a word that is no command with what was meant, and not with a list alone."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(unknown_command(str(value), list(action.choices), self.prog))
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        print(f"mixedkv: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line. A command adds its arguments when it is used."""
    parser = _Parser(
        prog="mixedkv",
        description="Long contexts on small machines: llama.cpp with a mixed-precision KV cache.",
    )
    parser.add_argument("--version", action="version", version=_version_line())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        also = _ALSO.get(name, [])
        commands.add_parser(name, aliases=also, help=text, command=name).set_defaults(called=name)
    return parser


def unknown_command(word: str, known: Sequence[str], program: str) -> str:
    """Return what is said of a word that is no command."""
    if program == "mixedkv":
        if instead := _INSTEAD.get(word):
            return f"there is no command {word}: {instead}"
        if is_model(word):
            return f"there is no command {word!r}: to talk to a model, write mixedkv run {word}"
    return f"there is no command {word!r}{did_you_mean(word, known)}: use {', '.join(known)}"


def _version_line() -> str:
    native = _core.version()
    plugin = processor_plugin()
    backend = f", ggml for {plugin}" if plugin else ""
    return f"mixedkv {__version__} (llama.cpp {native['llama_commit'][:9]}, {native['isa']} kernels{backend})"
