"""What `sparse` reads and loses while a model decodes, token by token, the end of a text.

python tests/measure/sparse_loss.py smollm2:f16 --n-ctx 8192 --kv f16 --kv mixed \
    --kv mixed:sparse=eps:0.05

Each cache is compared with the first one and with `mixed`.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from mixedkv import Llama
from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.real_text import read_real_text

LogProbs = npt.NDArray[np.float32]


def decode(model: str, kv: str, text: str, n_ctx: int, n_new: int, n_threads: int) -> tuple[LogProbs, float]:
    """Return log-probabilities `[n_new, vocabulary]` of the last tokens, and the share of the pages read."""
    llm = Llama(str(find_measured_model(model)), kv=kv, n_ctx=n_ctx, n_threads=n_threads, verbose=False)
    tokens = llm.tokenize(read_real_text(text).text.encode())[: n_ctx - 8]
    llm.eval(tokens[:-n_new])
    rows = []
    for token in tokens[-n_new:]:
        llm.eval([token])
        logits = np.array(llm._ctx.get_logits()[: llm.n_vocab()], np.float64)
        rows.append((logits - np.logaddexp.reduce(logits)).astype(np.float32))
    share = llm.kv.stats().pages_read
    llm.close()
    return np.array(rows), share


def compare(reference: LogProbs, found: LogProbs) -> str:
    """Return mean and median divergence in nats, and how often the likeliest token is the same."""
    divergence = (np.exp(reference.astype(np.float64)) * (reference - found)).sum(1)
    same = (reference.argmax(1) == found.argmax(1)).mean()
    return f"{divergence.mean():.1e}, {np.median(divergence):.1e}, {same:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--kv", action="append", required=True)
    parser.add_argument("--text", default="prose", help="prose, code or dialogue")
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--n-new", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    found = {}
    print("| cache | pages read | KLD from the first: mean, median, same top-1 | from mixed |")
    print("|---|---|---|---|")
    for kv in options.kv:
        found[kv], share = decode(
            options.model, kv, options.text, options.n_ctx, options.n_new, options.threads
        )
        first = compare(found[options.kv[0]], found[kv])
        mixed = compare(found["mixed"], found[kv]) if "mixed" in found else ""
        print(f"| {kv} | {share:.1%} | {first} | {mixed} |", flush=True)


if __name__ == "__main__":
    main()
