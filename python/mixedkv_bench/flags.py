"""Flags of `mixedkv bench`, by name. Which of them a test has is said in its module."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

from mixedkv.chunks.chunk_reuse import REPAIRS
from mixedkv.cli.values import memory
from mixedkv.limits import CELLS
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.real_text import KINDS
from mixedkv.streaming.layer_choice import Asked, parse_layers
from mixedkv_bench.harness.filling import FILLS
from mixedkv_bench.harness.reuse_cases import DONOR_KINDS, WORKLOADS
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.streaming import MODES as STREAM_MODES

QUALITY_MODES = get_args(QualityRow.model_fields["mode"].annotation)
N_PROMPT = {"store": 4096, "reuse": 1700, "serve": 1024, "fleet": 1024}  # others 512
COMMON = ("--model", "--kv", "--threads", "--json", "--plot")  # of every test


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str], test: str) -> None:
    """Declare the flags of a test, and give the parser the defaults of all others.

    Args:
        parser: the test's.
        names: its flags; --peer brings --no-peer.
        test: its name, since tokens of a prompt have a default of their own in some.
    """
    for flag, options in _FLAGS.items():
        name = flag.removeprefix("--").replace("-", "_")
        if flag in names:
            short = ("-m",) if flag == "--model" else ()
            parser.add_argument(*short, flag, **{**options, "help": _help(flag, options, test)})
        else:
            parser.set_defaults(**{name: options.get("default")})
    if "--peer" in names:
        parser.add_argument("--no-peer", dest="peer", action="store_false", help="measure no peer")


def _help(flag: str, options: dict[str, Any], test: str) -> str:
    default = f" ({N_PROMPT.get(test, 512)})" if flag == "--n-prompt" else ""
    return str(options["help"]) + default


def number(least: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number, `least` or more."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return read


def depths(text: str) -> tuple[int, ...]:
    """Parse "0,4096" to (0, 4096)."""
    return tuple(sorted({number(0)(part.strip()) for part in text.split(",")}))


def clients(text: str) -> tuple[int, ...]:
    """Parse "1,8" to (1, 8)."""
    return tuple(sorted({number(1)(part.strip()) for part in text.split(",")}))


def bits(text: str) -> tuple[float, ...]:
    """Parse "5,6.5" to (5.0, 6.5)."""
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 5,6.5") from None


def nats(text: str) -> float:
    """Parse a positive divergence."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of nats")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Parse "1GiB,2GiB" to bytes."""
    return tuple(sorted({memory(part) for part in text.split(",")}))


def stream_layers(text: str) -> Asked:
    """Return a type for argparse: layers to stream."""
    try:
        return parse_layers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _some(choices: Iterable[str], what: str) -> dict[str, Any]:
    return {"choices": tuple(choices), "action": "append", "help": f"{what}; repeat for more (all)"}


_FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "MODEL", "help": MODEL_HELP},
    "--kv": {"metavar": "SPEC", "action": "append", "help": "cache to compare; repeat for more"},
    "--flash-attn": {
        "choices": ("both", "on", "off"),
        "default": "both",
        "help": "flash attention, where it is a choice (both)",
    },
    "--text": {"metavar": "TEXT", "help": f"a file, or {', '.join(KINDS)} (a generated sample)"},
    "--depths": {"metavar": "N,N", "type": depths, "help": "tokens before the measured ones"},
    "--n-ctx": {
        "metavar": "N",
        "type": number(CELLS),
        "help": "tokens of the context (quality 4096, recall 2048, others what they need)",
    },
    "--threads": {"metavar": "N", "type": number(1), "help": "CPU threads (all)"},
    "--repeats": {
        "metavar": "N",
        "type": number(1),
        "default": 5,
        "help": "rounds, documents or journals (5)",
    },
    "--n-prompt": {"metavar": "N", "type": number(1), "help": "tokens of a prompt"},
    "--n-gen": {"metavar": "N", "type": number(1), "default": 32, "help": "tokens generated (32)"},
    "--n-new": {"metavar": "N", "type": number(1), "default": 32, "help": "tokens of a message (32)"},
    "--turns": {"metavar": "N", "type": number(1), "default": 10, "help": "turns of a conversation (10)"},
    "--sequences": {
        "metavar": "N",
        "type": number(1),
        "default": 1,
        "help": "sequences, each at the depth (1)",
    },
    "--fill": {"choices": FILLS, "default": "auto", "help": "how a depth is reached (auto)"},
    "--busy": {
        "metavar": "N",
        "type": number(0),
        "default": 0,
        "help": "processes that only compute, to keep the machine busy (0)",
    },
    "--mode": {
        "choices": (*QUALITY_MODES, "both"),
        "default": "both",
        "help": "evaluate in large batches, or token by token (both)",
    },
    "--budget": {"metavar": "SIZE", "type": memory, "help": "memory for the cache, e.g. 2GiB"},
    "--bits": {
        "metavar": "N,N",
        "type": bits,
        "default": (5.0, 6.0, 7.0),
        "help": "bits per element of the cold rows (5,6,7)",
    },
    "--clients": {
        "metavar": "N,N",
        "type": clients,
        "default": (1, 2, 4, 8),
        "help": "clients at a time (1,2,4,8)",
    },
    "--replicas": {
        "metavar": "N,N",
        "type": clients,
        "default": (2, 4),
        "help": "servers, on Ray Serve (2,4)",
    },
    "--memory": {
        "metavar": "SIZE,SIZE",
        "type": sizes,
        "default": (),
        "help": "memory limits of the process, e.g. 1GiB,2GiB",
    },
    "--stream-layers": {
        "metavar": "HOW",
        "type": stream_layers,
        "default": "auto",
        "help": "auto, all, ffn, a number, or keep_first=8,keep_last=2 (auto)",
    },
    "--stream-mode": _some(STREAM_MODES, "how layers are read"),
    "--peer": {
        "nargs": "?",
        "const": True,
        "metavar": "PROGRAM",
        "help": "also measure the stock llama_cpp or its server (serve), or this llama-bench, "
        "llama-sweep-bench or llama-server",
    },
    "--peer-kv": {
        "metavar": "SPEC",
        "action": "append",
        "help": "the peer's caches; repeat for more (as --kv)",
    },
    "--folder": {"metavar": "DIR", "type": Path, "help": "where files are written (a temporary one)"},
    "--remote": {"metavar": "URL", "help": "a server that keeps KV too: redis://... or s3://..."},
    "--workload": _some(WORKLOADS, "kind of prompts"),
    "--donor": _some(DONOR_KINDS, "what the rows were evaluated after"),
    "--repair": _some(REPAIRS, "how seams are repaired"),
    "--documents": {
        "metavar": "N",
        "type": number(2),
        "default": 5,
        "help": "passages that a prompt is made of (5)",
    },
    "--calibrate": {
        "action": "store_true",
        "default": False,
        "help": "try more methods, and write what was found into the store in --folder",
    },
    "--max-kld": {
        "metavar": "NATS",
        "type": nats,
        "default": 0.25,
        "help": "largest median divergence of a calibrated method (0.25)",
    },
    "--kvboost": {
        "metavar": "PYTHON",
        "default": "",
        "help": "Python of an environment with kvboost: measure it too",
    },
    "--draft-model": {
        "metavar": "FILE",
        "type": Path,
        "help": "GGUF file of a smaller model, which drafts as well",
    },
    "--json": {"metavar": "FILE", "type": Path, "help": "write the rows"},
    "--plot": {"metavar": "DIR", "type": Path, "help": "write pictures (needs matplotlib)"},
}
