"""Fetch the pinned llama-cpp-python, verify it, unpack its Python layer, and its llama.cpp with the patches.

CMake runs this when it configures. Each of the two is stamped with a hash over the pin and, for llama.cpp,
over the series and every patch: a second run with the same does nothing, a changed patch unpacks again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STAMP = ".mixedkv-stamp"


class VendorError(Exception):
    """The source cannot be had as pinned; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The contents of pin.toml."""

    package: str
    version: str
    sha256: str
    llama_cpp_commit: str
    paths: tuple[str, ...]
    layer: tuple[str, ...]

    @property
    def root(self) -> PurePosixPath:
        """The folder that holds everything in the source distribution."""
        return PurePosixPath(f"{self.package.replace('-', '_')}-{self.version}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A folder of the source distribution, and the paths in it that the build needs."""

    root: PurePosixPath
    paths: tuple[str, ...]
    patches: tuple[Path, ...] = ()
    """Applied in this order."""

    def wants(self, path: PurePosixPath) -> bool:
        """Whether the build needs this path of the archive."""
        return any(path.is_relative_to(self.root / wanted) for wanted in self.paths)


def read_pin(vendor: Path) -> Pin:
    fields = tomllib.loads((vendor / "pin.toml").read_text(encoding="utf-8"))
    return Pin(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


def read_series(vendor: Path) -> list[Path]:
    """The patches in the order in which they apply."""
    lines = (vendor / "patches" / "series").read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    patches = [vendor / "patches" / name for name in names]
    for patch in patches:
        if not patch.is_file():
            raise VendorError(f"vendor/patches/series lists {patch.name}, which is not in that folder")
    return patches


def llama_cpp(vendor: Path, pin: Pin) -> Part:
    root = pin.root / "vendor" / "llama.cpp"
    return Part(root=root, paths=pin.paths, patches=tuple(read_series(vendor)))


def python_layer(pin: Pin) -> Part:
    return Part(root=pin.root, paths=pin.layer)


def compute_stamp(vendor: Path, part: Part) -> str:
    digest = hashlib.sha256(str(part.root).encode())
    for path in [vendor / "pin.toml", *part.patches]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def download(pin: Pin, folder: Path) -> Path:
    """Let pip fetch the source distribution, with the index, proxy and certificates it is configured for."""
    sdist = folder / f"{pin.root}.tar.gz"
    if sdist.is_file() and sha256_of(sdist) == pin.sha256:
        return sdist
    folder.mkdir(parents=True, exist_ok=True)
    requirement = folder / "requirement.txt"
    # With the hash pip itself refuses another archive before it runs anything from it to read its metadata.
    requirement.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    options = ["--no-deps", "--no-binary", pin.package, "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(requirement), "-d", str(folder)]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise VendorError(
            f"pip could not download the source of {pin.package} {pin.version} ({error}). "
            "For a build without network, set MIXEDKV_SDIST to an already downloaded archive."
        ) from error
    return sdist


def verify(sdist: Path, pin: Pin) -> None:
    if not sdist.is_file():
        raise VendorError(f"there is no source distribution at {sdist}")
    actual = sha256_of(sdist)
    if actual != pin.sha256:
        raise VendorError(
            f"{sdist} is not the pinned source of {pin.package} {pin.version}: "
            f"its SHA-256 is {actual}, pinned is {pin.sha256}"
        )


def extract(sdist: Path, part: Part, tree: Path) -> None:
    """Write the wanted regular files below tree. Nothing else in the archive ever becomes a path on disk."""
    with tarfile.open(sdist, "r:gz") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts:
                raise VendorError(f"{sdist} has a member outside of its own folder: {member.name!r}")
            if member.isdir() or not part.wants(path):
                continue
            source = archive.extractfile(member) if member.isfile() else None
            if source is None:
                raise VendorError(f"{sdist} has a member that is no regular file: {member.name!r}")
            target = tree.joinpath(*path.relative_to(part.root).parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    for wanted in part.paths:
        if not (tree / wanted).exists():
            raise VendorError(f"{sdist} has no {part.root / wanted}")


def apply(patches: Sequence[Path], tree: Path) -> None:
    # Inside another repository `git apply` would take the paths as that one's and silently skip them all.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_CEILING_DIRECTORIES"] = str(tree.resolve().parent)
    for patch in patches:
        command = ["git", "apply", "--whitespace=nowarn", str(patch.resolve())]
        try:
            result = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise VendorError("git is needed to apply vendor/patches: install git and try again") from error
        if result.returncode != 0:
            raise VendorError(f"vendor/patches/{patch.name} does not apply:\n{result.stderr.strip()}")


def keep_times(tree: Path, old: Path) -> None:
    """Give each unchanged file its predecessor's time, so that only changed ones are compiled."""
    for path in tree.rglob("*"):
        previous = old / path.relative_to(tree)
        if path.is_file() and previous.is_file() and path.read_bytes() == previous.read_bytes():
            status = previous.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def prepare(vendor: Path, pin: Pin, part: Part, dest: Path, sdist: Path | None = None) -> bool:
    """Make dest the part, patched. Returns whether anything had to be done."""
    stamp = compute_stamp(vendor, part)
    stamp_file = dest / STAMP
    if stamp_file.is_file() and stamp_file.read_text(encoding="utf-8") == stamp:
        return False
    if sdist is None:
        sdist = download(pin, dest.parent / "sdist")
    verify(sdist, pin)
    dest.parent.mkdir(parents=True, exist_ok=True)
    # A finished tree moves into place by renaming: an interrupted run leaves no half-unpacked dest.
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as scratch:
        tree = Path(scratch, "new")
        tree.mkdir()
        extract(sdist, part, tree)
        apply(part.patches, tree)
        (tree / STAMP).write_text(stamp, encoding="utf-8")
        if dest.exists():
            keep_times(tree, dest)
            dest.rename(Path(scratch, "old"))
        tree.rename(dest)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--vendor", type=Path, default=here, help="folder of pin.toml")
    parser.add_argument("--dest", type=Path, help="folder that becomes the patched llama.cpp")
    parser.add_argument("--layer", type=Path, help="folder that becomes the Python layer of llama-cpp-python")
    parser.add_argument("--apply", type=Path, metavar="CHECKOUT", help="only patch this llama.cpp checkout")
    parser.add_argument("--sdist", type=Path, help="an already downloaded source distribution")
    options = parser.parse_args()
    if not (options.dest or options.layer or options.apply):
        parser.error("one of --dest, --layer and --apply is needed")
    try:
        if options.apply:
            apply(read_series(options.vendor), options.apply)
        pin = read_pin(options.vendor)
        if options.dest:
            part = llama_cpp(options.vendor, pin)
            if prepare(options.vendor, pin, part, options.dest, options.sdist):
                print(f"llama.cpp unpacked and patched in {options.dest}")
        if options.layer and prepare(options.vendor, pin, python_layer(pin), options.layer, options.sdist):
            print(f"the Python layer of {pin.package} unpacked in {options.layer}")
    except VendorError as error:
        print(f"vendor/fetch.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
