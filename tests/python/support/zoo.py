"""Tiny random-weight GGUF models, one per kind of attention memory that the cache meets.

Each model is a few hundred KB, the same bytes every time, and scaled so that attention matters: scores
spread over a few units, so single keys carry weight and an early token changes the logits. Tensor names,
shapes and metadata keys are those llama.cpp's loaders ask for (src/llama-arch.cpp, src/models/*.cpp).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

N_CTX_TRAIN = 4096
SPECIALS = ("<unk>", "<s>", "</s>")
PIECES = ("\u2581", *"etaoinshrdlu", "th", "he", "in", "er", "\u2581the", "\u2581a")
N_VOCAB = len(SPECIALS) + 256 + len(PIECES)


@dataclass(frozen=True)
class Shape:
    """What the tests need to know about a model without asking the library."""

    name: str
    arch: str
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head: int = 64  # K and V head size of the full-attention layers
    kv_layers: tuple[int, ...] = (0, 1)  # full-attention layers that own a KV cache
    swa_layers: tuple[int, ...] = ()
    rope: str = "norm"  # "norm": pairs of neighbours, "neox": halves, "none"


@dataclass
class Gguf:
    shape: Shape
    keys: dict[str, object] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    n_token_types: int = 0

    def weight(self, name: str, *ne: int, scale: float = 1.0) -> None:
        """A random matrix in ggml's order of dimensions; `scale` is the output's std for a unit-
        variance input.
        """
        rng = np.random.default_rng(zlib.crc32(f"{self.shape.name}/{name}".encode()))
        data = rng.standard_normal(ne[::-1]) * (scale / np.sqrt(ne[0]))
        self.tensors[name] = data.astype(np.float32)

    def vector(self, name: str, n: int, mean: float = 1.0, std: float = 0.1) -> None:
        rng = np.random.default_rng(zlib.crc32(f"{self.shape.name}/{name}".encode()))
        self.tensors[name] = (mean + std * rng.standard_normal(n)).astype(np.float32)

    def write(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, self.shape.arch)
        writer.add_name(f"zoo {self.shape.name}")
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        _add_tokenizer(writer)
        if self.n_token_types:
            writer.add_token_type_count(self.n_token_types)
        for key, value in self.keys.items():
            _add_key(writer, f"{self.shape.arch}.{key}", value)
        for name, data in self.tensors.items():
            writer.add_tensor(name, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise TypeError(f"{key}: {value!r}")


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece-style vocabulary of bytes and a few pieces, so that any text has tokens."""
    tokens = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *PIECES]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(PIECES)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(SPECIALS) + [-1000.0] * 256 + [-float(i) for i in range(len(PIECES))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def write_vocabulary(
    path: Path, kind: str, tokens: list[str], *, pre: str = "gpt-2", all_bytes: bool = True
) -> Path:
    """A file without weights: `tokens`, then the special ones. For `Llama(path, vocab_only=True)`.

    `all_bytes`: bytes that SentencePiece would not find among them follow; `pre` is how GPT-2's kind cuts.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if kind == "llama" and all_bytes:
        tokens = [*tokens, *(f"<0x{b:02X}>" for b in range(256) if f"<0x{b:02X}>" not in tokens)]
    n, special = len(tokens), ["<unk>", "<s>", "</s>"]
    is_byte = [token.startswith("<0x") for token in tokens]
    writer.add_token_list([*tokens, *special])
    writer.add_token_scores([-float(i) for i in range(n + len(special))])
    normal = [gguf.TokenType.BYTE if byte else gguf.TokenType.NORMAL for byte in is_byte]
    writer.add_token_types([*normal, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL])
    if kind == "gpt2":
        writer.add_token_merges(["t h"])
        writer.add_tokenizer_pre(pre)
    writer.add_unk_token_id(n)
    writer.add_bos_token_id(n + 1)
    writer.add_eos_token_id(n + 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_vocabulary(path: Path, pre: str) -> Path:
    """As `write_vocabulary`: GPT-2's letters for bytes and no other tokens, cut as `pre` says."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return write_vocabulary(path, "gpt2", [letters[byte] for byte in range(256)], pre=pre)


# --- parts that models share ---


def _base(shape: Shape, n_ff: int = 96) -> Gguf:
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


def _output(g: Gguf) -> None:
    g.weight("output.weight", g.shape.n_embd, N_VOCAB, scale=1.5)


def _attention(
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


def _ffn(g: Gguf, il: int, n_ff: int = 96, norm: str = "ffn_norm") -> None:
    n = g.shape.n_embd
    g.vector(f"blk.{il}.{norm}.weight", n)
    g.weight(f"blk.{il}.ffn_gate.weight", n, n_ff)
    g.weight(f"blk.{il}.ffn_up.weight", n, n_ff)
    g.weight(f"blk.{il}.ffn_down.weight", n_ff, n)


# --- models the cache supports ---


def _decoder(shape: Shape, *, qk_norm: bool = False) -> Gguf:
    """llama and its nearest relatives: pre-norm attention and a gated FFN."""
    g = _base(shape)
    _output(g)
    for il in range(shape.n_layer):
        _attention(g, il, qk_norm=qk_norm)
        _ffn(g, il)
    return g


def _gemma2(shape: Shape) -> Gguf:
    g = _base(shape)
    g.keys |= {
        "attention.sliding_window": 24,
        "attn_logit_softcapping": 10.0,
        "final_logit_softcapping": 30.0,
    }
    for il in range(shape.n_layer):
        _attention(g, il)
        _ffn(g, il)
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        g.vector(f"blk.{il}.post_ffw_norm.weight", shape.n_embd)
    # the input is scaled by sqrt(n_embd); keep residual and blocks on one scale
    g.tensors["token_embd.weight"] /= np.sqrt(shape.n_embd)
    g.tensors["output_norm.weight"] *= np.sqrt(shape.n_embd)
    return g


def _gemma4(shape: Shape) -> Gguf:
    """Sliding-window and full layers with different head sizes; the last two layers read earlier
    layers' rows.
    """
    head_swa, n_shared = 64, 2
    g = _base(shape)
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
        _attention(g, il, head=d, qk_norm=True, kv=il < shape.n_layer - n_shared)
        # queries and keys are normed and the scores not scaled: the norm weights set their spread
        for part in ("q", "k"):
            if f"blk.{il}.attn_{part}_norm.weight" in g.tensors:
                g.tensors[f"blk.{il}.attn_{part}_norm.weight"] /= np.float32(d**0.25)
        _ffn(g, il)
        g.vector(f"blk.{il}.post_attention_norm.weight", shape.n_embd)
        g.vector(f"blk.{il}.post_ffw_norm.weight", shape.n_embd)
    g.tensors["token_embd.weight"] /= np.sqrt(shape.n_embd)
    g.tensors["output_norm.weight"] *= np.sqrt(shape.n_embd)
    return g


def _gpt_oss(shape: Shape) -> Gguf:
    """Attention sinks (a learnt score per head), every other layer a sliding window, a mixture of experts."""
    n_expert, n_ff = 2, 32
    g = _base(shape)
    _output(g)
    g.keys |= {
        "attention.sliding_window": 24,
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_feed_forward_length": n_ff,
    }
    n = shape.n_embd
    for il in range(shape.n_layer):
        _attention(g, il)
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


def _lfm2(shape: Shape) -> Gguf:
    """Hybrid: short convolutions with a recurrent state, and layers of full attention."""
    g = _base(shape)
    l_cache = 3
    g.keys["shortconv.l_cache"] = l_cache
    g.keys["attention.head_count_kv"] = [
        shape.n_head_kv if il in shape.kv_layers else 0 for il in range(shape.n_layer)
    ]
    g.tensors["token_embd_norm.weight"] = g.tensors.pop("output_norm.weight")
    _output(g)
    n = shape.n_embd
    for il in range(shape.n_layer):
        if il in shape.kv_layers:
            _attention(g, il, qk_norm=True)
        else:
            g.vector(f"blk.{il}.attn_norm.weight", n)
            g.weight(f"blk.{il}.shortconv.conv.weight", l_cache, n)
            g.weight(f"blk.{il}.shortconv.in_proj.weight", n, 3 * n)
            g.weight(f"blk.{il}.shortconv.out_proj.weight", n, n)
        _ffn(g, il)
    return g


# --- models the cache refuses ---


def _deepseek2(shape: Shape) -> Gguf:
    """Multi-head latent attention: one low-rank K row per token and no V row."""
    rank, d_rope, d_nope, d_v, q_rank = 64, 32, 32, 32, 32
    g = _base(shape)
    _output(g)
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
        g.weight(b + "attn_q_b.weight", q_rank, n_head * (d_nope + d_rope))
        g.weight(b + "attn_kv_a_mqa.weight", n, rank + d_rope)
        g.weight(b + "attn_k_b.weight", d_nope, rank, n_head)
        g.weight(b + "attn_v_b.weight", rank, d_v, n_head)
        g.weight(b + "attn_output.weight", n_head * d_v, n)
        _ffn(g, il)
    return g


def _mamba(shape: Shape) -> Gguf:
    """Recurrent: no KV rows at all."""
    d_conv, d_state, dt_rank = 4, 8, 8
    g = _base(shape)
    _output(g)
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


def _bert(shape: Shape) -> Gguf:
    """Encoder: attends over the whole batch and keeps nothing."""
    g = _base(shape)
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


# --- the list ---

_Maker = Callable[[Shape], Gguf]


_SUPPORTED: list[tuple[Shape, _Maker]] = [
    (Shape("llama-64", "llama"), _decoder),
    (Shape("llama-128", "llama", head=128, n_head_kv=1), _decoder),
    (Shape("qwen3", "qwen3", rope="neox"), lambda s: _decoder(s, qk_norm=True)),
    (Shape("gemma2", "gemma2", kv_layers=(1,), swa_layers=(0,), rope="neox"), _gemma2),
    (
        Shape("gemma4", "gemma4", n_layer=6, head=128, kv_layers=(1, 3), swa_layers=(0, 2), rope="neox"),
        _gemma4,
    ),
    (Shape("gpt-oss", "gpt-oss", kv_layers=(1,), swa_layers=(0,), rope="neox"), _gpt_oss),
    (Shape("refact", "refact", n_head_kv=1, rope="none"), _decoder),  # ALiBi
    (
        Shape(
            "lfm2",
            "lfm2",
            n_layer=4,
            n_embd=128,
            n_head=2,
            n_head_kv=1,
            kv_layers=(1, 3),
            rope="neox",
        ),
        _lfm2,
    ),
    (
        Shape("llama-96", "llama", head=96),
        _decoder,
    ),  # fits the block of 32, but is not rotated (not a multiple of 64)
]

_REFUSED: list[tuple[Shape, _Maker]] = [
    (Shape("llama-48", "llama", head=48), _decoder),  # 48 % 32 != 0
    (Shape("deepseek2", "deepseek2", head=96, n_head_kv=1), _deepseek2),
    (Shape("mamba", "mamba", kv_layers=(), rope="none"), _mamba),
    (Shape("bert", "bert", n_embd=64, n_head=2, head=32, kv_layers=(), rope="none"), _bert),
]

SHAPES: dict[str, Shape] = {s.name: s for s, _ in [*_SUPPORTED, *_REFUSED]}
SUPPORTED: tuple[str, ...] = tuple(s.name for s, _ in _SUPPORTED)
REFUSED: tuple[str, ...] = tuple(s.name for s, _ in _REFUSED)
_MAKERS: dict[str, _Maker] = {s.name: make for s, make in [*_SUPPORTED, *_REFUSED]}


def make(name: str) -> Gguf:
    """The named model in memory: metadata and tensors as they go to the file."""
    g = _MAKERS[name](SHAPES[name])
    if name in SUPPORTED:
        _plant(g)
    return g


def _plant(g: Gguf) -> None:
    """Some pairs of channels of K are twice as large as the others and some half as large. Q makes up
    for it, by powers of two, so scores stay as they are.
    """
    for il in range(g.shape.n_layer):
        if (q := g.tensors.get(f"blk.{il}.attn_q.weight")) is None:
            continue
        d = len(q) // g.shape.n_head
        k = g.tensors.get(f"blk.{il}.attn_k.weight")
        normed = f"blk.{il}.attn_q_norm.weight" in g.tensors
        n_kv = 1 if normed or k is None else len(k) // d
        scales = planted(g.shape, d, n_kv)
        for which, factors in (
            ("k", scales),
            ("q", np.repeat(1 / scales, 1 if normed else g.shape.n_head // n_kv, 0)),
        ):
            for part in ("_norm.weight",) if normed else (".weight", ".bias"):
                if (data := g.tensors.get(f"blk.{il}.attn_{which}{part}")) is not None:
                    flat = factors.astype(np.float32).reshape((-1,) + (1,) * (data.ndim - 1))
                    g.tensors[f"blk.{il}.attn_{which}{part}"] = data * flat


def planted(shape: Shape, d: int, n_kv: int) -> np.ndarray:
    """What _plant multiplies K by, [n_kv, d]: the same in all layers, as some read the rows of others."""
    rng = np.random.default_rng(zlib.crc32(f"{shape.name}/outliers/{d}".encode()))
    pairs = np.exp2(rng.choice([-1, 0, 0, 0, 0, 0, 0, 1], (n_kv, d if shape.rope == "none" else d // 2)))
    if shape.rope == "none":
        return pairs
    return np.repeat(pairs, 2, axis=1) if shape.rope == "norm" else np.tile(pairs, 2)


def write(name: str, folder: Path) -> Path:
    """Writes the named model to `folder` unless it is there; returns the path."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        make(name).write(part)
        part.rename(path)
    return path


def muted(name: str, il: int) -> Gguf:
    """The named model with attention in layer `il` as the only block that adds to the residual stream.

    Rows of that layer's cache then come straight from the embeddings, to F32 rounding: an oracle that
    computes them on its own quantises to the same levels, and what differs in the logits is attention's
    doing alone.
    """
    g = make(name)
    for tensor, data in g.tensors.items():
        layer = int(tensor.split(".")[1]) if tensor.startswith("blk.") else -1
        part = tensor.split(".", 2)[2] if layer >= 0 else ""
        if part.startswith(("ffn_down", "shortconv.out_proj")) or (
            part.startswith("attn_output.") and layer != il
        ):
            g.tensors[tensor] = np.zeros_like(data)
    return g


def write_muted(name: str, il: int, folder: Path) -> Path:
    """Writes muted(name, il) to `folder` unless it is there; returns the path."""
    path = folder / f"{name}-only-{il}.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        muted(name, il).write(part)
        part.rename(path)
    return path
