"""vendor/fetch.py on a small archive made here: hash, unpacking, patches, stamp."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support import REPOSITORY

pytestmark = pytest.mark.core

ROOT = "fake_pkg-1.0/vendor/llama.cpp"

PATCH = """\
--- a/src/a.txt
+++ b/src/a.txt
@@ -1,2 +1,2 @@
 one
-two
+TWO
"""


@dataclass
class Vendor:
    """A vendor folder and an archive of its own, in a temporary folder."""

    base: Path
    members: dict[str, bytes] = field(
        default_factory=lambda: {
            f"{ROOT}/src/a.txt": b"one\ntwo\n",
            f"{ROOT}/src/b.txt": b"untouched\n",
            f"{ROOT}/LICENSE": b"licence\n",
            f"{ROOT}/tools/big.txt": b"not wanted\n",
            "fake_pkg-1.0/setup.py": b"raise SystemExit\n",
            "fake_pkg-1.0/fake/__init__.py": b"version = 1\n",
            "fake_pkg-1.0/fake/vendor.txt": b"of the layer\n",
        }
    )

    def __post_init__(self) -> None:
        (self.folder / "patches").mkdir(parents=True)
        self.write_series({"0001-two.patch": PATCH})
        self.write_sdist()

    @property
    def folder(self) -> Path:
        return self.base / "vendor"

    @property
    def sdist(self) -> Path:
        return self.base / "fake_pkg-1.0.tar.gz"

    @property
    def dest(self) -> Path:
        return self.base / "build" / "llama.cpp"

    def write_series(self, patches: dict[str, str]) -> None:
        for name, text in patches.items():
            (self.folder / "patches" / name).write_text(text)
        (self.folder / "patches" / "series").write_text("# a reason\n" + "\n".join(patches) + "\n")

    def write_sdist(self, *extra: tuple[tarfile.TarInfo, bytes]) -> None:
        with tarfile.open(self.sdist, "w:gz") as archive:
            for name, data in self.members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            for info, data in extra:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        self.write_pin(hashlib.sha256(self.sdist.read_bytes()).hexdigest())

    def write_pin(self, sha256: str) -> None:
        (self.folder / "pin.toml").write_text(
            f'package = "fake-pkg"\nversion = "1.0"\nsha256 = "{sha256}"\nllama_cpp_commit = "abc"\n'
            'paths = ["LICENSE", "src"]\nlayer = ["fake"]\n'
        )

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        goal = options or ("--dest", str(self.dest), "--sdist", str(self.sdist))
        command = [sys.executable, REPOSITORY / "vendor" / "fetch.py", "--vendor", self.folder, *goal]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def fails(self) -> str:
        """Run, expect one clear error and nothing left behind; return the message."""
        result = self.run()
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert not self.dest.exists()
        assert not list(self.base.glob("build/.*"))
        return result.stderr


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    return Vendor(tmp_path)


def test_unpacks_only_what_the_pin_names_and_patches_it(vendor: Vendor) -> None:
    assert vendor.run().returncode == 0
    files = {str(p.relative_to(vendor.dest)) for p in vendor.dest.rglob("*") if p.is_file()}
    assert files == {"src/a.txt", "src/b.txt", "LICENSE", ".mixedkv-stamp"}
    assert (vendor.dest / "src/a.txt").read_text() == "one\nTWO\n"
    assert (vendor.dest / "src/b.txt").read_text() == "untouched\n"


def test_unpacks_the_python_layer_unpatched(vendor: Vendor) -> None:
    layer = vendor.base / "build" / "layer"
    both = ("--layer", str(layer), "--dest", str(vendor.dest), "--sdist", str(vendor.sdist))
    assert vendor.run(*both).returncode == 0
    files = {str(p.relative_to(layer)) for p in layer.rglob("*") if p.is_file()}
    assert files == {"fake/__init__.py", "fake/vendor.txt", ".mixedkv-stamp"}
    assert (vendor.dest / "src/a.txt").read_text() == "one\nTWO\n"
    vendor.write_series({"0001-two.patch": PATCH.replace("TWO", "zwei")})
    assert "Python layer" not in vendor.run(*both).stdout  # which no patch concerns


def test_patches_apply_inside_another_git_repository(vendor: Vendor) -> None:
    subprocess.run(["git", "init", "-q", vendor.base], check=True)
    assert vendor.run().returncode == 0
    assert (vendor.dest / "src/a.txt").read_text() == "one\nTWO\n"


def test_second_run_does_nothing(vendor: Vendor) -> None:
    vendor.run()
    (vendor.dest / "src/b.txt").write_text("edited by hand\n")
    vendor.sdist.unlink()
    result = vendor.run()
    assert result.returncode == 0
    assert result.stdout == ""
    assert (vendor.dest / "src/b.txt").read_text() == "edited by hand\n"


def test_changed_patch_unpacks_again_and_touches_only_what_differs(vendor: Vendor) -> None:
    vendor.run()
    long_ago = 1_000_000_000
    for name in ("src/a.txt", "src/b.txt"):
        os.utime(vendor.dest / name, (long_ago, long_ago))
    vendor.write_series({"0001-two.patch": PATCH.replace("TWO", "zwei")})
    assert vendor.run().returncode == 0
    assert (vendor.dest / "src/a.txt").read_text() == "one\nzwei\n"
    assert (vendor.dest / "src/a.txt").stat().st_mtime > long_ago
    assert (vendor.dest / "src/b.txt").stat().st_mtime == long_ago


def test_dropped_patch_restores_the_file(vendor: Vendor) -> None:
    vendor.run()
    vendor.write_series({})
    assert vendor.run().returncode == 0
    assert (vendor.dest / "src/a.txt").read_text() == "one\ntwo\n"


def test_changed_pin_unpacks_again(vendor: Vendor) -> None:
    vendor.run()
    vendor.members[f"{ROOT}/src/b.txt"] = b"new release\n"
    vendor.write_sdist()
    assert vendor.run().returncode == 0
    assert (vendor.dest / "src/b.txt").read_text() == "new release\n"


def test_wrong_hash_is_refused(vendor: Vendor) -> None:
    vendor.write_pin("0" * 64)
    message = vendor.fails()
    assert "SHA-256" in message
    assert "0" * 64 in message


def test_missing_archive_is_refused(vendor: Vendor) -> None:
    vendor.sdist.unlink()
    assert str(vendor.sdist) in vendor.fails()


@pytest.mark.parametrize("name", [f"{ROOT}/src/../../../../escaped", "/escaped", "../escaped"])
def test_path_outside_the_archive_is_refused(vendor: Vendor, name: str) -> None:
    vendor.write_sdist((tarfile.TarInfo(name), b"evil"))
    assert repr(name) in vendor.fails()
    assert not list(vendor.base.rglob("escaped"))


def test_link_is_refused(vendor: Vendor) -> None:
    link = tarfile.TarInfo(f"{ROOT}/src/link")
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc"
    vendor.write_sdist((link, b""))
    assert "src/link" in vendor.fails()


def test_incomplete_archive_is_refused(vendor: Vendor) -> None:
    del vendor.members[f"{ROOT}/LICENSE"]
    vendor.write_sdist()
    assert f"{ROOT}/LICENSE" in vendor.fails()


def test_patch_that_does_not_apply_is_named(vendor: Vendor) -> None:
    vendor.write_series({"0001-two.patch": PATCH, "0002-stale.patch": PATCH})
    message = vendor.fails()
    assert "vendor/patches/0002-stale.patch does not apply" in message
    assert "src/a.txt" in message


def test_failing_update_leaves_the_old_tree(vendor: Vendor) -> None:
    vendor.run()
    vendor.write_series({"0001-two.patch": PATCH.replace("-two", "-three")})
    assert vendor.run().returncode == 1
    assert (vendor.dest / "src/a.txt").read_text() == "one\nTWO\n"
    assert not list(vendor.base.glob("build/.*"))


def test_series_entry_without_a_file_is_named(vendor: Vendor) -> None:
    vendor.write_series({"0001-two.patch": PATCH})
    (vendor.folder / "patches" / "0001-two.patch").unlink()
    assert "0001-two.patch" in vendor.fails()


def test_series_applies_to_a_checkout(vendor: Vendor) -> None:
    checkout = vendor.base / "checkout"
    (checkout / "src").mkdir(parents=True)
    (checkout / "src/a.txt").write_text("one\ntwo\n")
    assert vendor.run("--apply", str(checkout)).returncode == 0
    assert (checkout / "src/a.txt").read_text() == "one\nTWO\n"


def test_pin_and_peer_are_one_version() -> None:
    pin = (REPOSITORY / "vendor" / "pin.toml").read_text()
    pinned = re.search(r'^version\s*=\s*"(.+)"$', pin, re.M)
    required = re.search(r'"llama-cpp-python==(.+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert pinned
    assert required
    assert pinned[1] == required[1]


def test_each_patch_is_listed_once_with_its_reason() -> None:
    folder = REPOSITORY / "vendor" / "patches"
    lines = (folder / "series").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert sorted(listed) == sorted(p.name for p in folder.glob("*.patch"))
    for name in listed:
        assert lines[lines.index(name) - 1].startswith("#"), f"no reason above {name}"


MENDS = sorted(path for path in (REPOSITORY / "vendor" / "upstream").glob("*.md") if path.name != "README.md")


def test_patches_hold_call_sites() -> None:
    """What they do is in cpp/, but for faults of upstream: the next upstream version then costs an hour."""
    patches = {path.stem: path.read_text() for path in (REPOSITORY / "vendor" / "patches").glob("*.patch")}
    ours = [text for name, text in patches.items() if name not in {path.stem for path in MENDS}]
    lines = [line for text in ours for line in text.splitlines()]
    assert sum(line.startswith("+") and not line.startswith("+++ ") for line in lines) <= 140


@pytest.mark.parametrize("text", MENDS, ids=lambda path: path.stem)
def test_a_fault_of_upstream_is_mended_on_its_own(text: Path) -> None:
    """Its patch could be offered as it is, and a test shows the fault."""
    patch = (REPOSITORY / "vendor" / "patches" / f"{text.stem}.patch").read_text()
    assert not re.search(r"mixed|hooks|cpp/", patch.replace(".cpp", ""))
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text.read_text())
    assert tests
    for file, name in tests:
        assert f"def {name}(" in (REPOSITORY / file).read_text()


# --- what others wrote of it: contents.toml


def licences(vendor: Path, llama_cpp: Path, dest: Path) -> subprocess.CompletedProcess[str]:
    layer = vendor.parent / "llama-cpp-python"
    options = [
        "--vendor",
        vendor,
        "--llama-cpp",
        llama_cpp,
        "--layer",
        layer,
        "--version",
        "1.0",
        "--dest",
        dest,
    ]
    script = REPOSITORY / "vendor" / "contents.py"
    return subprocess.run([sys.executable, script, *options], capture_output=True, text=True, check=False)


@pytest.fixture
def small_contents(tmp_path: Path) -> Path:
    """A vendor folder with one component, whose licence is a part of a source file."""
    vendor = tmp_path / "vendor"
    (vendor / "patches").mkdir(parents=True)
    (vendor / "pin.toml").write_text((REPOSITORY / "vendor" / "pin.toml").read_text())
    (vendor / "contents.toml").write_text(
        '[[component]]\nname = "small"\nlicence = "MIT"\n'
        'text = "small.h"\nfirst = "from here"\nlast = "to here"\n'
        'version_in = "small.h"\nversion = "small (\\\\d+)"\n'
    )
    return vendor


def test_licence_within_a_source_file(small_contents: Path, tmp_path: Path) -> None:
    (tmp_path / "small.h").write_text("// small 7\nto here\nfrom here\nanybody may\nto here\nint small;\n")
    result = licences(small_contents, tmp_path, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "licenses" / "small").read_text() == "from here\nanybody may\nto here\n"
    assert '"version": "7"' in (tmp_path / "out" / "mixedkv.cdx.json").read_text()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("// small 7\nanybody may\n", "has no longer the lines at which the licence of small begins"),
        ("from here\nto here\n", "does not say the version of small any more"),
        (None, "contents.toml names small.h, which is in none of"),
    ],
)
def test_licence_that_is_not_where_it_was(
    source: str | None, reason: str, small_contents: Path, tmp_path: Path
) -> None:
    if source is not None:
        (tmp_path / "small.h").write_text(source)
    result = licences(small_contents, tmp_path, tmp_path / "out")
    assert result.returncode == 1
    assert reason in result.stderr


def test_each_folder_of_others_sources_is_listed() -> None:
    """A library that llama.cpp newly brings along is in the pin's paths: its licence has to come too."""
    pin = (REPOSITORY / "vendor" / "pin.toml").read_text()
    contents = (REPOSITORY / "vendor" / "contents.toml").read_text()
    folders = re.findall(r'"(vendor/\w+)",', pin)
    assert len(folders) == 5
    assert [folder for folder in folders if f'"{folder}/' not in contents] == []


def test_changelog_has_an_entry_for_this_version() -> None:
    version = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.M)
    assert version
    headings = re.findall(r"^## \[?(\d[\w.]*)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == version[1]
