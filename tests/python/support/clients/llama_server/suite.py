"""Runs llama.cpp's own tests of llama-server against `mixedkv serve`, and compares with the exceptions.

PYTHONPATH=tests/python python -m support.clients.llama_server.suite [test_infill ...]

They are those of the archive that the build fetches.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support import REPOSITORY, TESTS
from support.clients.llama_server.adapt import adapt
from support.clients.llama_server.exceptions import EXCEPTIONS, known, matches
from support.clients.llama_server.models import write_models

sys.path.insert(0, str(REPOSITORY / "vendor"))
import fetch

_PATHS = ("tools/server/tests", "tools/server/README.md", "models/templates")
_SECONDS = 3600  # for one file


def unpack(folder: Path) -> Path:
    """Unpack llama-server's tests of the pinned archive, and adapt them; return the folder of llama.cpp."""
    vendor = REPOSITORY / "vendor"
    pin = fetch.read_pin(vendor)
    given = os.environ.get("MIXEDKV_SDIST")
    sdist = Path(given) if given else fetch.download(pin, REPOSITORY / "build" / "release" / "sdist")
    fetch.verify(sdist, pin)
    part = fetch.Part(root=pin.root / "vendor" / "llama.cpp", paths=_PATHS)
    fetch.extract(sdist, part, folder / "llama.cpp")
    adapt(folder / "llama.cpp" / "tools" / "server" / "tests")
    write_models(folder / "models")
    return folder / "llama.cpp"


def files(llama_cpp: Path) -> list[str]:
    """Return the names of the files of tests."""
    return sorted(path.stem for path in (llama_cpp / "tools/server/tests/unit").glob("test_*.py"))


def run(folder: Path, file: str) -> dict[str, str]:
    """Run the tests of one file; return "passed", "failed" or "skipped" by their names."""
    tests = folder / "llama.cpp" / "tools" / "server" / "tests"
    report = folder / f"{file}.xml"
    environ = {
        **os.environ,
        "PYTHONPATH": str(TESTS),
        "LLAMA_SERVER_MODELS": str(folder / "models"),
        "LLAMA_CPP": str(folder / "llama.cpp"),
        "PORT": os.environ.get("PORT", "18080"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml", str(report)]
    command += ["-m", "not slow"]  # which need a model of the Hub that answers well
    with (folder / f"{file}.log").open("w") as log:
        subprocess.run(
            [*command, f"unit/{file}.py"],
            cwd=tests,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            check=False,
        )
    return {f"{file}::{case.get('name')}": _outcome(case) for case in ET.parse(report).iter("testcase")}


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


@dataclass
class Compared:
    """What differs from the exceptions."""

    new: list[str] = field(default_factory=list)  # fail, and no exception says why
    gone: list[str] = field(default_factory=list)  # exceptions for what passes

    @property
    def as_expected(self) -> bool:
        return not (self.new or self.gone)


def compare(found: Mapping[str, str], file: str) -> Compared:
    """Compare the outcomes of a file's tests with the exceptions for it."""
    out = Compared([name for name, how in found.items() if how == "failed" and known(name) is None])
    for name in (name for each in EXCEPTIONS for name in each.tests if name.split("::")[0] == file):
        matching = [how for test, how in found.items() if matches(name, test)]
        if "failed" not in matching:
            out.gone.append(name)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="names of files, as test_infill (default: all)"
    )
    parser.add_argument("--folder", type=Path, help="keep tests, models, logs and reports here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if not (folder / "models").exists():
            unpack(folder)
        good, counts = True, Counter[str]()
        for file in options.files or files(folder / "llama.cpp"):
            found = run(folder, file)
            counts.update(found.values())
            compared = compare(found, file)
            good = good and compared.as_expected
            print(f"{file}: {dict(Counter(found.values()))}", flush=True)
            for name in compared.new:
                print(f"  fails, and nothing says why: {name}")
            for name in compared.gone:
                print(f"  passes, take it off the exceptions: {name}")
        print(dict(counts))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
