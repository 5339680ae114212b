"""Count right answers of a real model by what was reused: a fact in one of four passages of real text.

Each passage was evaluated alone and stored. The prompt has them in another order, and asks for one fact.
An answer is right if it has the fact's number. "full" evaluates the whole prompt.

python tests/measure/kvboost/accuracy_by_reuse.py -m smollm2:f16 [--kvboost PYTHON] [--cases N]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

from kvboost_peer import KVBoost

from mixedkv import Llama
from mixedkv.chunks.gate import follow
from mixedkv.chunks.repair import Method
from mixedkv.engine import PromptCache
from mixedkv.model.named_model import find_measured_model
from mixedkv.store import KVStore
from mixedkv.tokens import Tokens, as_tokens
from mixedkv_bench.harness.real_text import read_real_text
from mixedkv_bench.harness.summary import wilson

_PLACES = ("mill", "barn", "shed", "tower", "chapel", "harbour", "garden", "cellar", "bridge", "stable")
_METHODS = ("none", "seam", "cacheblend", "query")
_N_TOKENS, _N_ANSWER = 110, 12
_SYSTEM = "<|im_start|>system\nAnswer the question from the passages.<|im_end|>\n<|im_start|>user\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2:f16")
    parser.add_argument("--kv", default="mixed:cold=q8_0")
    parser.add_argument("--kvboost", metavar="PYTHON", help="of an environment with kvboost")
    parser.add_argument("--cases", type=int, default=24)
    args = parser.parse_args()
    path = find_measured_model(args.model)
    right = dict.fromkeys(("full", *_METHODS, *(["kvboost"] if args.kvboost else [])), 0)
    reused = dict.fromkeys(right, 0.0)
    with ExitStack() as stack:
        llm = stack.enter_context(
            Llama(path, kv=args.kv, n_ctx=2048, n_threads=1, n_threads_batch=1, verbose=False)
        )
        peer = stack.enter_context(KVBoost(args.kvboost, path, 1)) if args.kvboost else None
        for stored, prompt, number in _cases(llm, args.cases):
            for name, (share, answer) in _answers(llm, stored, prompt).items():
                right[name] += number in answer
                reused[name] += share
            if peer is not None:
                found = peer.measure(prompt, stored, _N_ANSWER)
                right["kvboost"] += number in llm.detokenize(found["tokens"]).decode(errors="replace")
                reused["kvboost"] += found["reused"]
    print("method      reused  right")
    for name, n in right.items():
        low, high = wilson(n, args.cases)
        print(f"{name:<10}  {reused[name] / args.cases:>6.0%}  {n} of {args.cases} ({low:.0%} to {high:.0%})")


def _cases(llm: Llama, n: int) -> Iterator[tuple[list[Tokens], Tokens, str]]:
    text = llm.tokenize(read_real_text("narrative").text.encode(), add_bos=False)
    for seed in range(n):
        random = Random(seed)
        places, passages, facts = random.sample(_PLACES, 4), [], []
        for place in places:
            at = random.randrange(len(text) - _N_TOKENS)
            number = str(random.randrange(1000, 10000))
            fact = f"\nThe code of the {place} is {number}.\n"
            half = _N_TOKENS // 2
            middle = llm.tokenize(fact.encode(), add_bos=False)
            passages.append([*text[at : at + half], *middle, *text[at + half : at + _N_TOKENS]])
            facts.append(number)
        which = random.randrange(4)
        question = f"\nWhat is the code of the {places[which]}?<|im_end|>\n<|im_start|>assistant\n"
        question += f"The code of the {places[which]} is"
        head = llm.tokenize(_SYSTEM.encode(), add_bos=True, special=True)
        tail = llm.tokenize(question.encode(), add_bos=False, special=True)
        order = random.sample(passages, 4)
        prompt = [*head, *(token for each in order for token in each), *tail]
        yield [as_tokens(each) for each in passages], as_tokens(prompt), facts[which]


def _answers(llm: Llama, stored: list[Tokens], prompt: Tokens) -> dict[str, tuple[float, str]]:
    found = {}
    with KVStore(None, max_ram_bytes=2**32) as store:
        for each in stored:
            _clear(llm)
            llm.eval(each.tolist())
            store.save(llm)
        cache = PromptCache(llm, store, reuse="chunks", repair="none", check=0.0)
        for name in ("full", *_METHODS):
            _clear(llm)
            if name == "full":
                reuse = cache.prefill(prompt, reuse="exact")
            else:
                reuse = cache.prefill(prompt, method=Method(repair=name))
            text = llm.detokenize(follow(llm, _N_ANSWER)[0]).decode(errors="replace")
            found[name] = reuse.kv_reuse_ratio, text
    return found


def _clear(llm: Llama) -> None:
    llm.reset()
    llm.kv.clear()


if __name__ == "__main__":
    main()
