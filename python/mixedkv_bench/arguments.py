"""Flags of `mixedkv bench`. What can be wrong with them is found here, before a model is loaded."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from mixedkv.bundled import model_path
from mixedkv.chunks.chunk_reuse import REPAIRS
from mixedkv.cli.values import memory
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import CELLS
from mixedkv.model.footprint import ModelShape, model_shape
from mixedkv.model.gguf_file import ModelFile, n_layers, read_model_file
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.model.named_model import find_model
from mixedkv.real_text import KINDS, read_text
from mixedkv.streaming.layer_choice import Asked, parse_layers
from mixedkv_bench.catalog import TESTS
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, Setting, make_settings
from mixedkv_bench.harness.filling import FILLS
from mixedkv_bench.harness.reuse_cases import DONOR_KINDS, WORKLOADS
from mixedkv_bench.options import Options
from mixedkv_bench.quality import QualityRow
from mixedkv_bench.streaming import MODES as STREAM_MODES

_MODES = get_args(QualityRow.model_fields["mode"].annotation)
_ALL = tuple(name for name, test in TESTS.items() if test.in_all)
_SPECS = {"reuse": ("mixed:cold=q8_0", "mixed"), "sensitivity": ("mixed",)}
_SERVE_SPECS = ("f16", "mixed")
_N_PROMPT = {"store": 4096, "reuse": 1700, "serve": 1024, "fleet": 1024}
_DEPTHS = (0, 4096, 16384)
_N_CTX = 4096  # of quality
_N_CTX_RECALL = 2048  # the bundled model answers few questions from further back, whatever its cache


def check(args: argparse.Namespace) -> Options:
    """Raises ValueError or OSError, whose message says what to change."""
    settings = _settings(args)
    file = read_model_file(find_model(args.model))
    shape = _shape(file)
    tests = _tests(args.test, file)
    text, source = (None, "generated") if args.text is None else read_text(args.text)
    _check_outputs(args.json, args.plot)
    if args.folder is not None:
        _check_writable(args.folder, f"--folder {args.folder}")
    n_prompt = args.n_prompt or _N_PROMPT.get(args.test, 512)
    longest = args.n_ctx or shape.n_ctx_train or max(_DEPTHS) + n_prompt
    options = Options(
        tests=tests,
        file=file,
        shape=shape,
        settings=tuple(setting.settled(shape) for setting in settings),
        depths=_depths(args.depths, max(n_prompt, args.n_gen + 1), longest),
        n_ctx=_n_ctx(args.n_ctx, _N_CTX, shape.n_ctx_train),
        n_ctx_recall=_n_ctx(args.n_ctx, _N_CTX_RECALL, shape.n_ctx_train),
        n_ctx_client=args.n_ctx,
        n_prompt=n_prompt,
        n_new=args.n_new,
        n_gen=args.n_gen,
        turns=args.turns,
        clients=args.clients,
        replicas=args.replicas,
        folder=args.folder,
        remote=args.remote,
        threads=args.threads or len(os.sched_getaffinity(0)),
        busy=args.busy,
        repeats=args.repeats,
        fill=args.fill,
        sequences=args.sequences,
        modes=_MODES if args.mode == "both" else (args.mode,),
        text=text,
        text_source=source,
        budget=args.budget,
        bits=args.bits,
        memory=args.memory,
        stream_layers=args.stream_layers,
        stream_modes=tuple(dict.fromkeys(args.stream_mode or STREAM_MODES)),
        peer=args.test == "serve" if args.peer is None else bool(args.peer),
        peer_path=Path(args.peer) if isinstance(args.peer, str) else None,
        peer_settings=_peer_settings(args, settings),
        workloads=tuple(dict.fromkeys(args.workload or WORKLOADS)),
        n_documents=args.documents,
        donors=tuple(dict.fromkeys(args.donor or DONOR_KINDS)),
        repairs=tuple(dict.fromkeys(args.repair or REPAIRS)),
        calibrate=args.calibrate,
        max_kld=args.max_kld,
        kvboost=args.kvboost,
        draft_model=args.draft_model,
        json=args.json,
        plot=args.plot,
    )
    for test in tests:
        TESTS[test].check(options)
    return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `check` reads."""
    parser.add_argument(
        "test",
        choices=("quick", *_ALL, "all", *(name for name in TESTS if name not in (*_ALL, "quick"))),
        help="what to measure; quick: in two minutes, which cache to use here",
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--kv", metavar="SPEC", action="append", help="cache to compare; again for more")
    parser.add_argument(
        "--flash-attn", choices=("both", "on", "off"), default="both", help="where it is a choice (both)"
    )
    parser.add_argument("--depths", metavar="N,N", type=depths, help="tokens before the measured ones")
    parser.add_argument(
        "--n-ctx", metavar="N", type=number(CELLS), help="context of quality (4096) and recall (2048)"
    )
    parser.add_argument("--threads", metavar="N", type=number(1), help="CPU threads (all)")
    parser.add_argument(
        "--busy", metavar="N", type=number(0), default=0, help="processes that only compute beside speed (0)"
    )
    parser.add_argument(
        "--repeats", metavar="N", type=number(1), default=5, help="rounds, documents, journals (5)"
    )
    parser.add_argument(
        "--n-prompt",
        metavar="N",
        type=number(1),
        help="tokens of a prompt (512, store 4096, reuse 1700, serve and fleet 1024)",
    )
    parser.add_argument("--n-gen", metavar="N", type=number(1), default=32, help="tokens generated (32)")
    parser.add_argument("--fill", choices=FILLS, default="auto", help="how a depth is reached (auto)")
    parser.add_argument(
        "--sequences", metavar="N", type=number(1), default=1, help="of speed, each at the depth (1)"
    )
    parser.add_argument("--mode", choices=(*_MODES, "both"), default="both", help="of quality (both)")
    parser.add_argument(
        "--text",
        metavar="TEXT",
        help=f"text for quality: a file, or {', '.join(KINDS)} (a generated sample)",
    )
    parser.add_argument("--budget", metavar="SIZE", type=memory, help="memory for the cache, e.g. 2GiB")
    parser.add_argument(
        "--bits",
        metavar="N,N",
        type=bits,
        default=(5.0, 6.0, 7.0),
        help="of cold rows, for sensitivity (5,6,7)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE,SIZE", type=sizes, default=(), help="limits of streaming, e.g. 1GiB,2GiB"
    )
    parser.add_argument(
        "--stream-layers",
        metavar="HOW",
        type=stream_layers,
        default="auto",
        help="of streaming: auto, all, ffn, a number, or keep_first=8,keep_last=2 (auto)",
    )
    parser.add_argument(
        "--stream-mode", choices=STREAM_MODES, action="append", help="of streaming; again for more (all)"
    )
    parser.add_argument(
        "--peer",
        nargs="?",
        const=True,
        metavar="PROGRAM",
        help="beside the stock llama_cpp or its server (serve), or a llama-bench, llama-sweep-bench or "
        "llama-server",
    )
    parser.add_argument(
        "--peer-kv", metavar="SPEC", action="append", help="the peer's caches; again for more (as --kv)"
    )
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="beside nobody")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write pictures (needs matplotlib)")
    kept = parser.add_argument_group("store, serve and fleet")
    kept.add_argument("--n-new", metavar="N", type=number(1), default=32, help="tokens of a message (32)")
    kept.add_argument("--turns", metavar="N", type=number(1), default=10, help="of a conversation (10)")
    kept.add_argument(
        "--clients", metavar="N,N", type=clients, default=(1, 2, 4, 8), help="at a time (1,2,4,8)"
    )
    kept.add_argument(
        "--replicas", metavar="N,N", type=clients, default=(2, 4), help="of a fleet, on Ray Serve (2,4)"
    )
    kept.add_argument("--folder", metavar="DIR", type=Path, help="where store writes (a temporary one)")
    kept.add_argument(
        "--remote",
        metavar="URL",
        help="a server that store and fleet keep KV on too: redis://... or s3://...",
    )
    reuse = parser.add_argument_group("reuse")
    reuse.add_argument(
        "--workload", choices=WORKLOADS, action="append", help="of prompts; again for more (all)"
    )
    reuse.add_argument(
        "--donor", choices=DONOR_KINDS, action="append", help="of the rows; again for more (all)"
    )
    reuse.add_argument("--repair", choices=REPAIRS, action="append", help="of seams; again for more (all)")
    reuse.add_argument(
        "--documents", metavar="N", type=number(2), default=5, help="that a prompt is made of (5)"
    )
    reuse.add_argument(
        "--calibrate", action="store_true", help="more methods, and what was found into the store in --folder"
    )
    reuse.add_argument(
        "--max-kld", metavar="NATS", type=nats, default=0.25, help="median a calibration allows (0.25)"
    )
    reuse.add_argument(
        "--kvboost", metavar="PYTHON", default="", help="of an environment with kvboost: measure it too"
    )
    speculation = parser.add_argument_group("speculation")
    speculation.add_argument(
        "--draft-model", metavar="FILE", type=Path, help="GGUF of a smaller model, which guesses as well"
    )


