"""Sizes and durations as people write them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from mixedkv.cli.main import make_parser
from mixedkv.config import MixedKVConfig
from mixedkv.prefix.checkpoints import CheckpointLimits
from mixedkv.sizes import GB, parse_duration, parse_size, size_of
from mixedkv.store import KVStore

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("2GiB", 2**31), ("500M", 500 * 2**20), (" 4096 ", 4096), (".5 kb", 500), ("10 GB", 10**10), ("8b", 8)],
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 PiB", "-1", "1e3", "0", "0GiB", "inf", "2iB5", "\u0662GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: use"):
        parse_size(text)


def test_a_number_without_a_unit_counts_what_the_option_counts() -> None:
    assert parse_size("4", GB) == 4 * 10**9
    assert parse_size("4GiB", GB) == 2**32
    assert parse_size("0", GB, least=0) == 0
    assert size_of("room", 4, GB) == size_of("room", "4GB") == size_of("room", 4e9) == 4 * 10**9
    for wrong in ("much", True, None, -1, float("nan"), 2.0**60):
        with pytest.raises(ValueError, match=r"^room="):
            size_of("room", wrong)  # type: ignore[arg-type]


def options(command: str) -> set[str]:
    """The options of a command that take a size."""
    parser = make_parser()
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    parsers, found = [commands.choices[command]], set()
    while parsers:
        each = parsers.pop()
        each.add_arguments()
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.metavar != "N" and re.search(
                r"-(gb|mb|memory|budget)$", " ".join(action.option_strings)
            ):  # --reasoning-budget counts tokens
                found.add(action.option_strings[0])
                text = "1GiB,2GiB" if action.metavar == "SIZE,SIZE" else "2GiB"
                assert action.metavar in ("SIZE", "SIZE,SIZE"), action.option_strings
                value = (action.type or str)(text)
                assert value == pytest.approx({float: 2**31 / 1e9, int: 2**31}.get(type(value), value))
    return found


def test_every_option_that_takes_a_size_takes_2gib() -> None:
    pytest.importorskip("pydantic_settings")
    pytest.importorskip("grpc")
    for command in ("run", "chat", "info", "serve", "split", "cache", "bench"):
        assert options(command) or command in ("info", "bench"), command


def test_settings_of_the_server_take_sizes(tmp_path: Path) -> None:
    pytest.importorskip("pydantic_settings")
    from mixedkv_server.settings import ServerSettings

    file = tmp_path / "server.toml"
    file.write_text("max_ram_gb = 3\n")
    given = {"max_kv_size_gb": "20GiB"}
    settings = ServerSettings.load(given, str(file), {"MIXEDKV_MAX_BODY_MB": "8MiB"})
    assert settings.max_kv_size_gb == pytest.approx(20 * 2**30 / 1e9)
    assert settings.max_body_mb == pytest.approx(2**23 / 1e6)
    assert settings.max_ram_gb == 3
    with pytest.raises(ValueError, match="--max-ram-gb='lots': 'lots' is not a size"):
        ServerSettings.load({"max_ram_gb": "lots"}, None, {})


def test_python_takes_sizes() -> None:
    assert MixedKVConfig(budget="2MiB") == MixedKVConfig(budget=2**21)
    assert CheckpointLimits(max_bytes="1KiB").max_bytes == 1024
    with KVStore(None, max_ram_bytes="1MiB", max_kv_size_gb="2GiB") as store:
        assert store.stats().n_entries == 0
    for wrong in ({"max_ram_bytes": "lots"}, {"max_kv_size_gb": "lots"}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}='lots' is not a size"):
            KVStore(None, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5 min", 90), ("90", 90), ("2W", 1_209_600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1d", "1 month", "d", "1e9d", "nan", "\u0663d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)
