"""CPU time of drawing one token, by llama.cpp and by `Draw`: python tests/measure/draws.py -m MODEL"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import Llama
from mixedkv.engine.sample.draw import Draw
from mixedkv.engine.sample.sampler import Sampler
from mixedkv.engine.sample.sampling import Sampling

TEXT = b"The quick brown fox jumps over the lazy dog and then goes home. In the beginning there was"
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature .7": {"temperature": 0.7},
    "top_p .95": {"temperature": 0.7, "top_p": 0.95},
    "min_p .05": {"temperature": 0.7, "min_p": 0.05},
    "top_k 40, top_p .95, min_p .05": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
}
SAME = {"dry_sequence_breakers": ("unused",)}  # changes no draw, and is not served by Draw


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", required=True)
    args = parser.parse_args()
    llm = Llama(args.model, n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    tokens = llm.tokenize(TEXT)
    llm.eval(tokens)
    rows = [np.array(llm.scores[i]) for i in range(len(tokens))]
    vocab = llama_cpp.llama_model_get_vocab(llm.model)
    print(f"{llm.n_vocab():,} tokens, ms a token | llama.cpp | here")
    for name, settings in SETTINGS.items():
        chain, draw = Sampler(vocab, Sampling(**settings, **SAME), 256), Draw(Sampling(**settings))
        took: dict[Any, list[float]] = {chain.choose: [], draw.choose: []}
        for row in rows * 3:
            for choose, times in took.items():
                begin = time.thread_time()
                choose(row)
                times.append(time.thread_time() - begin)
        print(name, *(f"{1e3 * statistics.mean(times):.2f}" for times in took.values()), sep=" | ")
    llm.close()


main()