def number(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number, `least` or more."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return read


def depths(text: str) -> tuple[int, ...]:
    """ "0,4096" as (0, 4096)."""
    return tuple(sorted({number(0)(part.strip()) for part in text.split(",")}))


def clients(text: str) -> tuple[int, ...]:
    """ "1,8" as (1, 8)."""
    return tuple(sorted({number(1)(part.strip()) for part in text.split(",")}))


def bits(text: str) -> tuple[float, ...]:
    """ "5,6.5" as (5.0, 6.5)."""
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers such as 5,6.5") from None


def nats(text: str) -> float:
    """A positive divergence."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of nats")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """ "1GiB,2GiB" in bytes."""
    return tuple(sorted({memory(part) for part in text.split(",")}))


def stream_layers(text: str) -> Asked:
    """A type for argparse: layers to stream."""
    try:
        return parse_layers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _settings(args: argparse.Namespace) -> list[Setting]:
    """The server has no choice of flash attention: it uses it where the cache needs it."""
    if args.test not in ("serve", "fleet", "split", "streaming"):
        default = _SPECS.get(args.test, DEFAULT_SPECS)
        one_way = args.test == "quick" and args.flash_attn == "both"
        return make_settings(args.kv or default, "on" if one_way else args.flash_attn)
    if args.flash_attn == "on":
        raise ValueError(f"--flash-attn on is not a choice of {args.test}: leave it out")
    return make_settings(
        args.kv or (("mixed",) if args.test in ("fleet", "streaming") else _SERVE_SPECS), "off"
    )


def _peer_settings(args: argparse.Namespace, settings: list[Setting]) -> tuple[Setting, ...]:
    """Those that llama.cpp knows."""
    if args.peer_kv is None:
        return tuple(setting for setting in settings if setting.is_peer)
    asked = make_settings(args.peer_kv, "off" if args.test == "serve" else args.flash_attn)
    if unknown := [setting.spec for setting in asked if not setting.is_peer]:
        raise ValueError(f"--peer-kv {unknown[0]}: a peer knows uniform caches such as f16 and q8_0")
    return tuple(asked)


def _tests(asked: str, file: ModelFile) -> tuple[str, ...]:
    """ "all" of a model of one's own is all but recall, which asks what the bundled model was taught."""
    if asked != "all":
        return (asked,)
    return _ALL if file.path == model_path() else tuple(test for test in _ALL if test != "recall")


def _shape(file: ModelFile) -> ModelShape:
    """The model's shape, without layers where its cache is of a kind that has no formula."""
    try:
        return model_shape(file)
    except UnsupportedModelError:
        name = str(file.metadata.get("general.name", file.path.name))
        n_layer, n_ctx = n_layers(file), int(file.get("context_length", 0))
        return ModelShape(file.architecture, name, n_layer, (), n_ctx, 0, ())


def _depths(asked: tuple[int, ...] | None, n_new: int, longest: int) -> tuple[int, ...]:
    """Depths that leave room for the tokens measured there; the default ones are cut to those that do."""
    if asked is None:
        return tuple(depth for depth in _DEPTHS if depth + n_new <= longest) or (0,)
    if max(asked) + n_new > longest:
        raise ValueError(
            f"--depths {max(asked)} with {n_new} tokens after it is beyond the context of {longest} tokens: "
            f"use at most {longest - n_new}, or a larger --n-ctx"
        )
    return asked


def _n_ctx(asked: int | None, default: int, trained: int) -> int:
    n_ctx = asked or min(default, trained or default)
    return max(CELLS, n_ctx)


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    """An hour of measuring must not end in an error that could be seen at its start."""
    if json is not None:
        if json.is_dir():
            raise ValueError(f"--json {json} is a directory: give a file")
        _check_writable(json.parent, f"--json {json}")
    if plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ValueError("--plot needs matplotlib: run pip install 'mixedkv[plot]'") from None
        try:
            plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--plot {plot} cannot be made: {error.strerror}") from None
        _check_writable(plot, f"--plot {plot}")


def _check_writable(folder: Path, what: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {error.strerror}") from None
