"""Bytes of the default cache beside those of llama.cpp's, by formula: nothing is allocated.

    python tests/measure/cache_bytes.py [MODEL.gguf ...]

`run` is one sequence. `serve` is what `mixedkv serve` and `llama-server` have unless told otherwise: 16
sequences of which 8 run, and 4. llama.cpp's layers with a sliding window have room for the windows, too.
"""

from __future__ import annotations

import sys

from mixedkv.config import parse_kv
from mixedkv.model.footprint import WINDOWED, LayerShape, ModelShape, Sliding, footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from mixedkv.model.resolve_budget import fit_window
from mixedkv.sizes import format_bytes

CONTEXTS = 8192, 32768, 131072
SERVED, THEIRS = 16, 4
SERVED_WINDOWS = Sliding(n_windows=8)


def shape(name: str, n_layer: int, n_head_kv: int, head: int, window: int = 0, period: int = 1) -> ModelShape:
    """Return a model of equal layers; the last of every `period` has no window."""
    layers = tuple(
        LayerShape(il, n_head_kv, head, head, slides=window > 0 and il % period != period - 1)
        for il in range(n_layer)
    )
    return ModelShape(name, name, n_layer, (n_head_kv,) * n_layer, CONTEXTS[-1], window, layers)


SHAPES = (
    shape("Gemma 3 270M", 18, 1, 256, 512, 6),
    shape("Gemma 3 4B", 34, 4, 256, 1024, 6),
    shape("gpt-oss 20B", 24, 8, 64, 128, 2),
    shape("Llama 3.2 1B", 16, 8, 64),
    shape("Llama 3.1 8B", 32, 8, 128),
    shape("Qwen3 8B", 36, 8, 128),
)


def n_bytes(model: ModelShape, kv: str, n_ctx: int, n_seq: int = 1, sliding: Sliding = WINDOWED) -> int:
    setting = fit_window(parse_kv(kv), model, n_ctx, n_seq, sliding=sliding)
    return footprint(model, setting, n_ctx, n_seq, sliding).bytes


def main(files: list[str]) -> None:
    models = [model_shape(read_model_file(file)) for file in files] or SHAPES
    print("| model | tokens | | mixed | f16 | q8_0 | of f16 | of q8_0 | balanced | of q8_0 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for model in models:
        for n_ctx in CONTEXTS:
            for how, seqs, sliding, theirs in (
                ("run", 1, WINDOWED, 1),
                ("serve", SERVED, SERVED_WINDOWS, THEIRS),
            ):
                ours, balanced = (
                    n_bytes(model, kv, n_ctx, seqs, sliding) for kv in ("mixed", "mixed:balanced")
                )
                f16, q8_0 = (n_bytes(model, kv, n_ctx, theirs) for kv in ("f16", "q8_0"))
                sizes = " | ".join(format_bytes(size) for size in (ours, f16, q8_0))
                shares = f"{ours / f16:.2f} | {ours / q8_0:.2f}"
                print(
                    f"| {model.name} | {n_ctx:,} | {how} | {sizes} | {shares} | {format_bytes(balanced)} | "
                    f"{balanced / q8_0:.2f} |"
                )


if __name__ == "__main__":
    main(sys.argv[1:])
