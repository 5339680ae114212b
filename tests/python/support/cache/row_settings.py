"""All that a user can set of how rows are computed, at random, and the rows that two contexts compute."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from mixedkv import Llama, MixedKVConfig
from support.models.adapters import write_adapter

N_CTX = 512
BATCH = 128  # of all of them: a prompt is cut in the same places
ROUNDING = 2e-3  # of a row's size; a row of another setting is off by 0.01 and more
_FIXED = {"n_batch": BATCH, "n_ubatch": BATCH, "n_threads": 1, "n_threads_batch": 1, "verbose": False}

Rows = dict[tuple[int, str], np.ndarray]


@dataclass(frozen=True)
class Settings:
    """What a `Llama` is made with, and what is changed before it evaluates.

    Args:
        kv: the cache's spec.
        options: further arguments of `Llama`.
        window: threshold, group and sinks that are set while it lives.
        adapter: a seed and a scale of an adapter that llama.cpp's own functions set while it lives.
        control: a seed of a control vector that is set so.
    """

    kv: str
    options: dict[str, Any] = field(default_factory=dict)
    window: tuple[int, int, int] | None = None
    adapter: tuple[int, float] | None = None
    control: int | None = None


def numbers(rng: random.Random) -> str:
    """A window's settings, as they are written."""
    threshold = rng.choice([0, 16, 32, 64, 256])
    group = rng.choice([g for g in (1, 8, 16) if g <= max(1, threshold)])
    return f"threshold={threshold},group={group},sinks={rng.choice([0, 2, 4])}"


def any_kv(rng: random.Random) -> str:
    """A cache's spec."""
    plain = ("f16", "q8_0", "q4_0", "q8_0/q4_0", "f16:attention=fused", "q8_0:attention=fused", "bf16")
    whole = ("mixed", "mixed:compact", "mixed:balanced", "mixed:quality", "mixed:attention=merged")
    same = (
        "mixed:cold_k=q4_0,cold_v=q4_0,threshold=64,group=16,sinks=4",
        "mixed:layers=0-:q4_0",
        "mixed:attention=fused",
        "mixed:threshold=0,group=1,sinks=0",
    )
    cold = rng.choice(["q4_0", "q8_0", "q5_0", "lm4", "tc3"])
    made = f"mixed:cold={cold},{numbers(rng)},attention={rng.choice(['auto', 'fused', 'merged'])}"
    budget = f"mixed:budget={rng.choice(['4.5bit', '6bit', '8.5bit', '64MiB'])}"
    layers = f"mixed:layers={rng.choice(['0', '1'])}:{rng.choice(['q8_0', 'q4_0/q8_0'])}"
    return rng.choice([rng.choice(plain), rng.choice(whole), rng.choice(same), made, budget, layers])


def any_settings(rng: random.Random, *, adapters: Callable[[int], str] | None) -> Settings:
    """Random settings, most of them near the defaults, so that pairs agree now and then."""
    kv = any_kv(rng)
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options |= rng.choice(
            [
                {"rope_freq_base": 5000.0},
                {"rope_freq_base": 10000.0},
                {"rope_freq_scale": 0.5},
                {"rope_freq_scale": 1.0},
                {"rope_scaling_type": 2, "rope_freq_scale": 0.5},
                {"rope_scaling_type": 2, "rope_freq_scale": 0.5, "yarn_orig_ctx": 128},
                {"yarn_orig_ctx": 128},
                {"yarn_attn_factor": 1.25},
                {"kv_overrides": {"general.name": "another"}},
                {"kv_overrides": {"tokenizer.ggml.add_bos_token": False}},
            ]
        )
    if kv.startswith(("f16", "bf16")) and rng.random() < 0.5:
        options["flash_attn"] = rng.random() < 0.5 or "fused" in kv
    options |= rng.choice(
        [{}, {}, {"n_threads": 2}, {"n_ctx": 1024}, {"swa_full": True}, {"n_seq_max": 2, "n_ctx": 1024}]
    )
    if adapters is not None and rng.random() < 0.2:
        options |= {"lora_path": adapters(rng.randrange(2)), "lora_scale": rng.choice([1.0, 0.5])}
    live = rng.random()
    window = None
    if "mixed" in kv and live < 0.25:
        window = rng.choice([(0, 1, 0), (16, 8, 4), (32, 16, 2), (64, 16, 4)])
    adapter = (
        (rng.randrange(2), rng.choice([1.0, 0.5])) if adapters is not None and 0.25 < live < 0.35 else None
    )
    control = rng.randrange(2) if 0.35 < live < 0.4 else None
    return Settings(kv, options, window, adapter, control)


@contextmanager
def opened(path: Path, settings: Settings, adapters: Callable[[int], str] | None = None) -> Iterator[Llama]:
    """A `Llama` with these settings."""
    options = {"n_ctx": N_CTX, **_FIXED, **settings.options}
    with Llama(path, kv=settings.kv, **options) as llm:
        if settings.window is not None and isinstance(llm.kv.config, MixedKVConfig):  # a budget may be F16
            names = ("quantization_threshold", "group_size", "sink_tokens")
            llm.kv.set_window(**dict(zip(names, settings.window, strict=True)))
        if settings.adapter is not None and adapters is not None:
            set_adapter(llm, adapters(settings.adapter[0]), settings.adapter[1])
        if settings.control is not None:
            set_control(llm, settings.control)
        yield llm


def set_adapter(llm: Llama, path: str, scale: float) -> None:
    """Set an adapter by llama.cpp's own functions; scale 0 takes it away."""
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, path.encode())
    assert adapter
    scales = (ctypes.c_float * 1)(scale)
    adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
    assert llama_cpp.llama_set_adapters_lora(llm.ctx, adapters, 1, scales) == 0


def set_control(llm: Llama, seed: int | None) -> None:
    """Set a control vector, None: none, by llama.cpp's own function."""
    n, n_layer = llama_cpp.llama_model_n_embd(llm.model), llama_cpp.llama_model_n_layer(llm.model)
    values = np.random.default_rng(seed or 0).standard_normal((n_layer - 1) * n).astype(np.float32) * 0.1
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) if seed is not None else None
    assert llama_cpp.llama_set_adapter_cvec(llm.ctx, pointer, values.size, n, 1, n_layer - 1) == 0


def adapters_in(folder: Path, model: Path) -> Callable[[int], str]:
    """Return a function that makes the adapter of a seed."""
    return cache(lambda seed: str(write_adapter(folder / f"{model.stem}-{seed}.gguf", model, seed, size=0.2)))


def read_all(llm: Llama, n: int) -> Rows:
    """The first rows of every layer, [n, width], as the model computes them."""
    found = {}
    for layer in llm.kv.layers:
        view = llm.kv.layer(layer.il)
        for which, read in (("K", view.k), ("V", view.v)) if layer.head_size_v else (("K", view.k),):
            rows = read(0, 0, n, basis="model")
            found[layer.il, which] = rows.reshape(len(rows), -1).astype(np.float64)
    return found


def furthest(rows: Rows, expected: Rows) -> float:
    """How far a row is off at most, as a share of its size. Sliding windows may have let go of rows."""
    worst = 0.0
    for name, want in expected.items():
        n = min(len(want), len(rows[name]))
        if n:
            off = np.linalg.norm(rows[name][-n:] - want[-n:], axis=1)
            worst = max(worst, float((off / np.maximum(np.linalg.norm(want[-n:], axis=1), 1e-9)).max()))
    return worst
