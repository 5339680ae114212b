"""Names of `mixedkv.engine` are loaded when they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mixedkv.engine

pytestmark = pytest.mark.full


def test_every_name_is_there_and_no_other() -> None:
    for name in mixedkv.engine.__all__:
        assert hasattr(mixedkv.engine, name), name
    assert set(mixedkv.engine.__all__) <= set(dir(mixedkv.engine))
    with pytest.raises(AttributeError, match="has no attribute 'Motor'"):
        mixedkv.engine.Motor  # noqa: B018


def test_an_engine_loads_no_store_and_no_kind_of_part() -> None:
    program = "import sys; from mixedkv.engine import Engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "mixedkv.engine.engine" in loaded
    rooms = ("mixedkv.store", "mixedkv.chunks", "mixedkv.images", "mixedkv.sessions", "mixedkv.engine.embed")
    assert not [name for name in loaded if name.startswith(rooms)]
