"""What reading both tiers in place saves on a device: bytes by count, buffers, and times beside other caches.

python in_place.py                           bytes of attention for a token, by formula
MIXEDKV_IN_PLACE=1 python in_place.py --model random.gguf     and memory and times, on this device

Times are medians of rounds in which the caches take turns. On a device in software (Mesa's lavapipe) they say
nothing of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain

from mixedkv import Llama
from mixedkv.config.mixed import type_bits
from mixedkv.sizes import format_bytes

DEPTHS = (4096, 32_768, 131_072)
CACHES = {
    "f16": "f16",
    "q4_0": "q4_0",
    "merged": "mixed:attention=merged",
    "in place": "mixed",
}


def counted(n: int, n_embd: int, n_hot: int) -> dict[str, int]:
    """Return the bytes that one layer's attention reads and writes for one token behind `n` others.

    Args:
        n_embd: elements of a row of K, and of one of V.
        n_hot: F16 rows of the ring and of the micro-batch, padding among them.
    """
    f16, cold = (int(2 * n_embd * type_bits(kind) / 8) for kind in ("f16", "q4_0"))
    return {
        "f16": n * f16,
        "q4_0": n * cold,
        # rows become F16, hot ones are copied beside them, and attention reads them all
        "merged": n * cold + n * f16 + 2 * n_hot * f16 + (n + n_hot) * f16,
        "in place": n * cold + n_hot * f16,
    }


def formula(args: argparse.Namespace) -> Iterator[str]:
    yield f"| one layer, {args.n_head_kv} KV heads of {args.head_size}; times f16 | {' | '.join(CACHES)} |"
    yield "|---|" + "---|" * len(CACHES)
    for n in DEPTHS:
        bytes_ = counted(n, args.n_head_kv * args.head_size, args.n_hot)
        cells = [f"{format_bytes(bytes_[name])}, {bytes_[name] / bytes_['f16']:.2f}" for name in CACHES]
        yield f"| {n:,} | {' | '.join(cells)} |"


def seconds(llm: Llama, tokens: list[int], n_gen: int) -> tuple[float, float]:
    """Return how long a prompt takes, and then each token behind it."""
    llm.reset()
    began = time.perf_counter()
    llm.eval(tokens)
    prompt = time.perf_counter() - began
    began = time.perf_counter()
    for i in range(n_gen):
        llm.eval([3 + i % 40])
    return prompt, (time.perf_counter() - began) / n_gen


def open_all(args: argparse.Namespace, n_ctx: int, stack: ExitStack) -> dict[str, Llama]:
    options = {"n_ctx": n_ctx, "n_gpu_layers": -1, "flash_attn": True, "verbose": False}
    return {name: stack.enter_context(Llama(args.model, kv=kv, **options)) for name, kv in CACHES.items()}


def memory(args: argparse.Namespace, n_ctx: int) -> Iterator[str]:
    """Yield what contexts take; nothing is evaluated."""
    with ExitStack() as stack:
        stats = {name: llm.kv.stats() for name, llm in open_all(args, n_ctx, stack).items()}
    cells = [format_bytes(each.bytes_total - each.bytes_view) for each in stats.values()]
    yield f"| {n_ctx:,} tokens: cache | {' | '.join(cells)} |"
    cells = [format_bytes(each.bytes_compute) for each in stats.values()]
    yield f"| compute buffers, the view among them | {' | '.join(cells)} |"


def times(args: argparse.Namespace) -> Iterator[str]:
    tokens = [3 + i % 40 for i in range(args.n_prompt)]
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in CACHES}
    with ExitStack() as stack:
        llms = open_all(args, args.n_prompt + 512, stack)
        for _ in range(args.repeats):
            for name, llm in llms.items():
                rounds[name].append(seconds(llm, tokens, args.n_gen))
    for i, label in enumerate((f"a prompt of {args.n_prompt:,}", "a token behind it")):
        took = {name: statistics.median(each[i] for each in rounds[name]) for name in CACHES}
        cells = [f"{took[name]:.3f} s, {took['f16'] / took[name]:.2f}" for name in CACHES]
        yield f"| {label}: time, rate times f16 | {' | '.join(cells)} |"


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--model", help="a GGUF file, all layers of which go to the device")
    parser.add_argument("--n-head-kv", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--n-hot", type=int, default=544, help="F16 rows, padding among them")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=(4096, 32_768), help="whose memory is said"
    )
    parser.add_argument("--n-prompt", type=int, default=4096, help="times of this; 0: none")
    parser.add_argument("--n-gen", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("\n".join(formula(args)), flush=True)
    if args.model:
        print(f"\n| | {' | '.join(CACHES)} |\n|---|" + "---|" * len(CACHES), flush=True)
        lines = [memory(args, n_ctx) for n_ctx in args.contexts]
        for line in chain(*lines, times(args) if args.n_prompt else ()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
