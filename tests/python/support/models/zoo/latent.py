"""Multi-head latent attention."""

from __future__ import annotations

from support.models.zoo.model import Gguf, Shape
from support.models.zoo.parts import base, ffn, output


def deepseek2(
    shape: Shape, rank: int = 128, d_rope: int = 64, d_nope: int = 32, d_v: int = 32, q_rank: int = 32
) -> Gguf:
    """Multi-head latent attention: one low-rank K row per token and no V row."""
    g = base(shape)
    output(g)
    n, n_head = shape.n_embd, shape.n_head
    g.keys |= {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + d_rope,
        "attention.value_length": rank,
        "attention.key_length_mla": d_nope + d_rope,
        "attention.value_length_mla": d_v,
        "attention.q_lora_rank": q_rank,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": d_rope,
        "leading_dense_block_count": shape.n_layer,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
    }
    for il in range(shape.n_layer):
        b = f"blk.{il}."
        g.vector(b + "attn_norm.weight", n)
        g.vector(b + "attn_q_a_norm.weight", q_rank)
        g.vector(b + "attn_kv_a_norm.weight", rank)
        g.weight(b + "attn_q_a.weight", n, q_rank)
        g.weight(b + "attn_q_b.weight", q_rank, n_head * (d_nope + d_rope), scale=2.0)
        g.weight(b + "attn_kv_a_mqa.weight", n, rank + d_rope)
        g.weight(b + "attn_k_b.weight", d_nope, rank, n_head)
        g.weight(b + "attn_v_b.weight", rank, d_v, n_head)
        g.weight(b + "attn_output.weight", n_head * d_v, n, scale=2.0)
        ffn(g, il)
    return g
