"""Declares options, reads their values, and names missing extras.

Words that people know from
other programs are further names of our options, or are told what to write instead.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeVar

from mixedkv.cli.llama_options import ABSENT, INSTEAD, OF_SERVER
from mixedkv.config import UniformKV, parse_kv
from mixedkv.limits import INT32_MAX, RANGES
from mixedkv.model.named_model import NAMES, PREFIX, is_hub_name
from mixedkv.nearest_word import did_you_mean
from mixedkv.sizes import GB, parse_duration, parse_size
from mixedkv.streaming.layer_choice import StreamLayers, parse_layers

T = TypeVar("T")
N = TypeVar("N", int, float)


def add(
    parser: Any,
    names: str | list[str],
    metavar: str,
    text: str,
    kind: Callable[[str], Any] = str,
    **more: Any,
) -> None:
    """Declare an option with a value, or an argument; a text may have several names."""
    all_names = names.split() if isinstance(names, str) else names
    parser.add_argument(*all_names, metavar=metavar, type=kind, help=text, **more)


def add_switch(parser: Any, name: str, text: str) -> None:
    """Declare an option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_n_predict(parser: Any, default: int = 128) -> None:
    """Declare -n, the maximum length of an answer."""
    text = f"most tokens to generate; -1 is as many as fit (default: {default})"
    add(parser, "-n --n-predict", "N", text, length, default=default)


def number(kind: Callable[[str], N], low: float, high: float, wrong: str) -> Callable[[str], N]:
    """Return a parser of numbers in a range; `wrong` is said of others."""

    def read(text: str) -> N:
        with contextlib.suppress(ValueError):
            if "_" not in text and low <= (value := kind(text)) <= high:
                return value
        raise ArgumentTypeError(f"{text!r}{wrong}")

    return read


_ANY = float("inf")
integer = number(int, -_ANY, _ANY, " is not a whole number")
whole = number(int, 0, INT32_MAX, " is not a whole number of 0 or more")
positive = number(int, 1, INT32_MAX, " is not a positive whole number")
layer_count = number(int, -1, INT32_MAX, " is not a number of layers: use 0 or more, or -1 for all")
decimal = number(float, -_ANY, _ANY, " is not a number")
last_n = number(int, -1, INT32_MAX, " is not a number of tokens: use 0 or more, or -1 for the whole context")


