"""Find real text on this machine: reference prose, narrative, code and dialogue.

Prose and code come with Python. Narrative and dialogue come with packages of the extra `real`. What the text
is depends on the versions installed, so a text has a hash that results carry.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

_MODULES = (
    "argparse", "tarfile", "inspect", "difflib", "pickle", "subprocess", "optparse", "shutil", "typing",
    "logging", "configparser", "threading", "statistics", "heapq", "textwrap", "csv", "fractions", "random",
)  # fmt: skip
_ROOMS = ("1", "2", "5", "6")  # sections of the game's data: places in full, in short, things, messages
_TALKS = (  # tech_support and coding say the same lines many times
    "conversations", "ai", "computers", "emotion", "humor", "literature", "money", "movies", "politics",
    "psychology", "science", "sports", "trivia", "food", "gossip", "history",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RealText:
    """A text with its kind and its source."""

    kind: str
    source: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.kind}: {self.source}, sha256 {self.sha256[:12]}"


def read_real_text(kind: str) -> RealText:
    """Return the text of a kind in `KINDS`.

    Raises:
        ValueError: the package that carries the text is not installed.
    """
    return _READERS[kind]()


def read_text(given: str) -> tuple[str, str]:
    """Return a text given as a file or as a kind in `KINDS`, and what it is: a kind's source and hash.

    A file in the current folder comes before a kind of the same name.

    Raises:
        ValueError: the file is not UTF-8, or the package that carries the text is not installed.
        OSError: the file cannot be read.
    """
    if given in _READERS and not Path(given).exists():
        found = read_real_text(given)
        return found.text, str(found)
    try:
        text = Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{given} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return text, str(RealText(Path(given).name, "a file", text))


def _prose() -> RealText:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return RealText("prose", f"pydoc_data.topics of {_python()}", text)


def _code() -> RealText:
    text = "\n\n".join(filter(None, map(_source, _MODULES)))
    return RealText("code", f"{len(_MODULES)} modules of {_python()}", text)


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    loader = spec.loader if spec else None
    return (loader.get_source(module) or "") if isinstance(loader, InspectLoader) else ""


def _narrative() -> RealText:
    """Read the game's text, which is in capitals, in lower case with an initial capital for each sentence."""
    [path] = _files("adventure", "narrative", ("advent.dat",))
    sections = path.read_text(encoding="utf-8").split("\n-1\n")
    text = "\n\n".join(part for section in sections for part in _paragraphs(section.strip().splitlines()))
    return RealText("narrative", _package("adventure"), text)


def _paragraphs(lines: list[str]) -> Iterator[str]:
    if not lines or lines[0] not in _ROOMS:
        return
    parts: dict[str, list[str]] = {}
    for line in lines[1:]:
        number, _, text = line.partition("\t")
        parts.setdefault(number, []).append(" ".join(text.split()))
    for part in parts.values():
        sentences = " ".join(part).lower().split(". ")
        text = ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)
        if len(text) > 3 and ">$<" not in text:
            yield text.replace(" i ", " I ").replace(" i'", " I'")


def _dialogue() -> RealText:
    try:
        import yaml
    except ModuleNotFoundError:
        raise _not_installed("dialogue", "pyyaml") from None
    paths = _files("chatterbot-corpus", "dialogue", [f"english/{name}.yml" for name in _TALKS])
    talks: dict[str, None] = {}  # of several equal ones the first
    for path in paths:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        for talk in content["conversations"]:
            turns = [" ".join(str(turn).split()) for turn in talk]
            talks["\n".join(f"{'AB'[i % 2]}: {turn}" for i, turn in enumerate(turns))] = None
    return RealText("dialogue", _package("chatterbot-corpus"), "\n\n".join(talks))


def _files(package: str, kind: str, ends: Iterable[str]) -> list[Path]:
    """Return the installed files of a package with these ends of their paths, those that it has."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    by_end = {end: file for end in ends for file in files if str(file).endswith(f"/{end}")}
    paths = [Path(str(file.locate())) for file in by_end.values()]
    if not paths:
        raise _not_installed(kind, package)
    return paths


def _not_installed(kind: str, package: str) -> ValueError:
    return ValueError(f"text of kind {kind} needs the package {package}: run pip install 'mixedkv[real]'")


def _package(name: str) -> str:
    return f"{name} {metadata.version(name)}"


def _python() -> str:
    return f"Python {platform.python_version()}"


_READERS = {"prose": _prose, "narrative": _narrative, "code": _code, "dialogue": _dialogue}
KINDS = tuple(_READERS)
