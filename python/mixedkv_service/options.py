"""Makes the options of a command of the fields of its settings, and reads them."""

from __future__ import annotations

import argparse
from collections.abc import Container
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from mixedkv.cli.words import decimal, flags, integer, tokens

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from mixedkv_service.settings import ServiceSettings

    S = TypeVar("S", bound=ServiceSettings)


def add_options(parser: Any, kind: type[ServiceSettings], leave_out: Container[str] = ()) -> None:
    """Declare all options of some settings, in their groups."""
    prefix = kind.model_config["env_prefix"]
    parser.epilog = (
        f"Each option can also be an environment variable ({prefix}N_CTX=8192) or a line of a TOML file "
        f"(n_ctx = 8192). The command line comes first, then the environment, then the file. {parser.epilog}"
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    for title, names in kind.GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            if name not in leave_out:
                _add(group, name, kind.model_fields[name])


def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    names = flags(name)
    text, kind = field.description or "", type(field.default)
    if field.default is None:  # a number that need not be given
        kind = next(each for each in get_args(field.annotation) if each is not type(None))
    if kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    metavar = cast("dict[str, str]", field.json_schema_extra)["metavar"]
    if kind is tuple:
        group.add_argument(*names, metavar=metavar, action="append", default=None, help=text)
        return
    if field.default not in (None, "", 0) and "default" not in text:
        text += f" (default: {field.default})"
    kinds: dict[Any, Any] = {int: integer, float: decimal, str: str}
    read = tokens if name == "n_ctx" else str if metavar == "SIZE" else kinds[kind]
    group.add_argument(*names, metavar=metavar, type=read, default=None, help=text)


def read_options(args: argparse.Namespace, kind: type[S]) -> S:
    """Return the settings of a command line, the environment and a file.

    Raises:
        ValueError, OSError: as `ServiceSettings.load`.
    """
    options = {name: getattr(args, name) for name in kind.model_fields}
    return kind.load({name: value for name, value in options.items() if value is not None}, args.config)
