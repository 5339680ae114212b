"""Replay a real conversation turn by turn in this package and in KVBoost, on the same weights and token ids.

Each turn has all turns before it in its prompt, and those are stored when it comes. What is measured is the
time to the first token beside that of evaluating the whole prompt in the same program, what was reused, and
whether the eight tokens that follow are those of that evaluation. The answers are the corpus's own.

python tests/measure/kvboost/beside_kvboost.py -m smollm2:f16 [--kvboost PYTHON] [--kv SPEC] [--turns N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
from kvboost_peer import KVBoost

from mixedkv import Llama
from mixedkv.chunks.gate import compare, follow
from mixedkv.engine import PromptCache
from mixedkv.model.named_model import find_measured_model
from mixedkv.store import KVStore
from mixedkv.tokens import Tokens, as_tokens
from mixedkv_bench.harness.real_text import read_real_text

_N_ANSWER = 8
_LINES_A_TURN = 8  # of the corpus, four of each side
_SYSTEM = "<|im_start|>system\nYou are a helpful assistant. Answer in one sentence.<|im_end|>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2:f16")
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--kvboost", metavar="PYTHON", help="of an environment with kvboost")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    path = find_measured_model(args.model)
    with ExitStack() as stack:
        threads = {"n_threads": args.threads, "n_threads_batch": args.threads}
        llm = stack.enter_context(Llama(path, kv=args.kv, n_ctx=4096, verbose=False, **threads))
        peer = stack.enter_context(KVBoost(args.kvboost, path, args.threads)) if args.kvboost else None
        print(
            "turn  tokens  program           first token   of cold  reused  KLD of the first  same 8 tokens"
        )
        for turn, (stored, prompt) in enumerate(_turns(llm, args.turns), 1):
            if turn == 1:  # the first evaluation of a process reads the weights
                _measure(llm, stored, prompt)
                if peer is not None:
                    peer.measure(prompt, [], _N_ANSWER)
            ours = _measure(llm, stored, prompt)
            _show(turn, len(prompt), f"mixedkv {args.kv}", *ours)
            if peer is not None:
                found = peer.measure(prompt, [stored] if len(stored) else [], _N_ANSWER)
                same = found["tokens"] == found["tokens_cold"]
                times = found["seconds"], found["seconds_cold"]
                _show(
                    turn, len(prompt), f"kvboost {peer.version}", *times, found["reused"], found["kld"], same
                )


def _turns(llm: Llama, n: int) -> Iterator[tuple[Tokens, Tokens]]:
    """The tokens before each turn, and with its question."""
    lines = [line for line in read_real_text("dialogue").text.splitlines() if line.strip()]
    text = _SYSTEM
    for turn in range(n):
        part = lines[turn * _LINES_A_TURN : (turn + 1) * _LINES_A_TURN]
        said = "\n".join(part[:-1])
        asked = f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
        yield _ids(llm, text) if turn else as_tokens([]), _ids(llm, text + asked)
        text += f"{asked}{part[-1]}<|im_end|>\n"


def _ids(llm: Llama, text: str) -> Tokens:
    return as_tokens(llm.tokenize(text.encode(), add_bos=True, special=True))


def _measure(llm: Llama, stored: Tokens, prompt: Tokens) -> tuple[float, float, float, float, bool]:
    """Seconds to the first token with and without what is stored, the share reused, its divergence, and
    whether what follows is the same.
    """
    with KVStore(None, max_ram_bytes=2**32) as store:
        cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
        _clear(llm)
        begin = time.perf_counter()
        cache.prefill(prompt, reuse="exact")
        cold = time.perf_counter() - begin
        tokens, logits = follow(llm, _N_ANSWER)
        _clear(llm)
        if len(stored):
            llm.eval(stored.tolist())
            store.save(llm)
            _clear(llm)
        cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
        begin = time.perf_counter()
        reuse = cache.prefill(prompt, reuse="exact")
        seconds = time.perf_counter() - begin
        found, others = follow(llm, _N_ANSWER)
    kld = max(0.0, compare(logits[0], others[0]).kld)
    return seconds, cold, reuse.kv_reuse_ratio, kld, bool(np.array_equal(tokens, found))


def _clear(llm: Llama) -> None:
    llm.reset()
    llm.kv.clear()


def _show(
    turn: int, n: int, name: str, seconds: float, cold: float, reused: float, kld: float, same: bool
) -> None:
    times = f"{1e3 * seconds:>8.0f} ms  {seconds / cold:>8.0%}"
    print(
        f"{turn:>4}  {n:>6}  {name:<16}  {times}  {reused:>6.0%}  {kld:>16.1e}  {'yes' if same else 'no'}",
        flush=True,
    )


if __name__ == "__main__":
    main()
