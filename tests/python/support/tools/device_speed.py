"""How fast a device is with each cache at several depths, with all layers on it, and what memory that takes.

python tests/python/support/tools/random_model.py random.gguf --kind q4_0 --n-layer 16 --n-embd 2048 \
    --n-head 16 --n-head-kv 8 --n-ff 6144
python tests/python/support/tools/device_speed.py random.gguf --kv f16 --kv q4_0 --kv mixed

A cache is filled once up to the last depth. At each depth a prompt of 512 tokens and then tokens one by one
are timed. The caches take turns, every other round in reverse order, and the first round is thrown away.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from pathlib import Path

import mixedkv
from mixedkv_bench.arguments import depths, number
from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.contexts import MICRO_BATCH, Context, LoadedModel

MIB = 1 << 20


class Device:
    """The first GPU that llama.cpp knows."""

    def __init__(self) -> None:
        package = Path(mixedkv.__file__).parent / "_llama_cpp_python/llama_cpp/lib"
        self._ggml = ctypes.CDLL(str(next(package.glob("libggml-base.*"))))
        registry = ctypes.CDLL(str(next(package.glob("libggml.*"))))
        registry.ggml_backend_dev_by_type.restype = ctypes.c_void_p
        self._device = registry.ggml_backend_dev_by_type(1)  # GGML_BACKEND_DEVICE_TYPE_GPU
        if not self._device:
            raise SystemExit("no device: this build has no GPU, or finds none")

    def used(self) -> int:
        """Bytes that are taken, by whom ever."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._ggml.ggml_backend_dev_memory(
            ctypes.c_void_p(self._device), ctypes.byref(free), ctypes.byref(total)
        )
        return total.value - free.value


def run(context: Context, at: tuple[int, ...], n_gen: int) -> list[tuple[float, float]]:
    """Seconds of the prompt and of the tokens after it, at each depth."""
    context.clear()
    seconds = []
    for depth in at:
        context.feed(context.model.random_tokens(depth - context.n_past, seed=depth + 1))
        prompt, tokens = (context.model.random_tokens(n, seed=2) for n in (MICRO_BATCH, n_gen + 1))
        start = time.perf_counter()
        context.decode(prompt)
        read = time.perf_counter() - start
        context.decode(tokens[:1])  # a graph of another shape
        start = time.perf_counter()
        for i in range(1, n_gen + 1):
            context.decode(tokens[i : i + 1])
        seconds.append((read, time.perf_counter() - start))
    return seconds


def show(title: str, settings: list[Setting], rates: list[list[float]]) -> None:
    """One row per cache: the median, and how often the first cache's within a round."""
    print(f"| {title} | tok/s | x {settings[0].name} |\n|---|---|---|")
    for setting, own in zip(settings, rates, strict=True):
        ratio = statistics.median(a / b for a, b in zip(own, rates[0], strict=True))
        print(f"| {setting.name} | {statistics.median(own):,.0f} | {ratio:.2f} |")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="FILE")
    parser.add_argument("--kv", action="append", required=True, metavar="SPEC")
    parser.add_argument("--depths", type=depths, default=(0, 4096, 16384, 32768), metavar="N,N")
    parser.add_argument("--n-gen", type=number(1), default=64, metavar="N")
    parser.add_argument("--rounds", type=number(1), default=3, metavar="N")
    args = parser.parse_args()
    device, model, settings = Device(), LoadedModel(args.model), make_settings(args.kv, "on")
    n_ctx = max(args.depths) + MICRO_BATCH + args.n_gen + 1
    contexts = []
    print(f"| {n_ctx} tokens | attention | cache, MiB | all on the device, MiB |\n|---|---|---|---|")
    for setting in settings:
        before = device.used()
        context = Context(model, setting, n_ctx=n_ctx, threads=1)
        run(context, args.depths, args.n_gen)
        facts = context.facts()
        took = (device.used() - before) / MIB
        print(f"| {setting.name} | {facts['attention']} | {facts['kv_bytes'] / MIB:,.0f} | {took:,.0f} |")
        contexts.append(context)
    print(flush=True)
    rounds = []
    for no in range(args.rounds):
        order = range(len(contexts))[:: -1 if no % 2 else 1]
        by_no = {i: run(contexts[i], args.depths, args.n_gen) for i in order}
        rounds.append([by_no[i] for i in range(len(contexts))])
    for i_depth, depth in enumerate(args.depths):
        for part, (name, n) in enumerate(((f"prompt of {MICRO_BATCH}", MICRO_BATCH), ("tokens", args.n_gen))):
            rates = [[n / each[i][i_depth][part] for each in rounds] for i in range(len(contexts))]
            show(f"{name} at {depth:,}", settings, rates)


if __name__ == "__main__":
    main()
