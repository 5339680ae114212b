"""Reads the flags of `mixedkv bench`. What can be wrong with them is found here, before a model is loaded."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from mixedkv.bundled import model_path
from mixedkv.chunks.chunk_reuse import REPAIRS
from mixedkv.errors import UnsupportedModelError
from mixedkv.limits import CELLS
from mixedkv.model.footprint import ModelShape, model_shape
from mixedkv.model.gguf_file import ModelFile, n_layers, read_model_file
from mixedkv.model.named_model import find_model
from mixedkv.real_text import read_text
from mixedkv_bench.catalog import TESTS
from mixedkv_bench.flags import COMMON, N_PROMPT, QUALITY_MODES, add_flags
from mixedkv_bench.harness.cache_settings import DEFAULT_SPECS, Setting, make_settings
from mixedkv_bench.harness.reuse_cases import DONOR_KINDS, WORKLOADS
from mixedkv_bench.options import Options
from mixedkv_bench.streaming import MODES as STREAM_MODES

_ALL = tuple(name for name, test in TESTS.items() if test.in_all)
_SPECS = {
    "reuse": ("mixed:cold=q8_0", "mixed"),
    "sensitivity": ("mixed",),
    "fleet": ("mixed",),
    "streaming": ("mixed",),
    "serve": ("f16", "mixed"),
    "split": ("f16", "mixed"),
}  # without --kv, where it is not DEFAULT_SPECS
_DEPTHS = (0, 4096, 16384)
_N_CTX = 4096  # of quality
_N_CTX_RECALL = 2048  # the bundled model answers few questions from further back, whatever its cache


def check(args: argparse.Namespace) -> Options:
    """Check the options before anything is measured."""
    settings = _settings(args)
    file = read_model_file(find_model(args.model))
    shape = _shape(file)
    tests = _tests(args.test, file)
    text, source = (None, "generated") if args.text is None else read_text(args.text)
    _check_outputs(args.json, args.plot)
    if args.folder is not None:
        _check_writable(args.folder, f"--folder {args.folder}")
    n_prompt = args.n_prompt or N_PROMPT.get(args.test, 512)
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
        modes=QUALITY_MODES if args.mode == "both" else (args.mode,),
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
    """Add a parser for each test, with the flags that the test reads."""
    tests = parser.add_subparsers(title="tests", required=True, metavar="TEST", dest="test")
    for name in ("quick", *_ALL, "all", *(name for name in TESTS if name not in (*_ALL, "quick"))):
        measures = f"{', '.join(_ALL)}, one after the other" if name == "all" else TESTS[name].measures
        each = tests.add_parser(name, help=measures, description=f"Measure {measures}.")
        each.epilog = f"Caches without --kv: {', '.join(_specs(name))}. The rows: docs/bench-schema.md."
        add_flags(each, (*COMMON, *_flags(name)), name)


def _flags(test: str) -> tuple[str, ...]:
    return tuple(flag for name in (_ALL if test == "all" else (test,)) for flag in TESTS[name].flags)


def _specs(test: str) -> tuple[str, ...]:
    return _SPECS.get(test, DEFAULT_SPECS)


def _settings(args: argparse.Namespace) -> list[Setting]:
    flash_attn = args.flash_attn
    if "--flash-attn" not in _flags(args.test):  # the server's: it uses it where the cache needs it
        flash_attn = "off"
    elif args.test == "quick" and flash_attn == "both":
        flash_attn = "on"
    return make_settings(args.kv or _specs(args.test), flash_attn)


def _peer_settings(args: argparse.Namespace, settings: list[Setting]) -> tuple[Setting, ...]:
    """Return the settings that llama.cpp knows."""
    if args.peer_kv is None:
        return tuple(setting for setting in settings if setting.is_peer)
    asked = make_settings(args.peer_kv, "off" if args.test == "serve" else args.flash_attn)
    if unknown := [setting.spec for setting in asked if not setting.is_peer]:
        raise ValueError(f"--peer-kv {unknown[0]}: a peer knows uniform caches such as f16 and q8_0")
    return tuple(asked)


def _tests(asked: str, file: ModelFile) -> tuple[str, ...]:
    """Return the tests to run. For a model of one's own "all" leaves out recall, which asks what the bundled
    model was taught.
    """
    if asked != "all":
        return (asked,)
    return _ALL if file.path == model_path() else tuple(test for test in _ALL if test != "recall")


def _shape(file: ModelFile) -> ModelShape:
    """Return the model's shape, without layers where its cache is of a kind that has no formula."""
    try:
        return model_shape(file)
    except UnsupportedModelError:
        name = str(file.metadata.get("general.name", file.path.name))
        n_layer, n_ctx = n_layers(file), int(file.get("context_length", 0))
        return ModelShape(file.architecture, name, n_layer, (), n_ctx, 0, ())


def _depths(asked: tuple[int, ...] | None, n_new: int, longest: int) -> tuple[int, ...]:
    """Return the depths. Each must leave room for the tokens measured there; default depths that do not are
    dropped.
    """
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
    """Check that output files can be written, so that an hour of measuring does not end in an error."""
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
