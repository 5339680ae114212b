"""`mixedkv info`: shows a model's layers and heads, and the size of each cache."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from itertools import product
from textwrap import wrap
from typing import Any

from mixedkv.cli.words import add, add_place, add_switch, flags, one_model, positive, tokens
from mixedkv.config import PRESETS, parse_kv
from mixedkv.context_choice import fitting_context
from mixedkv.model.footprint import ModelShape, Sliding, footprint, model_shape
from mixedkv.model.gguf_file import DEFAULT_N_CTX, ModelFile, default_n_ctx, read_model_file, weight_type
from mixedkv.model.layer_plan import Shares
from mixedkv.model.measured_shares import read_shares
from mixedkv.model.named_model import HELP as MODEL_HELP
from mixedkv.model.named_model import find_model
from mixedkv.model.resolve_budget import resolve_budget
from mixedkv.native.llama_arguments import beyond_training
from mixedkv.native.memory import memory_room
from mixedkv.sizes import format_bytes
from mixedkv.terminal import printable

_WIDTH = 76  # characters of a line of text, without its margin
_SERVED = 16  # sequences of the server, of which half run
_SERVED_WINDOWS = Sliding(n_windows=_SERVED // 2)
_SETTINGS = ("f16", "q8_0", "q4_0", *(f"mixed:{preset}" for preset in reversed(PRESETS)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show a model's layers and heads, and the bytes of each cache setting. Loads nothing."
    )
    add(parser, flags("model"), "MODEL", MODEL_HELP)
    add_place(parser, nargs="?")
    text = f"contexts (default: {DEFAULT_N_CTX} or the model's)"
    add(parser, flags("n_ctx"), "N", text, tokens, nargs="+")
    text = "how many sequences share the context (default: 1; the server has 16)"
    add(parser, "--sequences", "N", text, positive, nargs="+", default=[1])
    add(parser, "--kv", "SPEC", "caches to compare", nargs="+", default=_SETTINGS)
    text = "file that `bench sensitivity --json` wrote, for caches with a budget: mixed:budget=2GiB"
    add(parser, "--shares", "FILE", text)
    add_switch(parser, "--json", "print JSON")
    parser.set_defaults(command=info)


def info(args: argparse.Namespace) -> None:
    file = read_model_file(find_model(one_model(args)))
    shape = model_shape(file)
    contexts = [n_ctx or default_n_ctx(file) for n_ctx in args.n_ctx or [0]]
    sizes = list(product(contexts, args.sequences))
    shares = read_shares(args.shares) if args.shares else None
    report = _report(file, shape, shares, args.kv, sizes)
    print(json.dumps(report, indent=2) if args.json else "\n".join(_lines(report, sizes)))


def _report(
    file: ModelFile,
    shape: ModelShape,
    shares: Shares | None,
    specs: Iterable[str],
    sizes: list[tuple[int, int]],
) -> dict[str, Any]:
    served = fitting_context(file, None, _SERVED, _SERVED // 2)
    return {
        "model": {
            "path": str(file.path),
            "name": shape.name,
            "architecture": shape.architecture,
            "bytes": file.size,
            "quantization": weight_type(file),
            "n_params": sum(math.prod(tensor.shape) for tensor in file.tensors),
            "chat_template": bool(file.metadata.get("tokenizer.chat_template")),
            "n_ctx_train": shape.n_ctx_train,
            "n_layer": shape.n_layer,
            "n_head": list(shape.n_head),
            "sliding_window": shape.window,
            "layers": [
                {"il": x.il, "n_head_kv": x.n_head_kv, "head_size_k": x.head_k, "head_size_v": x.head_v}
                for x in shape.layers
            ],
        },
        "n_ctx": sizes[0][0],
        "computed_by": "formula",
        "bytes_free": memory_room(),
        "serve": None if served is None else {"choice": str(served), "warnings": list(served.warnings)},
        "caches": [_cache(file, shape, shares, spec, *size) for spec in specs for size in sizes],
    }


def _cache(
    file: ModelFile, shape: ModelShape, shares: Shares | None, spec: str, n_ctx: int, n_seq: int
) -> dict[str, Any]:
    kv = resolve_budget(parse_kv(spec), shape, n_ctx, n_seq, shares)
    size = footprint(shape, kv, n_ctx, n_seq)
    f16 = footprint(shape, parse_kv("f16"), n_ctx, n_seq).bytes
    longest = fitting_context(file, parse_kv(spec), n_seq) if f16 else None
    return {
        "kv": spec,
        **({"setting": str(kv)} if kv != parse_kv(spec) else {}),
        "n_ctx": n_ctx,
        "sequences": n_seq,
        "bytes": size.bytes,
        "bytes_served": _served(shape, shares, spec, n_ctx),
        "bytes_view": size.view,
        "bits_per_element": round(size.bits_per_element, 3),
        "saving": round(1 - size.bytes / f16, 4) if f16 else 0.0,
        "longest_n_ctx": None if longest is None else longest.n_ctx,
    }


def _served(shape: ModelShape, shares: Shares | None, spec: str, n_ctx: int) -> int | None:
    """Return the bytes of what a server has, None where it cannot have this cache."""
    try:
        kv = resolve_budget(parse_kv(spec), shape, n_ctx, _SERVED, shares, sliding=_SERVED_WINDOWS)
        return footprint(shape, kv, n_ctx, _SERVED, _SERVED_WINDOWS).bytes
    except ValueError:  # its budget is too small
        return None


def _lines(report: dict[str, Any], sizes: list[tuple[int, int]]) -> Iterable[str]:
    model = report["model"]
    yield f"model    {printable(model['name'])} ({model['architecture']}, {format_bytes(model['bytes'])})"
    chats = "with a chat template" if model["chat_template"] else "no chat template: a base model"
    yield f"weights  {model['quantization']}, {model['n_params'] / 1e6:,.0f} million; {chats}"
    yield f"layers   {_layers_text(model)}"
    yield f"heads    {_spread(model['n_head'])} query, {_kv_heads(model['layers'])}"
    yield f"context  {model['n_ctx_train']} tokens in training"
    yield ""
    yield from _table(report["caches"], *sizes[0]) if len(sizes) == 1 else _matrix(report["caches"], sizes)
    for n_ctx in sorted({n_ctx for n_ctx, _ in sizes}):
        if text := beyond_training(n_ctx, model["n_ctx_train"], {}):
            yield f"  {text}."
    if any(cache["saving"] < 0 for cache in report["caches"]):
        yield "  Loading narrows the window of a cache above F16."
    if (room := report["bytes_free"]) is not None and len(sizes) == 1:
        yield f"  Longest: tokens that fit into the {format_bytes(room)} that are free now, beside weights"
        yield "  and compute buffers, up to what the model was trained with."
    if view := max(cache["bytes_view"] for cache in report["caches"]):
        yield f"  Mixed and in an accelerator's memory: up to {format_bytes(view)} more to read it."
    if len(sizes) == 1:
        yield f"  Bits: of an element of K or V. Served: {_SERVED} sequences, {_SERVED // 2} at a time."
    if (served := report["serve"]) is not None:
        said = [f"`mixedkv serve` takes {served['choice']}."]
        said += [f"Warning: {text}." for text in served["warnings"]]
        yield from (f"  {line}" for text in said for line in wrap(text, _WIDTH))
    if model["sliding_window"]:
        yield f"  Layers with a sliding window keep rows of {model['sliding_window']} tokens and a step's."


def _table(caches: list[dict[str, Any]], n_ctx: int, n_seq: int) -> Iterable[str]:
    shared = f" that {n_seq} sequences share" if n_seq > 1 else ""
    yield f"KV cache for {n_ctx} tokens{shared}, by formula: nothing was loaded or allocated"
    yield f"  {'--kv':<26}{'size':>11}{'bits':>7}{'below F16':>11}{'served':>11}{'longest':>11}"
    for cache in caches:
        size, bits = format_bytes(cache["bytes"]), f"{cache['bits_per_element']:.2f}"
        longest = "" if (n := cache["longest_n_ctx"]) is None else f"{n:,}"
        served = "" if (n := cache["bytes_served"]) is None else format_bytes(n)
        yield f"  {cache['kv']:<26}{size:>11}{bits:>7}{cache['saving']:>11.0%}{served:>11}{longest:>11}"
        if "setting" in cache:
            yield f"    --kv {cache['setting']}"


def _matrix(caches: list[dict[str, Any]], sizes: list[tuple[int, int]]) -> Iterable[str]:
    yield "Bits per element, by formula: nothing was loaded or allocated"
    yield f"  {'tokens':<32}" + "".join(f"{n_ctx:>8}" for n_ctx, _ in sizes)
    yield f"  {'sequences':<32}" + "".join(f"{n_seq:>8}" for _, n_seq in sizes)
    for i in range(0, len(caches), len(sizes)):
        bits = (cache["bits_per_element"] for cache in caches[i : i + len(sizes)])
        yield f"  {caches[i]['kv']:<32}" + "".join(f"{x:>8.2f}" for x in bits)


def _layers_text(model: dict[str, Any]) -> str:
    with_cache = len(model["layers"])
    return (
        f"{model['n_layer']}, "
        + ("all" if with_cache == model["n_layer"] else str(with_cache))
        + " with a KV cache"
    )


def _kv_heads(layers: list[dict[str, Any]]) -> str:
    sizes = {size for layer in layers for size in (layer["head_size_k"], layer["head_size_v"])}
    return f"{_spread(layer['n_head_kv'] for layer in layers)} KV of size {_spread(sizes)}"


def _spread(values: Iterable[int]) -> str:
    low, *_, high = sorted({*values} or {0}) * 2
    return str(low) if low == high else f"{low} to {high}"
