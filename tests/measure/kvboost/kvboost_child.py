"""The process of `kvboost_peer`: KVBoost on weights written from a GGUF file. One JSON request per line on
stdin, one answer per line on stdout.

Run by its path in an environment that has kvboost, torch, transformers and gguf; it knows nothing of the
package mixedkv.
"""

import json
import os
import signal
import sys
import time
from typing import Any

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes our input
_answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print is no answer


class Ids:
    """A tokenizer whose texts are token ids: prompts are then those of the other side, token for token."""

    eos_token_id = pad_token_id = -1
    eos_token = pad_token = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(part) for part in text.split() if part.isdecimal()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(each)) for each in ids)


def read_llama(path: str) -> Any:
    """Return a transformers model in F32 with the weights of a GGUF file of the llama architecture.

    llama.cpp keeps rotary pairs side by side, transformers half a head apart.
    """
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if name.startswith("llama.")}
    if not fields:
        raise ValueError("its architecture is not llama")

    def value(name: str, default: Any = None) -> Any:
        field = fields.get(f"llama.{name}")
        return default if field is None else field.contents()

    weights = {
        each.name: torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        for each in reader.tensors
    }
    n_head = value("attention.head_count")
    n_kv = value("attention.head_count_kv", n_head)
    n_vocab, width = weights["token_embd.weight"].shape
    config = LlamaConfig(
        vocab_size=n_vocab,
        hidden_size=width,
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=n_head,
        num_key_value_heads=n_kv,
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in weights,
    )

    def halves(rows: Any, heads: int) -> Any:
        return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {}
    for name, tensor in weights.items():
        *block, kind, part = name.split(".")
        place = f"model.layers.{block[1]}." if block else ""
        if kind in ("attn_q", "attn_k"):
            tensor = halves(tensor, n_head if kind == "attn_q" else n_kv)
        state[f"{place}{names[kind]}.{part}"] = tensor
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    return model


def main() -> None:
    from importlib.metadata import version

    import kvboost
    import numpy as np
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    try:
        model = read_llama(sys.argv[1])
        engine = kvboost.KVBoost(
            model=model,
            tokenizer=Ids(),
            max_cache_bytes=8 << 30,
            max_chunks=4096,
            chunk_size=64,
            device="cpu",
        )
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(version=version("kvboost"))
    modes = kvboost.GenerationMode

    def generate(text: str, n: int, mode: Any) -> tuple[Any, float]:
        first: list[float] = []
        begin = time.perf_counter()
        done = engine.generate(
            text, max_new_tokens=n, mode=mode, on_token=lambda _: first.append(time.perf_counter())
        )
        return done, first[0] - begin

    def log_softmax(logits: Any) -> Any:
        wide = logits.astype(np.float64) - logits.max()
        return wide - np.log(np.exp(wide).sum())

    for line in sys.stdin:
        request = json.loads(line)
        try:
            engine.reset_cache()
            prompt = Ids().decode(request["prompt"])
            full, cold = generate(prompt, request["n_answer"], modes.BASELINE)
            engine.reset_cache()
            for stored in request["stored"]:
                engine.warm(Ids().decode(stored))
            done, seconds = generate(prompt, request["n_answer"], modes.CHUNK_KV_REUSE)
            p, q = log_softmax(full.first_token_logits), log_softmax(done.first_token_logits)
            answer(
                seconds_cold=cold,
                seconds=seconds,
                seconds_told=done.ttft_ms / 1000,
                reused=done.kv_reuse_ratio,
                kld=max(0.0, float(np.sum(np.exp(p) * (p - q)))),
                same_top1=bool(p.argmax() == q.argmax()),
                tokens=Ids().encode(done.output_text),
                tokens_cold=Ids().encode(full.output_text),
            )
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


def answer(**values: Any) -> None:
    print(json.dumps(values), file=_answers, flush=True)


main()
