"""Attention in some layers, a recurrent state in others, or both in one."""

from __future__ import annotations

import numpy as np

from support.models.zoo.dense import mrope_sections
from support.models.zoo.model import Gguf, Shape
from support.models.zoo.parts import attention, base, experts, ffn, mamba2, output


def lfm2(shape: Shape) -> Gguf:
    """Hybrid: short convolutions with a recurrent state, and layers of full attention."""
    g = base(shape)
    l_cache = 3
    g.keys["shortconv.l_cache"] = l_cache
    g.keys["attention.head_count_kv"] = [
        shape.n_head_kv if il in shape.kv_layers else 0 for il in range(shape.n_layer)
    ]
    g.tensors["token_embd_norm.weight"] = g.tensors.pop("output_norm.weight")
    output(g)
    n = shape.n_embd
    for il in range(shape.n_layer):
        if il in shape.kv_layers:
            attention(g, il, qk_norm=True)
        else:
            g.vector(f"blk.{il}.attn_norm.weight", n)
            g.weight(f"blk.{il}.shortconv.conv.weight", l_cache, n)
            g.weight(f"blk.{il}.shortconv.in_proj.weight", n, 3 * n)
            g.weight(f"blk.{il}.shortconv.out_proj.weight", n, n)
        ffn(g, il)
    return g


def _kv_heads(shape: Shape) -> list[int]:
    return [shape.n_head_kv if il in shape.kv_layers else 0 for il in range(shape.n_layer)]


def granite_hybrid(shape: Shape) -> Gguf:
    """Mamba-2 layers and layers of attention, each with an FFN."""
    g = base(shape)
    output(g)
    g.keys["attention.head_count_kv"] = _kv_heads(shape)
    for il in range(shape.n_layer):
        if il in shape.kv_layers:
            attention(g, il)
        else:
            mamba2(g, il)
        ffn(g, il)
    return g


def nemotron_h(shape: Shape) -> Gguf:
    """A layer is Mamba-2, attention or an FFN."""
    g = base(shape)
    output(g)
    ffn_layers = [il for il in range(shape.n_layer) if il % 3 == 2]
    g.keys |= {
        "attention.head_count_kv": _kv_heads(shape),
        "feed_forward_length": [96 if il in ffn_layers else 0 for il in range(shape.n_layer)],
        "attention.layer_norm_epsilon": 1e-5,
    }
    for il in range(shape.n_layer):
        if il in shape.kv_layers:
            attention(g, il)
        elif il in ffn_layers:
            g.vector(f"blk.{il}.attn_norm.weight", shape.n_embd)
            g.weight(f"blk.{il}.ffn_up.weight", shape.n_embd, 96)
            g.weight(f"blk.{il}.ffn_down.weight", 96, shape.n_embd)
        else:
            mamba2(g, il)
    return g


def falcon_h1(shape: Shape) -> Gguf:
    """Mamba-2 and attention side by side in every layer."""
    g = base(shape)
    output(g)
    for il in range(shape.n_layer):
        attention(g, il)
        mamba2(g, il, norm=False)
        ffn(g, il)
        g.tensors[f"blk.{il}.ffn_norm"] = g.tensors.pop(f"blk.{il}.ffn_norm.weight")
    return g


def qwen35(shape: Shape) -> Gguf:
    """Gated delta nets and gated attention, with M-RoPE whose sections interleave."""
    g = _delta_net(shape)
    g.keys["rope.dimension_sections"] = mrope_sections(shape)
    for il in range(shape.n_layer):
        ffn(g, il, norm="post_attention_norm")
        if il not in shape.kv_layers:
            for part in ("beta", "alpha"):
                g.weight(f"blk.{il}.ssm_{part}.weight", shape.n_embd, 2)
    return g


def qwen3next(shape: Shape) -> Gguf:
    """The same with experts, and plain RoPE."""
    g = _delta_net(shape)
    for il in range(shape.n_layer):
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        experts(g, il, shared=True)
        g.vector(f"blk.{il}.ffn_gate_inp_shexp.weight", shape.n_embd, mean=0.0)
        if il not in shape.kv_layers:
            g.weight(f"blk.{il}.ssm_ba.weight", shape.n_embd, 4)
    return g


def _delta_net(shape: Shape) -> Gguf:
    d_conv, d_state, n_head, n_group = 4, 32, 2, 1
    d_key, d_value, n = d_state * n_group, d_state * n_head, shape.n_embd
    g = base(shape)
    output(g)
    g.keys |= {
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": d_value,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": n_head,
        "ssm.group_count": n_group,
        "full_attention_interval": 2,
    }
    for il in range(shape.n_layer):
        b = f"blk.{il}."
        if il in shape.kv_layers:
            attention(g, il, qk_norm=True)
            g.weight(b + "attn_q.weight", n, 2 * shape.n_head * shape.head, scale=1.6)  # and its gate
            continue
        g.vector(b + "attn_norm.weight", n)
        g.weight(b + "attn_qkv.weight", n, 2 * d_key + d_value)
        g.weight(b + "attn_gate.weight", n, d_value)
        g.weight(b + "ssm_conv1d.weight", d_conv, 2 * d_key + d_value, scale=np.sqrt(d_conv))
        g.vector(b + "ssm_dt.bias", n_head, mean=-1.0)
        g.vector(b + "ssm_a", n_head, mean=-1.0)
        g.vector(b + "ssm_norm.weight", d_state)
        g.weight(b + "ssm_out.weight", d_value, n)
    return g
