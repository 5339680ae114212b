"""Commands and configurations of the pages are ones: options exist; YAML, TOML and JSON parse."""

from __future__ import annotations

import configparser
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from mixedkv.cli.main import make_parser
from support import REPOSITORY

pytestmark = pytest.mark.full

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
CLIENTS = REPOSITORY / "docs/clients.md"
# a command in a block of a shell, up to a pipe, a comment or the end of its line
_COMMAND = re.compile(r"(?<![\w/-])mixedkv ((?:run|chat|serve|info|pull|models|cache|split) [^\n#|;&<>']*)")


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in one of these languages."""
    names = "|".join(languages)
    return re.findall(rf"^```(?:{names})\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands(page: Path) -> list[str]:
    """Return the commands of a page: those of its shell blocks, and those in its text that have options."""
    shell = "\n".join(re.sub(r"\\\n\s*", " ", block) for block in blocks(page, "sh"))
    prose = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    inline = [" ".join(each.split()) for each in re.findall(r"`(mixedkv [^`]* -[^`]*)`", prose)]
    found = [each[1].strip() for each in _COMMAND.finditer("\n".join([shell, *inline]))]
    return [each for each in found if "--help" not in each and "..." not in each]  # no outlines


SHOWN = [pytest.param(each, id=f"{page.stem}-{i}") for page in PAGES for i, each in enumerate(commands(page))]


def test_there_are_some() -> None:
    assert len(SHOWN) > 30


@pytest.mark.parametrize("command", SHOWN)
def test_options_of_a_command_exist(command: str) -> None:
    words = shlex.split(command.replace("{port}", "8000"))
    make_parser().parse_args(words)


def test_configurations_of_clients_parse() -> None:
    for text in blocks(CLIENTS, "json"):
        json.loads(text)
    for text in blocks(CLIENTS, "ini"):
        parser = configparser.ConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(text)
        assert parser["Service"]["ExecStart"].endswith("mixedkv serve --restart-when-stuck")
    if sys.version_info >= (3, 11):
        for text in blocks(CLIENTS, "toml"):
            importlib.import_module("tomllib").loads(text)
    yaml = pytest.importorskip("yaml", reason="needs the package PyYAML")
    for text in blocks(CLIENTS, "yaml"):
        assert isinstance(yaml.safe_load(text), dict | list)


def test_variables_of_the_server_exist() -> None:
    pytest.importorskip("pydantic_settings", reason="needs the extra server")
    from mixedkv_server.settings import ServerSettings

    fields = {f"MIXEDKV_{name.upper()}" for name in ServerSettings.model_fields}
    others = {"MIXEDKV_API_KEY", "MIXEDKV_LLM_MODELS"}  # of Zed, of the plugin for llm
    named = set(re.findall(r"\bMIXEDKV_[A-Z_]+", CLIENTS.read_text("utf-8")))
    assert named - others <= fields
