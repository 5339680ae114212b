"""Sliding windows or chunks in some layers."""

from __future__ import annotations

import numpy as np

from support.models.zoo.dense import scale_embeddings
from support.models.zoo.model import Gguf, Shape
from support.models.zoo.parts import attention, base, experts, ffn, output


def gemma2(shape: Shape) -> Gguf:
    g = base(shape)
    g.keys |= {
        "attention.sliding_window": 24,
        "attn_logit_softcapping": 10.0,
        "final_logit_softcapping": 30.0,
    }
    for il in range(shape.n_layer):
        attention(g, il)
        ffn(g, il)
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        g.vector(f"blk.{il}.post_ffw_norm.weight", shape.n_embd)
    scale_embeddings(g)
    return g


def gemma4(shape: Shape) -> Gguf:
    """Sliding-window and full layers with different head sizes; the last two layers read earlier
    layers' rows.
    """
    head_swa, n_shared = 64, 2
    g = base(shape)
    swa = [il in (0, 2, 4) for il in range(shape.n_layer)]
    g.keys |= {
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": swa,
        "attention.shared_kv_layers": n_shared,
        "attention.key_length_swa": head_swa,
        "attention.value_length_swa": head_swa,
        "rope.dimension_count_swa": head_swa,
        "rope.freq_base_swa": 10000.0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    g.tensors["rope_freqs.weight"] = np.ones(shape.head // 2, dtype=np.float32)
    for il in range(shape.n_layer):
        d = head_swa if swa[il] else shape.head
        attention(g, il, head=d, qk_norm=True, kv=il < shape.n_layer - n_shared)
        # queries and keys are normed and the scores not scaled: the norm weights set their spread
        for part in ("q", "k"):
            if f"blk.{il}.attn_{part}_norm.weight" in g.tensors:
                g.tensors[f"blk.{il}.attn_{part}_norm.weight"] /= np.float32(d**0.25)
        ffn(g, il)
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        g.vector(f"blk.{il}.post_ffw_norm.weight", shape.n_embd)
    scale_embeddings(g)
    return g


def gpt_oss(shape: Shape) -> Gguf:
    """Attention sinks (a learnt score per head), every other layer a sliding window, a mixture of experts."""
    n_expert, n_ff = 2, 32
    g = base(shape)
    output(g)
    g.keys |= {
        "attention.sliding_window": 24,
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_feed_forward_length": n_ff,
    }
    n = shape.n_embd
    for il in range(shape.n_layer):
        attention(g, il)
        g.vector(f"blk.{il}.attn_output.bias", n, mean=0.0)
        g.vector(f"blk.{il}.attn_sinks.weight", shape.n_head, mean=1.0, std=0.5)
        g.vector(f"blk.{il}.post_attention_norm.weight", n)
        g.weight(f"blk.{il}.ffn_gate_inp.weight", n, n_expert)
        g.vector(f"blk.{il}.ffn_gate_inp.bias", n_expert, mean=0.0)
        for part, ne in (("gate", (n, n_ff)), ("up", (n, n_ff)), ("down", (n_ff, n))):
            g.weight(f"blk.{il}.ffn_{part}_exps.weight", *ne, n_expert)
            bias = f"blk.{il}.ffn_{part}_exps.bias"
            g.vector(bias, n_expert * ne[1], mean=0.0)
            g.tensors[bias] = g.tensors[bias].reshape(n_expert, ne[1])
    return g


def gemma3(shape: Shape) -> Gguf:
    """Norms of Q and K; five sliding layers to a full one in the real ones, here every other."""
    g = base(shape)
    g.keys |= {
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [il in shape.swa_layers for il in range(shape.n_layer)],
        "rope.freq_base_swa": 10000.0,
    }
    for il in range(shape.n_layer):
        attention(g, il, qk_norm=True)
        ffn(g, il)
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        g.vector(f"blk.{il}.post_ffw_norm.weight", shape.n_embd)
    scale_embeddings(g)
    return g


def llama4(shape: Shape) -> Gguf:
    """Three layers that see chunks of 8192 tokens to a full one without RoPE; experts in every other."""
    g = base(shape)
    output(g)
    g.keys["interleave_moe_layer_step"] = 2
    for il in range(shape.n_layer):
        attention(g, il)
        if il % 2:
            g.vector(f"blk.{il}.ffn_norm.weight", shape.n_embd)
            experts(g, il, shared=True)
        else:
            ffn(g, il)
    g.keys["expert_count"], g.keys["expert_used_count"] = 2, 1
    return g
