"""How far a device's logits are from the CPU's, for caches with all layers on it.

python device_logits.py              a model of the tests, random tokens
python device_logits.py smollm2      or another model, a text
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from mixedkv import Llama
from mixedkv.model.named_model import find_measured_model
from support.cache.harness import Ctx, Mixed, Model, Uniform, prompt, rel_rms
from support.models import zoo

TEXT = "The keeper of the lighthouse wrote the name of each ship into a book that nobody read. " * 12
ALL, N_PROMPT, N_SINGLE = 99, 160, 16


def caches() -> dict[str, Mixed | Uniform]:
    mixed = Mixed(threshold=40, group=8, sinks=4)
    res: dict[str, Mixed | Uniform] = {
        f"mixed, cold {t}": mixed.with_(k=t, v=t) for t in ("f16", "q8_0", "q4_0")
    }
    return res | {t: Uniform(k=t, v=t) for t in ("f16", "q8_0", "q4_0")}


def evaluate(model: Model, kv: Mixed | Uniform, tokens: list[int]) -> np.ndarray:
    with Ctx(model, kv, n_threads=2) as ctx:
        first = ctx.decode(tokens[:N_PROMPT])
        return np.concatenate([first, *(ctx.decode([token]) for token in tokens[N_PROMPT:])]).astype(
            np.float64
        )


def divergence(want: np.ndarray, got: np.ndarray) -> float:
    """Mean divergence of next tokens, in nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (want, got))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if len(sys.argv) > 1:
            path = find_measured_model(sys.argv[1])
            with Llama(path, vocab_only=True, verbose=False) as llm:
                tokens = llm.tokenize(TEXT.encode())
        else:
            path, tokens = zoo.write("llama-64", Path(folder)), prompt(N_PROMPT + N_SINGLE)
        cpu, device = Model(path, n_gpu_layers=0), Model(path, n_gpu_layers=ALL)
        print("| cache | RMS, of the logits' spread | divergence | same likeliest token |\n|---|---|---|---|")
        for name, kv in caches().items():
            want, got = (evaluate(model, kv, tokens[: N_PROMPT + N_SINGLE]) for model in (cpu, device))
            same = np.mean(want.argmax(-1) == got.argmax(-1))
            print(
                f"| {name} | {rel_rms(got, want):.1e} | {divergence(want, got):.1e} | {same:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
