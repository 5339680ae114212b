"""How few of the older keys hold a model's attention, by the truth and as two bits of each key tell it.

python tests/python/support/tools/attention_share.py smollm2:f16 --n-ctx 8192 --text prose

It bounds what any way to read less can give. Heads that share a KV head read what any of them wants. NumPy
evaluates the model, which takes minutes, and takes models of the architecture llama alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mixedkv import Llama
from mixedkv.model.named_model import find_model
from mixedkv.real_text import read_real_text

_SINKS, _WINDOW = 4, 64  # keys that are always read
_N_QUERIES = 256  # the last ones
_SHARES = (0.9, 0.99, 0.999)
_GROUPS = (1, 4, 16)  # keys that are read together
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


def sparse(kept: Kept, rotation: np.ndarray, share: float, size: int) -> Attend:
    """Attend, for the last queries, to what two bits of each key choose in groups of `size`."""

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        _, old_k, old_v = kept[layer]
        k = np.concatenate([old_k[:-_N_QUERIES], k])
        v = np.concatenate([old_v[:-_N_QUERIES], v])
        old, n = older(len(k)), len(k)
        out, group = np.empty_like(q), q.shape[1] // k.shape[1]
        for head in range(k.shape[1]):
            heads = range(head * group, (head + 1) * group)
            true = {i: attention(q[:, i], k[:, head], n - _N_QUERIES) for i in heads}
            told = {i: sketched(q[:, i], k[old, head], true[i][:, old], rotation) for i in heads}
            read = np.any([choose(told[i], true[i][:, old], share, size) for i in heads], axis=0)
            for i in heads:
                weights = true[i].copy()
                weights[:, old] *= np.repeat(read, size, axis=1)
                out[:, i] = weights @ v[:, head] / weights.sum(1, keepdims=True)
        return out

    return attend


def older(n: int) -> slice:
    """The keys that may be left out for each of the last queries: a number of whole groups."""
    return slice(_SINKS, _SINKS + (n - _N_QUERIES - _WINDOW - _SINKS) // max(_GROUPS) * max(_GROUPS))


def choose(told: np.ndarray, true: np.ndarray, share: float, size: int) -> np.ndarray:
    """The groups of `size` older keys that are read, by their weights as they are told."""
    return chosen(told.reshape(len(told), -1, size).sum(2), 1 - true.sum(1), share)


def attention(q: np.ndarray, k: np.ndarray, first: int) -> np.ndarray:
    """Weights `[queries, keys]` of queries at the positions from `first` on."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores[np.arange(len(k)) > first + np.arange(len(q))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def sketched(q: np.ndarray, k: np.ndarray, exact: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Weights of the older keys as two bits of each element tell them; `exact` has the true ones.

    An element's error is taken to be normally distributed, so a weight is exp(score + variance / 2).
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
        return exact * np.exp(np.minimum(spread / 2 - wrong, 60))


def chosen(weights: np.ndarray, always: np.ndarray, share: float) -> np.ndarray:
    """The fewest columns of each row that, with what is always read, hold the share of all."""
    order = np.argsort(-weights, 1)
    whole = always + weights.sum(1)
    held = (always[:, None] + np.take_along_axis(weights, order, 1).cumsum(1)) / whole[:, None]
    n = np.where(always / whole >= share, 0, (held < share).sum(1) + 1)
    taken = np.zeros(weights.shape, bool)
    np.put_along_axis(taken, order, np.arange(weights.shape[1]) < n[:, None], 1)
    return taken


def layer_shares(q: np.ndarray, k: np.ndarray, rotation: np.ndarray) -> dict[tuple[str, float, int], Any]:
    """The share of the older keys that is read, and of the attention that is lost, by way, P and group."""
    n, group, old = len(k), q.shape[1] // k.shape[1], older(len(k))
    found: dict[tuple[str, float, int], list[tuple[float, float]]] = {}
    for head in range(k.shape[1]):
        queries = [q[:, head * group + i] for i in range(group)]
        true = [attention(each, k[:, head], n - _N_QUERIES)[:, old] for each in queries]
        told = [sketched(each, k[old, head], w, rotation) for each, w in zip(queries, true, strict=True)]
        for way, weights in (("truth", true), ("two bits", told)):
            for size in _GROUPS:
                for share in _SHARES:
                    pairs = zip(weights, true, strict=True)
                    read = np.any([choose(w, t, share, size) for w, t in pairs], axis=0)
                    kept = np.repeat(read, size, axis=1)
                    lost = float(np.mean([(t * ~kept).sum(1).mean() for t in true]))
                    found.setdefault((way, share, size), []).append((float(read.mean()), lost))
    return {key: np.mean(values, 0) for key, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--text", default="prose", help="prose, code or dialogue")
    options = parser.parse_args()
    path = find_model(options.model)
    with Llama(str(path), vocab_only=True, verbose=False) as llm:
        tokens = llm.tokenize(read_real_text(options.text).text.encode())[: options.n_ctx]
    model, kept = Model(path), list[Any]()
    full = model.logits(tokens, 0, dense(kept))
    square = np.random.default_rng(0).standard_normal((model.size, model.size))
    rotation = np.linalg.qr(square)[0].astype(np.float32)
    layers = [layer_shares(q, k, rotation) for q, k, _ in kept]
    print(
        f"{len(tokens)} tokens of {options.text}, the last {_N_QUERIES} queries, mean of {len(layers)} layers"
    )
    print(
        "| chosen by | P | keys read together | read | by layer | attention lost |\n|---|---|---|---|---|---|"
    )
    for key in layers[0]:
        read, lost = np.array([layer[key] for layer in layers]).T
        spread = f"{read.min():.0%} to {read.max():.0%}"
        print(f"| {key[0]} | {key[1]} | {key[2]} | {read.mean():.0%} | {spread} | {lost.mean():.2%} |")
    print("\nKL divergence of the last queries' answers from dense ones, chosen by two bits, in nats")
    for share in (*_SHARES, 0.95, 0.98):
        for size in _GROUPS:
            attend = sparse(kept, rotation, share, size)
            told = model.logits(tokens[-_N_QUERIES:], len(tokens) - _N_QUERIES, attend)
            divergence = (np.exp(full) * (full - told)).sum(1)
            print(f"| {share} | {size} | mean {divergence.mean():.1e}, median {np.median(divergence):.1e} |")


if __name__ == "__main__":
    main()
