"""Parts that models share."""

from __future__ import annotations

import numpy as np

from support.models.zoo.model import Gguf, Shape
from support.models.zoo.vocabulary import N_VOCAB

N_CTX_TRAIN = 4096


def base(shape: Shape, n_ff: int = 96) -> Gguf:
    g = Gguf(shape)
    g.keys = {
        "context_length": N_CTX_TRAIN,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if shape.rope != "none":
        g.keys["rope.dimension_count"] = shape.head
        g.keys["rope.freq_base"] = 10000.0
    g.weight("token_embd.weight", shape.n_embd, N_VOCAB, scale=np.sqrt(shape.n_embd))
    g.vector("output_norm.weight", shape.n_embd)
    return g


def output(g: Gguf) -> None:
    g.weight("output.weight", g.shape.n_embd, N_VOCAB, scale=1.5)


def attention(
    g: Gguf, il: int, *, head: int = 0, n_head_kv: int = 0, qk_norm: bool = False, kv: bool = True
) -> None:
    s = g.shape
    d, n_kv = head or s.head, n_head_kv or s.n_head_kv
    g.vector(f"blk.{il}.attn_norm.weight", s.n_embd)
    g.weight(f"blk.{il}.attn_q.weight", s.n_embd, s.n_head * d, scale=1.6)
    if kv:
        g.weight(f"blk.{il}.attn_k.weight", s.n_embd, n_kv * d, scale=1.6)
        g.weight(f"blk.{il}.attn_v.weight", s.n_embd, n_kv * d)
    g.weight(f"blk.{il}.attn_output.weight", s.n_head * d, s.n_embd, scale=2.0)
    if qk_norm:
        g.vector(f"blk.{il}.attn_q_norm.weight", d, mean=1.6)
        if kv:
            g.vector(f"blk.{il}.attn_k_norm.weight", d, mean=1.6)


def ffn(g: Gguf, il: int, n_ff: int = 96, norm: str = "ffn_norm") -> None:
    n = g.shape.n_embd
    g.vector(f"blk.{il}.{norm}.weight", n)
    g.weight(f"blk.{il}.ffn_gate.weight", n, n_ff)
    g.weight(f"blk.{il}.ffn_up.weight", n, n_ff)
    g.weight(f"blk.{il}.ffn_down.weight", n_ff, n)


def experts(g: Gguf, il: int, *, shared: bool = False, n_ff: int = 32) -> None:
    """Two experts, of which a token takes one, and one for all."""
    n, n_expert = g.shape.n_embd, 2
    g.keys |= {"expert_count": n_expert, "expert_used_count": 1, "expert_feed_forward_length": n_ff}
    g.weight(f"blk.{il}.ffn_gate_inp.weight", n, n_expert)
    for part, ne in (("gate", (n, n_ff)), ("up", (n, n_ff)), ("down", (n_ff, n))):
        g.weight(f"blk.{il}.ffn_{part}_exps.weight", *ne, n_expert)
        if shared:
            g.weight(f"blk.{il}.ffn_{part}_shexp.weight", *ne)
    if shared:
        g.keys["expert_shared_feed_forward_length"] = n_ff


def mamba2(g: Gguf, il: int, *, norm: bool = True) -> None:
    d_conv, d_state, n_group, n = 4, 16, 1, g.shape.n_embd
    d_inner, n_head = 2 * n, 4
    n_conv = d_inner + 2 * n_group * d_state
    g.keys |= {
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": n_head,
        "ssm.group_count": n_group,
    }
    b = f"blk.{il}."
    g.vector(b + "attn_norm.weight", n)
    g.weight(b + "ssm_in.weight", n, d_inner + n_conv + n_head)
    g.weight(b + "ssm_conv1d.weight", d_conv, n_conv, scale=np.sqrt(d_conv))
    g.vector(b + "ssm_conv1d.bias", n_conv, mean=0.0)
    g.vector(b + "ssm_dt.bias", n_head, mean=-1.0)
    g.tensors[b + "ssm_a"] = -np.arange(1, n_head + 1, dtype=np.float32).reshape(n_head, 1)
    g.tensors[b + "ssm_d"] = np.ones((n_head, 1), np.float32)
    if norm:
        g.vector(b + "ssm_norm.weight", d_inner // n_group)
        g.tensors[b + "ssm_norm.weight"] = g.tensors[b + "ssm_norm.weight"].reshape(n_group, -1)
    g.weight(b + "ssm_out.weight", d_inner, n)
