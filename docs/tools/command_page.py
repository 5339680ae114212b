"""docs/reference/cli.md, made from the command line's own parsers.

python docs/tools/command_page.py > docs/reference/cli.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mixedkv.cli.main import make_parser

_HEAD = """\
# The command line

Every command and option of `mixedkv`, as `mixedkv COMMAND --help` shows them. `python -m mixedkv` is the same
program. This page is made from the parsers, by
`python docs/tools/command_page.py > docs/reference/cli.md`.

An error is one line on stderr and exit code 2; Ctrl-C is exit code 130.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    commands = _commands(make_parser())
    assert commands is not None
    yield "| command | |"
    yield "|---|---|"
    for each in commands._choices_actions:
        also = [name for name, one in commands.choices.items() if one is commands.choices[each.dest]][1:]
        names = f", also `{'`, `'.join(also)}`" if also else ""
        yield f"| [`mixedkv {each.dest}`](#mixedkv-{each.dest}){names} | {_cell(each.help)} |"
    for parser in dict.fromkeys(commands.choices.values()):
        parser.add_arguments()
        yield from _section(parser, "##")


def _section(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    yield ""
    yield f"{level} {parser.prog}"
    yield ""
    if parser.description:
        yield f"{' '.join(parser.description.split())}\n"
    commands = _commands(parser)
    options = [
        each for each in parser._actions if each is not commands and each.dest not in ("help", "version")
    ]
    if options:
        yield "| option | |"
        yield "|---|---|"
        for option in options:
            yield f"| {_name(option)} | {_cell(_expanded(option, parser))} |"
    if parser.epilog:
        yield f"\n{' '.join(parser.epilog.split())}"
    if commands:
        helps = {each.dest: each.help for each in commands._choices_actions}
        for name, each in commands.choices.items():
            each.description = each.description or f"{(helps.get(name) or name).capitalize()}."
            yield from _section(each, level + "#")


def _commands(parser: argparse.ArgumentParser) -> argparse._SubParsersAction | None:
    actions = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next(actions, None)


def _name(option: argparse.Action) -> str:
    choices = "\\|".join(map(str, option.choices)) if option.choices else ""
    if not option.option_strings:
        return f"`{option.metavar or choices or option.dest}`"
    value = option.metavar or choices or option.dest.upper()
    names = ", ".join(f"`{name}`" for name in option.option_strings)
    return names if option.nargs == 0 else f"{names} `{value}`"


def _expanded(option: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(option), "prog": parser.prog}
    return (option.help or "") % values


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
