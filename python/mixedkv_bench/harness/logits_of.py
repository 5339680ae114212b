"""Evaluates a document in a process of its own, and writes its logits. So two evaluations can differ in
environment variables that are read once.

python -m mixedkv_bench.harness.logits_of MODEL KV on|off batch|token THREADS TOKENS.npy OUT.npy
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from mixedkv_bench.harness.cache_settings import make_settings
from mixedkv_bench.harness.contexts import MICRO_BATCH, Context, LoadedModel


def main(model: str, kv: str, flash: str, mode: str, threads: str, tokens: str, out: str) -> None:
    """Write the logits [n - 1, n_vocab] of n tokens, all but the last one's."""
    document = np.load(tokens)
    [setting] = make_settings([kv], flash)
    step = MICRO_BATCH if mode == "batch" else 1
    with closing(LoadedModel(Path(model))) as loaded:
        rows = np.empty((len(document) - 1, loaded.n_vocab), np.float32)
        with closing(Context(loaded, setting, n_ctx=len(document), threads=int(threads))) as context:
            for i in range(0, len(rows), step):
                part = document[i : min(i + step, len(rows))]
                context.decode(part, outputs="all")
                rows[i : i + len(part)] = context.logits(len(part))
    np.save(out, rows)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
