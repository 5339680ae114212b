"""What of llama.cpp `cpp/llama` repeats or takes for granted, as hashes: has upstream changed any of it?

copied.toml lists functions of the patched source. Where a new upstream version, or a patch, changes one,
tests/python/core/test_upstream.py fails until somebody has compared it with our side and accepted it.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIST = Path(__file__).with_name("copied.toml")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Functions of upstream that one place of ours rests on."""

    what: str
    ours: str  # file: function
    upstream: str  # file of llama.cpp
    functions: tuple[str, ...]  # how each begins, up to where that is unique in the file
    test: str  # what would notice, besides
    sha256: str

    def hash_of(self, tree: Path) -> str:
        """The hash of these functions, without comments and spaces; "" if one of them is not there once."""
        path = tree / self.upstream
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        bodies = [_body(text, begin) for begin in self.functions]
        return hashlib.sha256("\n".join(bodies).encode()).hexdigest() if all(bodies) else ""


def _body(text: str, begin: str) -> str:
    """From `begin`, at the start of a line, to the brace that closes the function: the next there."""
    pieces = f"\n{text}".split(f"\n{begin}")
    end = re.search(r"^\}", pieces[-1], re.MULTILINE)
    if len(pieces) != 2 or not end:
        return ""
    return "".join(_COMMENT.sub("", begin + pieces[1][: end.start()]).split())


def read_list() -> list[Copied]:
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["copied"]
    return [Copied(**{**entry, "functions": tuple(entry["functions"])}) for entry in entries]


def find_changed(tree: Path) -> list[Copied]:
    return [copied for copied in read_list() if copied.hash_of(tree) != copied.sha256]


def describe(copied: Copied) -> str:
    functions = ", ".join(" ".join(function.split()) for function in copied.functions)
    changed = f"{functions} of {copied.upstream} has changed"
    return f"{copied.what}: {changed}; compare {copied.ours}, see {copied.test}"


def accept(tree: Path) -> None:
    """Write the hashes of this source into the list."""
    text = LIST.read_text(encoding="utf-8")
    for copied in find_changed(tree):
        found = copied.hash_of(tree)
        if not found:
            raise SystemExit(f"{describe(copied)}: not found once; mend `functions` first")
        head, tail = text.split(f'what = "{copied.what}"\n')
        text = f'{head}what = "{copied.what}"\n' + tail.replace(f'"{copied.sha256}"', f'"{found}"', 1)
    LIST.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="llama.cpp with the series applied, as fetch.py makes it")
    parser.add_argument("--accept", action="store_true", help="our side has been compared: take these hashes")
    options = parser.parse_args()
    if options.accept:
        accept(options.tree)
    changed = find_changed(options.tree)
    for copied in changed:
        print(describe(copied), file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
