"""No cache at all, and models that rank."""

from __future__ import annotations

from support.models.zoo.dense import decoder
from support.models.zoo.model import Gguf, Shape
from support.models.zoo.parts import base


def bert(shape: Shape) -> Gguf:
    """Encoder: attends over the whole batch and keeps nothing."""
    g = base(shape)
    n, n_ff = shape.n_embd, 96
    del g.tensors["output_norm.weight"]
    g.keys |= {
        "context_length": 128,
        "attention.causal": False,
        "attention.layer_norm_epsilon": 1e-5,
        "pooling_type": 1,
    }
    g.n_token_types = 2
    g.weight("token_types.weight", n, g.n_token_types)
    g.weight("position_embd.weight", n, 128)

    def norm(name: str) -> None:
        g.vector(name + ".weight", n)
        g.vector(name + ".bias", n, mean=0.0)

    norm("token_embd_norm")
    for il in range(shape.n_layer):
        b = f"blk.{il}."
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            g.weight(f"{b}{part}.weight", n, n)
            g.vector(f"{b}{part}.bias", n, mean=0.0)
        g.weight(b + "ffn_up.weight", n, n_ff)
        g.vector(b + "ffn_up.bias", n_ff, mean=0.0)
        g.weight(b + "ffn_down.weight", n_ff, n)
        g.vector(b + "ffn_down.bias", n, mean=0.0)
        norm(b + "attn_output_norm")
        norm(b + "layer_output_norm")
    return g


def ranker(shape: Shape) -> Gguf:
    """BERT with a classifier's head: a number for two texts, which are one input."""
    g = bert(shape)
    n = shape.n_embd
    g.keys["pooling_type"] = 4
    g.weight("cls.weight", n, n)
    g.vector("cls.bias", n, mean=0.0)
    g.weight("cls.output.weight", n, 1)
    g.vector("cls.output.bias", 1, mean=0.0)
    return g


def decoding_ranker(shape: Shape) -> Gguf:
    """Qwen3's: the last token says yes or no to a text that is made of both."""
    g = decoder(shape, qk_norm=True)
    g.keys |= {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    g.weight("cls.output.weight", shape.n_embd, 2, scale=2.0)
    g.rerank_template = "the query: {query} the document: {document}"
    return g