def length(text: str) -> int:
    """Parse the length of an answer; -1 is up to its end or that of the context."""
    try:
        return -1 if text == "-1" else positive(text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a number of tokens: use 1 or more, or -1 for all") from None


def between(low: float, high: float) -> Callable[[str], float]:
    """Return a parser of numbers in this range."""
    return number(float, low, high, f": use a number from {low:g} to {high:g}")


temperature = between(*RANGES["temperature"])


def layers(text: str) -> StreamLayers:
    """Parse the value of --stream-layers."""
    return _value(parse_layers, text)


def memory(text: str) -> int:
    """Parse the value of --memory and --budget."""
    return _value(parse_size, text)


def gigabytes(text: str) -> float:
    """Parse a size; a number without a unit is in 10^9 bytes."""
    return _value(lambda text: parse_size(text, GB, least=0), text) / GB


def duration(text: str) -> float:
    """Parse the value of --max-age and --older-than, and return seconds."""
    return _value(parse_duration, text)


def _value(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


@contextlib.contextmanager
def naming_the_extra(extra: str) -> Iterator[None]:
    """While inside, turn the error for a missing package into one that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("mixedkv"):
            raise
        raise ValueError(
            f"this command needs {error.name}, which is not installed: pip install 'mixedkv[{extra}]'"
        ) from None


# beside `--` and the name of a field
_SHORT = {
    "model": "-m",
    "model_name": "-a",
    "verbose": "-v",
    "n_ctx": "-c",
    "n_gpu_layers": "-ngl",
    "threads": "-t",
    "threads_batch": "-tb",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "parallel": "-np",
}
_LONG = {
    "model_name": "--alias",
    "n_ctx": "--ctx-size",
    "n_gpu_layers": "--gpu-layers",
    "n_batch": "--batch-size",
    "n_ubatch": "--ubatch-size",
}

_FIELD = re.compile(r"(?<![\w/.'\"=-])[a-z]+(?:_[a-z]+)+\b|(?:^|(?<=and ))[a-z]+(?==)", re.ASCII)
_THOUSANDS = re.compile(r"(\d{1,6})k", re.IGNORECASE | re.ASCII)


def flags(field: str) -> list[str]:
    """Return all names of an option; argparse calls it by the first long one, which is ours."""
    names = (_SHORT.get(field), "--" + field.replace("_", "-"), _LONG.get(field))
    return [name for name in names if name is not None]


def add_words(parser: ArgumentParser, model: type[argparse.Action] | str = "store") -> None:
    """Declare options of llama.cpp that say what others of ours say."""
    parser.add_argument(
        "-hf", "--hf-repo", metavar="REPO", dest="model", action=model, type=_of_hub, help="as -m hf:REPO"
    )
    for part in "kv":
        parser.add_argument(
            f"-ct{part}",
            f"--cache-type-{part}",
            metavar="TYPE",
            type=_row_type,
            help=f"as --kv TYPE, for {part.upper()}",
        )
    parser.add_argument(
        "--fit", dest="n_ctx", action="store_const", const=0, help="as many tokens as fit: the default"
    )
    parser.add_argument("--jinja", action="store_true", help=argparse.SUPPRESS)  # templates always are


def take_words(args: argparse.Namespace) -> None:
    """Put what `add_words` read into `kv`.

    Raises:
        ValueError: types and --kv are both given.
    """
    k, v = args.cache_type_k, args.cache_type_v
    if k is None and v is None:
        return
    if args.kv is not None:
        raise ValueError(f"--kv {args.kv} and -ctk or -ctv: give one of them")
    args.kv = f"{k or 'f16'}/{v or 'f16'}" if k != v else k


def tokens(text: str) -> int:
    """Parse a number of tokens, 32768 or 32k; 0 is the default."""
    if text == "0":
        return 0
    found = _THOUSANDS.fullmatch(text)
    try:
        return positive(str(int(found[1]) * 1024) if found else text)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"{text!r} is not a number of tokens: use e.g. 4096 or 32k") from None


def one_model(args: argparse.Namespace) -> str | None:
    """Return the model of a command that takes it with -m or in its place.

    Raises:
        ValueError: there are two.
    """
    option: str | None = args.model
    place: str | None = args.in_place
    if option is not None and place is not None:
        raise ValueError(f"two models are given, {option} and {place}: one is enough")
    return option if place is None else place


def is_model(text: str) -> bool:
    """Return whether a text is no prompt but a model: a GGUF file, there or not, or a name of one."""
    return len(text.split()) == 1 and (text.endswith(".gguf") or text in NAMES or is_hub_name(text))


def unknown(words: Iterable[str], known: Iterable[str], *, serves: bool = False) -> str:
    """Return what is said of arguments that a command does not have; of llama.cpp's, what to do instead.

    Args:
        serves: it is the command that serves.
    """
    words = list(words)
    word = next((each for each in words if each.startswith("-")), words[0])
    name = word.partition("=")[0]
    if instead := (OF_SERVER.get(name) if serves else None) or INSTEAD.get(name):
        return f"there is no {name}: {instead}"
    if not word.startswith("-"):
        return f"{word!r} is one argument too many"
    hint = did_you_mean(name, known)
    if name in ABSENT or (name in OF_SERVER and not hint):
        return f"there is no {name}: llama.cpp has it, and there is nothing like it here"
    return f"there is no option {name}{hint}"


def as_options(text: str, known: Container[str]) -> str:
    """Write the fields in an error's text as the options of a command: n_ctx=0 as --n-ctx=0."""

    def option(found: re.Match[str]) -> str:
        name = "--" + found[0].replace("_", "-")
        return name if name in known else found[0]

    return _FIELD.sub(option, text).replace("verbose=True", "--verbose")


def _row_type(text: str) -> str:
    try:
        setting = parse_kv(text)
    except ValueError:
        setting = None
    if not isinstance(setting, UniformKV) or "/" in text:
        raise ArgumentTypeError(f"{text!r} is no type of rows: use f16, q8_0 or q4_0, or --kv mixed for both")
    return text


def _of_hub(text: str) -> str:
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", text):
        raise ArgumentTypeError(f"{text!r}: write OWNER/REPO or OWNER/REPO:FILE")
    return PREFIX + text


def add_place(parser: ArgumentParser, **options: Any) -> None:
    """Declare a model that stands without -m."""
    parser.add_argument("in_place", metavar="MODEL", help="a model, as with -m", **options)
