"""Write what the wheel holds besides mixedkv: the licences, and a software bill of materials (CycloneDX).

CMake runs this when it configures, after fetch.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from fetch import Pin, VendorError, read_pin, tomllib

CONDITIONAL = frozenset({"libstdc++"})
"""Components that only some builds hold: those named with --with."""


def read_components(vendor: Path) -> list[dict[str, str]]:
    contents = tomllib.loads((vendor / "contents.toml").read_text(encoding="utf-8"))
    return list(contents["component"])


def find_file(name: str, roots: list[Path]) -> Path:
    for root in roots:
        if (root / name).is_file():
            return root / name
    raise VendorError(f"vendor/contents.toml names {name}, which is in none of {', '.join(map(str, roots))}")


def licence_text(component: dict[str, str], roots: list[Path]) -> str:
    """Return the licence: a file, or the lines of it from `first` to the next `last`."""
    text = find_file(component["text"], roots).read_text(encoding="utf-8")
    if "first" not in component:
        return text
    lines = text.splitlines()
    try:
        first = lines.index(component["first"])
        last = lines.index(component["last"], first)
    except ValueError:
        raise VendorError(
            f"{component['text']} has no longer the lines at which the licence of {component['name']} begins "
            "and ends: mend vendor/contents.toml"
        ) from None
    return "\n".join(lines[first : last + 1]) + "\n"


def version_of(component: dict[str, str], roots: list[Path], known: dict[str, str]) -> str:
    """Return the version, "" where the files do not say any."""
    if "version_in" not in component:
        return known.get(component["name"], "")
    match = re.search(
        component["version"], find_file(component["version_in"], roots).read_text(encoding="utf-8")
    )
    if match is None:
        raise VendorError(
            f"{component['version_in']} does not say the version of {component['name']} any more"
        )
    return ".".join(match.groups())


def bill_of_materials(version: str, pin: Pin, components: list[tuple[dict[str, str], str]]) -> dict[str, Any]:
    """Return the SBOM of mixedkv `version` as CycloneDX 1.6, the same for the same contents."""
    listed = []
    for component, its_version in components:
        entry: dict[str, Any] = {"type": "library", "name": component["name"]}
        if its_version:
            entry["version"] = its_version
        entry["licenses"] = [{"expression": component["licence"]}]
        if component["name"] == pin.package:
            entry["hashes"] = [{"alg": "SHA-256", "content": pin.sha256}]  # of the source distribution
            entry["purl"] = f"pkg:pypi/{pin.package}@{pin.version}"
        if "url" in component:
            entry["externalReferences"] = [{"type": "website", "url": component["url"]}]
        listed.append(entry)
    subject = {
        "type": "library",
        "name": "mixedkv",
        "version": version,
        "licenses": [{"expression": "MIT"}],
        "purl": f"pkg:pypi/mixedkv@{version}",
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": listed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--vendor", type=Path, default=here, help="folder of contents.toml and pin.toml")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="the llama.cpp that was fetched")
    parser.add_argument("--layer", type=Path, required=True, help="the Python layer that was fetched")
    parser.add_argument("--version", required=True, help="of mixedkv")
    parser.add_argument("--pybind11", default="", help="version of pybind11")
    parser.add_argument("--with", dest="parts", nargs="*", default=[], choices=sorted(CONDITIONAL))
    parser.add_argument(
        "--dest", type=Path, required=True, help="folder made anew, for licenses/ and mixedkv.cdx.json"
    )
    options = parser.parse_args()
    try:
        pin = read_pin(options.vendor)
        roots = [options.llama_cpp, options.layer.parent, options.vendor]
        known = {
            "llama.cpp": pin.llama_cpp_commit,
            "llama-cpp-python": pin.version,
            "pybind11": options.pybind11,
        }
        held = []
        shutil.rmtree(options.dest, ignore_errors=True)
        (options.dest / "licenses").mkdir(parents=True)
        for component in read_components(options.vendor):
            if component["name"] in CONDITIONAL and component["name"] not in options.parts:
                continue
            text = licence_text(component, roots)
            (options.dest / "licenses" / component["name"]).write_text(text, encoding="utf-8")
            held.append((component, version_of(component, roots, known)))
        bill = bill_of_materials(options.version, pin, held)
        (options.dest / "mixedkv.cdx.json").write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    except VendorError as error:
        print(f"vendor/contents.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
