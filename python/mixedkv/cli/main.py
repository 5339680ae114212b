"""Command line: `run` generates text, `serve` serves it, `cache` looks after stored KV, `bench` measures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mixedkv import __version__, _core
from mixedkv.cli import bench_command, cache_command, info_command, run_command, serve_command

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    try:
        args = _parser().parse_args(argv)
        args.command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, e.g. `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ValueError, OSError, LookupError) as error:
        print(f"mixedkv: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error here."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"mixedkv: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mixedkv",
        description="Long contexts on small machines: llama.cpp with a mixed-precision KV cache.",
    )
    parser.add_argument("--version", action="version", version=_version_line())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (run_command, info_command, serve_command, cache_command, bench_command):
        module.add_command(commands)
    return parser


def _version_line() -> str:
    native = _core.version()
    return f"mixedkv {__version__} (llama.cpp {native['llama_commit'][:9]}, {native['isa']} kernels)"
