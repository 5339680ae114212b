"""Real text from what a machine has, with a hash that tells which one it was."""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path

import pytest

from mixedkv_bench.harness import real_text
from mixedkv_bench.harness.real_text import KINDS, read_real_text, read_text

pytestmark = pytest.mark.full


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_long_english_or_code_and_named(kind: str, request: pytest.FixtureRequest) -> None:
    if kind in ("narrative", "dialogue"):
        request.getfixturevalue("real_model_q4_1")  # skips without the extra
    found = read_real_text(kind)
    assert len(found.text) > 30_000
    assert len(re.findall(r"\bthe\b", found.text)) > 200
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert str(found).startswith(f"{kind}: ")
    assert found.sha256[:12] in str(found)
    assert read_real_text(kind) == found


def test_a_file_comes_before_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose").write_text("my own")
    text, source = read_text("prose")
    assert text == "my own"
    assert source.startswith("prose: a file, sha256 ")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(real_text.metadata, "files", files)
    with pytest.raises(ValueError, match=r"package adventure: run pip install 'mixedkv\[real\]'"):
        read_real_text("narrative")
