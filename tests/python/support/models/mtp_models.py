"""Models with an MTP layer that is right, made by hand: which token comes next depends on the last one alone.

Attention and feed-forward layers add nothing, so the hidden state of a token is its embedding. Embeddings of
successive tokens differ by one rotation, and the output matrix has each token where its predecessor's is:
after a token comes the next one, after the last the first. Control tokens never come.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from support.models import zoo
from support.models.zoo import N_VOCAB
from support.models.zoo.dense import glm4moe
from support.models.zoo.hybrid import qwen35
from support.models.zoo.latent import deepseek2
from support.models.zoo.parts import experts
from support.models.zoo.vocabulary import SPECIALS

Reads = Literal["token", "state", "nothing"]

FIRST = len(SPECIALS)
N_TOKENS = N_VOCAB - FIRST  # that are counted through


def write_counting_model(path: Path, reads: Reads, kind: str = "glm4moe") -> Path:
    """The MTP layer, the last one, knows what comes next from the token it is given, or from the state of the
    token before it; or it does not know.
    """
    shape = zoo.SHAPES[kind]
    il = shape.n_layer
    shape = replace(shape, n_layer=il + 1, kv_layers=(*shape.kv_layers, il))
    g = {"glm4moe": glm4moe, "qwen35": qwen35, "deepseek2": deepseek2}[kind](shape)
    if kind == "deepseek2":
        g.keys["leading_dense_block_count"] = il
        experts(g, il, shared=True)
        for part in ("gate", "up", "down"):
            del g.tensors[f"blk.{il}.ffn_{part}.weight"]
    g.keys["nextn_predict_layers"] = 1
    turn = _rotation(shape.n_embd)
    embeddings = _circle(turn)
    for name, data in g.tensors.items():
        if any(part in name for part in ("attn_output", "ffn_down", "ssm_out")):
            data[:] = 0
    g.tensors["token_embd.weight"][FIRST:] = embeddings
    g.tensors["output.weight"][:FIRST] = 0
    g.tensors["output.weight"][FIRST:] = 4 * np.roll(embeddings, 1, axis=0)
    g.vector("output_norm.weight", shape.n_embd, std=0.0)
    nothing, same = np.zeros_like(turn), np.eye(shape.n_embd, dtype=np.float32)
    of_token, of_state = {"token": (same, nothing), "state": (nothing, turn), "nothing": (turn, nothing)}[
        reads
    ]
    g.tensors[f"blk.{il}.nextn.eh_proj.weight"] = np.concatenate([of_token, of_state], axis=1)
    for part in ("enorm", "hnorm"):
        g.vector(f"blk.{il}.nextn.{part}.weight", shape.n_embd, std=0.0)
    g.write(path)
    return path


def _rotation(n: int) -> np.ndarray:
    """Each plane by its own multiple of a turn's N_TOKENS-th part: after as many it is where it was."""
    times = np.random.default_rng(0).choice(np.arange(1, N_TOKENS // 2), n // 2, replace=False)
    turn = np.zeros((n, n), np.float32)
    for i, angle in enumerate(2 * np.pi * times / N_TOKENS):
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [
            [np.cos(angle), -np.sin(angle)],
            [np.sin(angle), np.cos(angle)],
        ]
    return turn


def _circle(turn: np.ndarray) -> np.ndarray:
    rows = [np.ones(len(turn))]
    while len(rows) < N_TOKENS:
        rows.append(turn.astype(np.float64) @ rows[-1])
    return np.array(rows, np.float32)


def after(token: int, n: int = 1) -> int:
    """The n-th token that comes after one."""
    return FIRST + (token - FIRST + n) % N_TOKENS
