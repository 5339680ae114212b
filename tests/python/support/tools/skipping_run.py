"""What `v_skip` leaves out, what that changes, and what time the attention kernel takes then.

    python tests/python/support/tools/skipping_run.py MODEL --v-skip 1e-6,1e-4

For models with the bundled one's vocabulary: a journal and questions about it. Tokens come one by one to a
cache without `v_skip` and to one with each EPS in turn. "A step" starts from the rows of the cache without;
"with drift" each cache goes on with the rows that it made itself, so that differences add up, those of sums
that are rounded otherwise too (1e-30 leaves nothing out that weighs, and shows them). Times are CPU time of a
token's attention nodes, one thread: medians and quartiles of its ratio to another cache without.
"""

from __future__ import annotations

from mixedkv import _core  # isort: skip  # before llama_cpp, which runs on the library that this loads

import argparse
import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp._ggml import libggml

from mixedkv_bench.harness.cache_settings import Setting, make_settings
from mixedkv_bench.harness.contexts import Context, LoadedModel
from mixedkv_bench.harness.sample_text import document
from mixedkv_bench.harness.summary import log_softmax

ggml_get_name = libggml.ggml_get_name
ggml_get_name.restype, ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]


class TimedContext(Context):
    """A context that knows how long the attention of its last token took.

    Attributes:
        attention: CPU seconds, all layers.
    """

    def __init__(self, model: LoadedModel, setting: Setting, n_ctx: int) -> None:
        self.attention = self._before = 0.0
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._node)
        super().__init__(model, setting, n_ctx=n_ctx, threads=1)

    def _init(self, params: Any) -> str:
        params.cb_eval = self._callback
        return super()._init(params)

    def _node(self, tensor: int, asks: bool, _data: object) -> bool:
        """Called before each node, and after it."""
        now = time.thread_time()
        if not asks and ggml_get_name(tensor).startswith(b"kqv_out"):
            self.attention += now - self._before
        self._before = time.thread_time()
        return True

    def read(self, token: int) -> npt.NDArray[np.float64]:
        """Log-probabilities of what follows a token."""
        self.attention = 0.0
        self.decode([token])
        return log_softmax(self.logits()[0])


class Skipping:
    """One EPS: a cache that goes on by itself, one that starts each token from the rows of the exact one."""

    def __init__(self, model: LoadedModel, kv: str, eps: str, n_ctx: int, stack: ExitStack) -> None:
        spec = f"{kv}{',' if ':' in kv else ':'}v_skip={eps}"
        (setting,) = make_settings([spec], "off")
        self.eps, self.drift, self.step = eps, *(TimedContext(model, setting, n_ctx) for _ in range(2))
        for context in (self.drift, self.step):
            stack.callback(context.close)
        self.drifts: list[npt.NDArray[np.float64]] = []
        self.steps: list[npt.NDArray[np.float64]] = []
        self.times: list[float] = []

    def line(self, exact: Sequence[npt.NDArray[np.float64]], times: Sequence[float]) -> str:
        """A row of the table."""
        now = _core.stats(self.drift.address)
        drift, step = (_divergence(exact, found) for found in (self.drifts, self.steps))
        same = np.mean([np.argmax(p) == np.argmax(q) for p, q in zip(exact, self.drifts, strict=True)])
        low, middle, high = np.quantile(np.divide(times, self.times), (0.25, 0.5, 0.75))
        left_out = now["n_v_skipped"] / max(1, now["n_v_met"])
        return (
            f"| {self.eps} | {left_out:.0%} | {step.mean():.1e} | {step.max():.1e} "
            f"| {drift.mean():.1e} | {same:.1%} | {middle:.2f} ({low:.2f} to {high:.2f}) |"
        )


def _divergence(
    exact: Sequence[npt.NDArray[np.float64]], found: Sequence[npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    p, q = np.array(exact), np.array(found)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1))


def measure(path: Path, kv: str, eps: Sequence[str], n_past: int, n_new: int, texts: int) -> Iterator[str]:
    """The lines of a table, a row for each EPS."""
    with ExitStack() as stack:
        model = LoadedModel(path)
        stack.callback(model.close)
        (setting,) = make_settings([kv], "off")
        base = TimedContext(model, setting, n_past + n_new)
        stack.callback(base.close)
        skipping = [Skipping(model, kv, each, n_past + n_new, stack) for each in ("0", *eps)]
        exact: list[npt.NDArray[np.float64]] = []
        for seed in range(texts):
            text = document(seed, n_past + n_new, lambda text: len(model.tokenize(text, special=True)))
            tokens = model.tokenize(text, special=True)[: n_past + n_new]
            base.clear()
            base.feed(tokens[:n_past])
            state = base.save()
            for each in skipping:
                each.drift.restore(state, n_past)
            for i, token in enumerate(tokens[n_past:], n_past):
                state = base.save()
                exact.append(base.read(token))
                for each in skipping[:: -1 if i % 2 else 1]:
                    each.drifts.append(each.drift.read(token))
                    each.times.append(each.drift.attention)
                for each in skipping:
                    each.step.restore(state, i)
                    each.steps.append(each.step.read(token))
        yield "| EPS | V left out | KLD of a step | largest | with drift | same top-1 | kernel, faster by |"
        yield "|---|---|---|---|---|---|---|"
        for each in skipping:
            yield each.line(exact, skipping[0].times)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python tests/python/support/tools/skipping_run.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--kv", default="mixed", metavar="SPEC")
    parser.add_argument("--v-skip", default="1e-30,1e-6", metavar="EPS,EPS", help="values to compare with 0")
    parser.add_argument("--n-past", type=int, default=3500, metavar="N", help="tokens in the cache")
    parser.add_argument("--n-new", type=int, default=48, metavar="N", help="tokens that are measured")
    parser.add_argument("--texts", type=int, default=3, metavar="N")
    args = parser.parse_args()
    for line in measure(args.model, args.kv, args.v_skip.split(","), args.n_past, args.n_new, args.texts):
        print(line)


if __name__ == "__main__":
    main()
