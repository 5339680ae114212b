"""The core works without the packages beside it, and says what is missing where one of them is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from mixedkv.cli import main as cli

pytestmark = pytest.mark.full

MAIN = importlib.import_module("mixedkv.cli.main")  # the package's `main` is the function
BESIDE = ("mixedkv_bench", "mixedkv_ray", "mixedkv_server", "mixedkv_service", "mixedkv_split")


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("command", ["serve", "split", "bench"])
def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, is_named: bool
) -> None:
    """Also where the wheel names a package that it was made without."""
    points = (EntryPoint(command, "mixedkv_absent.command", "mixedkv.commands"),) if is_named else ()
    monkeypatch.setattr(MAIN, "entry_points", lambda **_: points)
    assert cli([command, "--help"]) == 2
    extra = "server" if command == "serve" else command
    assert f"this installation has no {command}" in (said := capsys.readouterr().err)
    assert f"pip install 'mixedkv[{extra}]'" in said


def test_commands_of_other_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoint("serve", "pytest.command", "mixedkv.commands")
    monkeypatch.setattr(MAIN, "entry_points", lambda **_: (found,))
    assert MAIN.module_of("serve") == "pytest.command"
    assert MAIN.module_of("run") == "mixedkv.cli.run_command"


def test_the_core_loads_none_of_them() -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({BESIDE!r}))\n"  # an import of one of them fails
        "import mixedkv, mixedkv.engine, mixedkv.store, mixedkv.sessions, mixedkv.cli.main\n"
        "from mixedkv.cli.main import main\n"
        "main(['models']); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("done\n")
