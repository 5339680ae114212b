"""How few of the older keys hold a model's attention, and how many a random sample of them has to read.

python tests/measure/attention_share.py smollm2:f16 --n-ctx 8192 --text prose

The first table bounds what any way to read less can give without a sample: the fewest keys, known
beforehand, that hold a share of the attention. The second one reads as `sparse=eps:E` does, by two bits of
each element of K, and counts how often the sum of a query's weights, and its output, are farther off than E.
Heads that share a KV head read what any of them wants. NumPy evaluates the model, which takes minutes, and
takes models of the architecture llama alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mixedkv import Llama
from mixedkv.model.named_model import find_measured_model
from mixedkv_bench.harness.real_text import read_real_text

_SINKS, _WINDOW = 4, 64  # keys that are always read
_N_QUERIES = 256  # the last ones
_SHARES = (0.9, 0.99, 0.999)
_GROUPS = (1, 4, 16)  # keys that are read together
_PAGE = 4  # as the cache has it
_ERRORS = (0.2, 0.1, 0.05)
_NORMAL = 1.959964  # standard errors, beyond which a normally distributed error is with a probability of 0.05
_LEAST = 1 / 256  # probability to be read
_LEVELS = np.array(
    [-1.51, -0.4528, 0.4528, 1.51], np.float32
)  # of two bits, for normally distributed elements
_STEP = 512  # queries at a time, for memory

Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Model:
    """Weights and sizes, and what it is evaluated by."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._reader = reader
        self.weights = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).reshape(t.shape[::-1])
            for t in reader.tensors
        }
        if self._field("general.architecture") != "llama":
            raise ValueError(f"{path} is no model of the architecture llama")
        self.n_layers = self._field("llama.block_count")
        self.n_heads = self._field("llama.attention.head_count")
        self.n_heads_kv = self._field("llama.attention.head_count_kv")
        self.size = self._field("llama.embedding_length") // self.n_heads
        self._epsilon = self._field("llama.attention.layer_norm_rms_epsilon")
        self._base = self._field("llama.rope.freq_base")

    def logits(self, tokens: list[int], n_before: int, attend: Attend) -> np.ndarray:
        """Log-probabilities `[tokens, vocabulary]` of the last queries, `n_before` tokens being before.

        Args:
            attend: is called with the layer, and Q, K and V `[tokens, heads, size]`, rotated by RoPE.
        """
        x = self.weights["token_embd.weight"][tokens]
        for layer in range(self.n_layers):
            h = self._norm(x, f"blk.{layer}.attn_norm")
            q, k, v = (self._heads(h, f"blk.{layer}.{name}") for name in ("attn_q", "attn_k", "attn_v"))
            out = attend(layer, self._rope(q, n_before), self._rope(k, n_before), v)
            x = x + self._matrix(out.reshape(len(x), -1), f"blk.{layer}.attn_output")
            h = self._norm(x, f"blk.{layer}.ffn_norm")
            gate, up = self._matrix(h, f"blk.{layer}.ffn_gate"), self._matrix(h, f"blk.{layer}.ffn_up")
            x = x + self._matrix(gate / (1 + np.exp(-gate)) * up, f"blk.{layer}.ffn_down")
        logits = self._matrix(self._norm(x[-_N_QUERIES:], "output_norm"), self._output)
        logits -= logits.max(1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    @property
    def _output(self) -> str:
        return "output" if "output.weight" in self.weights else "token_embd"

    def _field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def _matrix(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self._epsilon)
        return x / scale * self.weights[f"{name}.weight"]

    def _heads(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._matrix(x, name).reshape(len(x), -1, self.size)

    def _rope(self, x: np.ndarray, first: int) -> np.ndarray:
        speed = self._base ** (-np.arange(0, self.size, 2) / self.size)
        angle = ((first + np.arange(len(x)))[:, None] * speed)[:, None].astype(np.float32)
        even, odd, turned = x[..., 0::2], x[..., 1::2], np.empty_like(x)
        turned[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        turned[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return turned


Kept = list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # Q of the last queries, K and V, by layer


def dense(kept: Kept) -> Attend:
    """Attend to everything, and keep what the other ways need."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        kept.append((q[-_N_QUERIES:], k, v))
        out, group = np.empty_like(q), q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            for first in range(0, len(q), _STEP):
                last = min(first + _STEP, len(q))
                weights = attention(q[first:last, head], k[:last, head // group], first)
                out[first:last, head] = weights @ v[:last, head // group]
        return out

    return attend


def older(n: int) -> slice:
    """The keys that may be left out for each of the last queries: a number of whole groups."""
    return slice(_SINKS, _SINKS + (n - _N_QUERIES - _WINDOW - _SINKS) // max(_GROUPS) * max(_GROUPS))


def choose(true: np.ndarray, share: float, size: int) -> np.ndarray:
    """The groups of `size` older keys that are read."""
    return chosen(true.reshape(len(true), -1, size).sum(2), 1 - true.sum(1), share)


def attention(q: np.ndarray, k: np.ndarray, first: int) -> np.ndarray:
    """Weights `[queries, keys]` of queries at the positions from `first` on."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores[np.arange(len(k)) > first + np.arange(len(q))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def sketched(
    q: np.ndarray, k: np.ndarray, exact: np.ndarray, rotation: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the older keys as two bits of each element tell them: in the mean, and as root mean squares.

    An element's error is taken to be normally distributed, so these are exp(score + variance / 2) and
    exp(score + variance). `exact` has the true weights.
    """
    channel = np.sqrt(np.sqrt((k * k).mean(0)) + 1e-12)
    rows, queries = k / channel @ rotation, q * channel @ rotation
    size = np.sqrt((rows * rows).mean(1, keepdims=True))
    levels = _LEVELS[np.abs(rows[..., None] / size[..., None] - _LEVELS).argmin(-1)]
    fit = (rows * levels).sum(1, keepdims=True) / (levels * levels).sum(1, keepdims=True)
    error = ((rows - levels * fit) ** 2).mean(1)
    wrong = queries @ (rows - levels * fit).T / np.sqrt(q.shape[1])
    spread = (queries * queries).sum(1, keepdims=True) * error / q.shape[1]
    with np.errstate(over="ignore"):
        mean, square = (exact * np.exp(np.minimum(x - wrong, 60)) for x in (spread / 2, spread))
    return mean, square


def probabilities(mean: np.ndarray, size: np.ndarray, always: np.ndarray, error: float) -> np.ndarray:
    """With which each page is read, so that a row's sum of weights has a standard error small enough."""
    allowed = (error / _NORMAL * (always + mean.sum(1))) ** 2
    order = np.sort(size, 1)
    steps = allowed[:, None] / np.maximum(order.cumsum(1), 1e-30)  # with all up to this one below the step
    following = np.concatenate([order[:, 1:], np.full((len(order), 1), np.inf)], 1)
    step = np.where(steps > order, np.minimum(steps, following), 0).max(1, keepdims=True)
    return np.clip(size / np.maximum(step, 1e-30), _LEAST, 1)


def pages(x: np.ndarray) -> np.ndarray:
    """Sums of the keys of each page."""
    return x.reshape(len(x), -1, _PAGE).sum(2)


def layer_errors(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rotation: np.ndarray, random: np.random.Generator
) -> dict[float, np.ndarray]:
    """By E, for each query and head: the share that is read, and the errors of the sum and of the output.

    The output's error is a root mean square of its elements, relative to that of the distance of values from
    the output, of those values that may be left out.
    """
    n, group, old = len(k), q.shape[1] // k.shape[1], older(len(k))
    found: dict[float, list[np.ndarray]] = {}
    for head in range(k.shape[1]):
        queries = [q[:, head * group + i] for i in range(group)]
        whole = [attention(each, k[:, head], n - _N_QUERIES) for each in queries]
        told = [sketched(x, k[old, head], w[:, old], rotation) for x, w in zip(queries, whole, strict=True)]
        for error in _ERRORS:
            each = [
                probabilities(pages(mean), pages(size), 1 - w[:, old].sum(1), error)
                for (mean, size), w in zip(told, whole, strict=True)
            ]
            probability = np.max(each, axis=0)
            read = random.random(probability.shape) < probability
            stands = np.repeat(read / probability, _PAGE, axis=1)
            for weights in whole:
                sampled = weights.copy()
                sampled[:, old] *= stands
                out = weights @ v[:, head]
                wrong = sampled @ v[:, head] / sampled.sum(1, keepdims=True) - out
                square = (
                    (v[old, head] ** 2).sum(1) - 2 * out @ v[old, head].T + (out**2).sum(1, keepdims=True)
                )
                tail = weights[:, old]
                distance = (tail * square).sum(1) / np.maximum(tail.sum(1), 1e-30)
                of_output = np.sqrt((wrong**2).sum(1) / np.maximum(distance, 1e-30))
                row = np.array([read.mean(1), np.abs(sampled.sum(1) - 1), of_output])
                found.setdefault(error, []).append(row)
    return {error: np.concatenate(rows, 1) for error, rows in found.items()}


def chosen(weights: np.ndarray, always: np.ndarray, share: float) -> np.ndarray:
    """The fewest columns of each row that, with what is always read, hold the share of all."""
    order = np.argsort(-weights, 1)
    whole = always + weights.sum(1)
    held = (always[:, None] + np.take_along_axis(weights, order, 1).cumsum(1)) / whole[:, None]
    n = np.where(always / whole >= share, 0, (held < share).sum(1) + 1)
    taken = np.zeros(weights.shape, bool)
    np.put_along_axis(taken, order, np.arange(weights.shape[1]) < n[:, None], 1)
    return taken


def layer_shares(q: np.ndarray, k: np.ndarray) -> dict[tuple[float, int], Any]:
    """The share of the older keys that is read, and of the attention that is lost, by P and group."""
    n, group, old = len(k), q.shape[1] // k.shape[1], older(len(k))
    found: dict[tuple[float, int], list[tuple[float, float]]] = {}
    for head in range(k.shape[1]):
        queries = [q[:, head * group + i] for i in range(group)]
        true = [attention(each, k[:, head], n - _N_QUERIES)[:, old] for each in queries]
        for size in _GROUPS:
            for share in _SHARES:
                read = np.any([choose(t, share, size) for t in true], axis=0)
                kept = np.repeat(read, size, axis=1)
                lost = float(np.mean([(t * ~kept).sum(1).mean() for t in true]))
                found.setdefault((share, size), []).append((float(read.mean()), lost))
    return {key: np.mean(values, 0) for key, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--text", default="prose", help="prose, code or dialogue")
    options = parser.parse_args()
    path = find_measured_model(options.model)
    with Llama(str(path), vocab_only=True, verbose=False) as llm:
        tokens = llm.tokenize(read_real_text(options.text).text.encode())[: options.n_ctx]
    model, kept = Model(path), list[Any]()
    model.logits(tokens, 0, dense(kept))
    layers = [layer_shares(q, k) for q, k, _ in kept]
    print(
        f"{len(tokens)} tokens of {options.text}, the last {_N_QUERIES} queries, mean of {len(layers)} layers"
    )
    print("| P | keys read together | read | by layer | attention lost |\n|---|---|---|---|---|")
    for key in layers[0]:
        read, lost = np.array([layer[key] for layer in layers]).T
        spread = f"{read.min():.0%} to {read.max():.0%}"
        print(f"| {key[0]} | {key[1]} | {read.mean():.0%} | {spread} | {lost.mean():.2%} |")
    random = np.random.default_rng(0)
    square = random.standard_normal((model.size, model.size))
    rotation = np.linalg.qr(square)[0].astype(np.float32)
    by_layer = [layer_errors(q, k, v, rotation, random) for q, k, v in kept]
    print(
        "\n| E | queries | pages read | sum farther off than E | output farther off | their standard errors |"
    )
    print("|---|---|---|---|---|---|")
    for error in _ERRORS:
        read, of_sum, of_output = np.concatenate([layer[error] for layer in by_layer], 1)
        standard = ", ".join(f"{np.sqrt((x**2).mean()):.4f}" for x in (of_sum, of_output))
        far = " | ".join(f"{(x > error).mean():.2%}" for x in (of_sum, of_output))
        print(f"| {error} | {len(read)} | {read.mean():.0%} | {far} | {standard} |")


if __name__ == "__main__":
    main()
