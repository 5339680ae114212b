"""`mixedkv calibrate`: the bases that a model's values are stored in, from what they are on some text."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mixedkv.bench.harness import sample_text
from mixedkv.cli.model import quiet
from mixedkv.cli.values import positive
from mixedkv.errors import UnsupportedModelError
from mixedkv.llama import Llama
from mixedkv.model.footprint import model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.value_bases import BLOCK, ValueBasis, write_bases

_SEED = 90_000
_LEAST_TOKENS = 512  # so many values of 128 elements say something about all directions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluate some text and write, beside the model, the bases that cold_v=lm3 stores its values in."
    )
    parser.add_argument("-m", "--model", metavar="FILE", required=True, help="GGUF model")
    parser.add_argument("--text", metavar="FILE", help="text as the model will read (a generated sample)")
    parser.add_argument("--tokens", metavar="N", type=positive, default=8192, help="default: 8192")
    parser.add_argument("--n-ctx", metavar="N", type=positive, default=2048, help="of a part (default: 2048)")
    parser.add_argument("--threads", metavar="N", type=positive, help="CPU threads")
    parser.set_defaults(command=calibrate)


def calibrate(args: argparse.Namespace) -> None:
    text = None if args.text is None else Path(args.text).read_text(encoding="utf-8")
    _check_heads(args.model)
    with (
        quiet(True),
        Llama(args.model, kv="f16", n_ctx=args.n_ctx, n_threads=args.threads, verbose=False) as llm,
    ):
        tokens = _tokens(llm, text, args.tokens)
        bases = measure(llm, tokens)
    path = write_bases(args.model, bases, len(tokens))
    print(f"{path}: bases of the values of {len(bases)} layers, from {len(tokens)} tokens")
    print("to use them: --kv mixed:cold_k=lm4,cold_v=lm3")


def measure(llm: Llama, tokens: list[int]) -> dict[int, ValueBasis]:
    """Bases by layer from the values of tokens, which are evaluated in parts of a context."""
    moments: dict[int, np.ndarray] = {}
    for first in range(0, len(tokens), llm.n_ctx()):
        part = tokens[first : first + llm.n_ctx()]
        llm.reset()  # type: ignore[no-untyped-call]
        llm.eval(part)
        for layer in llm.kv.layers:
            values = llm.kv.layer(layer.il).v(basis="model").astype(np.float64).transpose(1, 2, 0)
            moments[layer.il] = moments.get(layer.il, 0.0) + values @ values.transpose(0, 2, 1)
    return {il: ValueBasis.of(moment / len(tokens)) for il, moment in moments.items()}


def _tokens(llm: Llama, text: str | None, n: int) -> list[int]:
    def tokenize(part: str) -> list[int]:
        return llm.tokenize(part.encode(), special=text is None)

    if text is None:
        text = sample_text.document(_SEED, n, lambda part: len(tokenize(part)), chat=False)
    tokens = tokenize(text)[:n]
    if len(tokens) < _LEAST_TOKENS:
        raise ValueError(f"the text has {len(tokens)} tokens: use one of {_LEAST_TOKENS} at least")
    return tokens


def _check_heads(model: str) -> None:
    for layer in model_shape(read_model_file(model)).layers:
        if not layer.head_v or layer.head_v % BLOCK:
            raise UnsupportedModelError(
                f"layer {layer.il} has heads with values of {layer.head_v} elements, and lm3 packs {BLOCK}: "
                f"use another cold_type_v"
            )
