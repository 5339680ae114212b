"""What one system has and another lacks: nothing is imported or called that is not there."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from mixedkv import _native, system
from mixedkv.store.encryption import key_from_file

try:
    import fcntl
    import termios
except ImportError:  # Windows
    pass

pytestmark = pytest.mark.core

_WITHOUT = """
import sys
sys.modules.update(fcntl=None, resource=None)  # as on Windows
import mixedkv
from mixedkv.store import KVStore
KVStore(None).close()
try:
    KVStore(sys.argv[1])
except OSError as error:
    print(error)
"""


def test_without_posix_modules(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WITHOUT, str(tmp_path / "kv")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "POSIX file locks" in result.stdout
    assert "KVStore(None)" in result.stdout


def test_reading_at_an_offset_leaves_the_position(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    for _ in range(2):
        with path.open("rb") as file:
            file.seek(7)
            assert system.read_at(file, 3, 100) == bytes([100, 101, 102])
            assert file.tell() == 7
        monkeypatch.delattr(os, "pread", raising=False)


class _Windows:
    """How much is in a pipe, as Windows' Python says it."""

    def get_osfhandle(self, fd: int) -> int:
        return fd

    def PeekNamedPipe(self, fd: int, size: int) -> tuple[int, int]:  # noqa: N802
        if not select.select([fd], [], [], 0)[0]:
            return 0, 0
        size = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)
        if not size:
            raise BrokenPipeError
        return size, 0


@pytest.mark.parametrize("as_windows", [False, True])
@pytest.mark.needs("POSIX")
def test_a_pipe_has_data_once_something_is_written_or_it_ends(
    monkeypatch: pytest.MonkeyPatch, as_windows: bool
) -> None:
    if as_windows:
        monkeypatch.setattr(system, "_winapi", _Windows())
        monkeypatch.setattr(system, "msvcrt", _Windows())
    reader, writer = os.pipe()
    with open(reader, "rb") as pipe:
        with open(writer, "wb") as other:
            assert not system.has_data(pipe, 0.05)
            other.write(b"text")
            other.flush()
            assert system.has_data(pipe, 60)
            assert pipe.read1() == b"text"
            assert not system.has_data(pipe, 0)
        assert system.has_data(pipe, 60)
        assert pipe.read() == b""


def test_a_key_is_not_read_where_files_have_no_owners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    read = key_from_file(path)
    read()
    monkeypatch.setattr(system, "HAS_OWNERS", False)
    with pytest.raises(PermissionError, match="env:NAME"):
        read()


def test_a_build_for_another_processor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "processor_features.txt").write_text("avx2\navx512f\navx512_vnni\n")
    processor = tmp_path / "cpuinfo"
    monkeypatch.setattr(_native, "_CPU_INFO", processor)
    for flags in ("fpu avx avx2 avx512f avx512_vnni fma", None):
        if flags is None:
            processor.unlink()  # a system that does not tell
        else:
            processor.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
        _native._check_processor(tmp_path)
    processor.write_text("processor\t: 0\nflags\t\t: fpu avx avx2 fma\n")
    with pytest.raises(ImportError, match="avx512_vnni, avx512f, which this one lacks"):
        _native._check_processor(tmp_path)


def test_what_this_build_needs_is_known() -> None:
    features = (_native.package_folder() / "processor_features.txt").read_text().split()
    plugins = list(_native.library_folder().glob("libggml-cpu-*"))
    assert not (features and plugins)  # one processor's or all processors'
    assert len(plugins) != 1
