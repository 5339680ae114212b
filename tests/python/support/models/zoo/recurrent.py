"""No rows at all: a state of all tokens in every layer."""

from __future__ import annotations

import numpy as np

from support.models.zoo.model import Gguf, Shape
from support.models.zoo.parts import base, output


def mamba(shape: Shape) -> Gguf:
    """Recurrent: no KV rows at all."""
    d_conv, d_state, dt_rank = 4, 8, 8
    g = base(shape)
    output(g)
    n, d_inner = shape.n_embd, 2 * shape.n_embd
    for key in list(g.keys):
        if key.startswith("attention.") and "epsilon" not in key:
            del g.keys[key]
    g.keys |= {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": dt_rank,
    }
    for il in range(shape.n_layer):
        b = f"blk.{il}."
        g.vector(b + "attn_norm.weight", n)
        g.weight(b + "ssm_in.weight", n, 2 * d_inner)
        g.weight(b + "ssm_conv1d.weight", d_conv, d_inner)
        g.vector(b + "ssm_conv1d.bias", d_inner, mean=0.0)
        g.weight(b + "ssm_x.weight", d_inner, dt_rank + 2 * d_state)
        g.weight(b + "ssm_dt.weight", dt_rank, d_inner)
        g.vector(b + "ssm_dt.bias", d_inner, mean=-1.0)
        g.tensors[b + "ssm_a"] = -np.tile(np.arange(1, d_state + 1, dtype=np.float32), (d_inner, 1))
        g.vector(b + "ssm_d", d_inner)
        g.weight(b + "ssm_out.weight", d_inner, n)
    return g


def rwkv7(shape: Shape) -> Gguf:
    """Time mixing and channel mixing, each of which remembers the last token too."""
    n, rank, n_ff, n_head = shape.n_embd, 16, 96, shape.n_embd // 64
    g = base(shape)
    output(g)
    for key in [key for key in g.keys if key.startswith("attention.")]:
        del g.keys[key]
    g.keys |= {
        "attention.head_count": 0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.decay_lora_rank": rank,
        "attention.iclr_lora_rank": rank,
        "attention.value_residual_mix_lora_rank": rank,
        "attention.gate_lora_rank": rank,
        "wkv.head_size": n // n_head,
        "token_shift_count": 2,
    }
    g.vector("output_norm.bias", n, mean=0.0)
    for name in (
        "token_embd_norm",
        *(f"blk.{il}.attn_norm{i}" for il in range(shape.n_layer) for i in ("", "_2")),
    ):
        g.vector(name + ".weight", n)
        g.vector(name + ".bias", n, mean=0.0)
    for il in range(shape.n_layer):
        b = f"blk.{il}.time_mix_"
        for part, mean in (("w", -5.0), ("a", -1.0), ("v", -1.0)):  # w: forgets slowly
            g.vector(f"{b}{part}0.weight", n, mean=mean)
        for part in ("w", "a", "v", "g"):
            g.weight(f"{b}{part}1.weight", n, rank)
            g.weight(f"{b}{part}2.weight", rank, n)
        for part in ("key", "value", "receptance", "output"):
            g.weight(f"{b}{part}.weight", n, n)
        for part in ("k_k", "k_a", "r_k", "ln"):
            g.vector(f"{b}{part}.weight", n, mean=0.5)
        g.vector(f"{b}ln.bias", n, mean=0.0)
        g.vector(f"{b}lerp_fused.weight", 6 * n, mean=0.5)
        g.tensors[f"{b}lerp_fused.weight"] = g.tensors[f"{b}lerp_fused.weight"].reshape(6, 1, 1, n)
        b = f"blk.{il}.channel_mix_"
        g.vector(f"{b}lerp_k.weight", n, mean=0.5)
        g.weight(f"{b}key.weight", n, n_ff)
        g.weight(f"{b}value.weight", n_ff, n)
    return g
