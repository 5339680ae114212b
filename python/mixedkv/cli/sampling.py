"""Options that say how text is sampled, of `mixedkv run` and `mixedkv chat`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mixedkv.cli.values import between, integer, temperature, whole
from mixedkv.engine.sample.sampling import sampling_defaults
from mixedkv.limits import RANGES
from mixedkv.model.gguf_file import read_model_file

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")


_OPTIONS = (
    ("--temp", "T", temperature, "temperature; 0 is the likeliest token"),
    ("--top-k", "K", whole, "sample from the K likeliest tokens; 0 is all"),
    (
        "--top-p",
        "P",
        between(*RANGES["top_p"]),
        "sample from the likeliest tokens that together have this probability",
    ),
    ("--min-p", "P", between(*RANGES["min_p"]), "drop tokens less than P times as likely as the likeliest"),
    ("--repeat-penalty", "X", between(*RANGES["repeat_penalty"]), "penalty of repeated tokens; 1 is none"),
    ("--seed", "N", integer, "seed of the sampler, for the same text again (default: another each time)"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling", "default: what the model's file recommends (general.sampling.*), else llama-server's"
    )
    for flag, metavar, kind, text in _OPTIONS:
        group.add_argument(flag, metavar=metavar, type=kind, help=text)


def sampling_options(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return the sampling arguments of `Llama.create_completion` for a model."""
    defaults = sampling_defaults(read_model_file(path).metadata)
    options: dict[str, Any] = {"seed": args.seed}
    for name in _NAMES:
        given = args.temp if name == "temperature" else getattr(args, name)
        value = defaults.get(name) if given is None else given
        if value is not None:
            options[name] = value
    return options
