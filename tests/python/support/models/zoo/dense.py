"""Full attention in every layer."""

from __future__ import annotations

import numpy as np

from support.models.zoo.model import Gguf, Shape
from support.models.zoo.parts import attention, base, experts, ffn, output


def decoder(shape: Shape, *, qk_norm: bool = False) -> Gguf:
    """llama and its nearest relatives: pre-norm attention and a gated FFN."""
    g = base(shape)
    output(g)
    for il in range(shape.n_layer):
        attention(g, il, qk_norm=qk_norm)
        ffn(g, il)
    return g


def phi3(shape: Shape) -> Gguf:
    """Gate and up are one matrix. Of a model named "phi3" llama.cpp wants certain tokens."""
    g = base(shape)
    output(g)
    for il in range(shape.n_layer):
        attention(g, il)
        g.vector(f"blk.{il}.ffn_norm.weight", shape.n_embd)
        g.weight(f"blk.{il}.ffn_up.weight", shape.n_embd, 2 * 96)
        g.weight(f"blk.{il}.ffn_down.weight", 96, shape.n_embd)
    return g


def qwen3moe(shape: Shape) -> Gguf:
    g = base(shape)
    output(g)
    for il in range(shape.n_layer):
        attention(g, il, qk_norm=True)
        g.vector(f"blk.{il}.ffn_norm.weight", shape.n_embd)
        experts(g, il)
    return g


def glm4moe(shape: Shape) -> Gguf:
    """A dense layer, then experts with one that all tokens share; biases of Q, K and V."""
    g = base(shape)
    output(g)
    g.keys |= {"leading_dense_block_count": 1, "expert_shared_count": 1}
    for il in range(shape.n_layer):
        attention(g, il, qk_norm=True)
        for part, n in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv)):
            g.vector(f"blk.{il}.attn_{part}.bias", n * shape.head, mean=0.0)
        if il == 0:
            ffn(g, il, norm="post_attention_norm")
            continue
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        experts(g, il, shared=True)
        g.vector(f"blk.{il}.exp_probs_b.bias", 2, mean=0.0)
    return g


def qwen2vl(shape: Shape) -> Gguf:
    """M-RoPE: a token of an image has a position in time, one in height and one in width."""
    g = decoder(shape)
    g.keys["rope.dimension_sections"] = mrope_sections(shape)
    for il in range(shape.n_layer):
        for part, n in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv)):
            g.vector(f"blk.{il}.attn_{part}.bias", n * shape.head, mean=0.0)
    return g


def mrope_sections(shape: Shape) -> list[int]:
    """Rotary pairs that turn by time, height and width, as Qwen2.5-VL shares them out."""
    pairs = shape.head // 2
    return [pairs // 4, pairs * 3 // 8, pairs * 3 // 8, 0]


def scale_embeddings(g: Gguf) -> None:
    """Of models that multiply them by sqrt(n_embd): residual stream and blocks stay on one scale."""
    g.tensors["token_embd.weight"] /= np.sqrt(g.shape.n_embd)
    g.tensors["output_norm.weight"] *= np.sqrt(g.shape.n_embd)


def stablelm() -> Gguf:
    """RoPE turns a quarter of a head; the norms have biases."""
    g = decoder(Shape("stablelm", "stablelm", n_embd=256, rope="neox"))
    g.keys |= {
        "rope.dimension_count": 16,
        "attention.layer_norm_epsilon": 1e-5,
        "use_parallel_residual": False,
    }
    for name in [name for name in g.tensors if name.endswith("_norm.weight")]:
        g.vector(name.replace("weight", "bias"), 256, mean=0.0, std=0.3)
    return g
