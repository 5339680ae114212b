"""Split servers for tests, in this process and in others, and models to split."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from mixedkv import Llama
from mixedkv.engine.engine import Engine
from mixedkv.model.gguf_file import read_model_file
from mixedkv.native.detokenizer import Detokenizer
from mixedkv.native.llama_cpp import vocab
from mixedkv_service.keys import Keys
from mixedkv_service.metrics import Metrics
from mixedkv_split.client import SplitClient
from mixedkv_split.export import Exported, export
from mixedkv_split.head import Head
from mixedkv_split.parts import BODY, read_part
from mixedkv_split.server import open_engine, start
from mixedkv_split.split_settings import SplitSettings
from support.models import zoo

# architectures that can be split, with what is special about their graphs
ARCHITECTURES = ("llama-64", "qwen2", "qwen3", "gemma2", "gemma3")


def make(name: str) -> zoo.Gguf:
    """A zoo model, or a relative that only these tests need."""
    if name == "qwen2":  # biases of Q, K and V, and of the output
        shape = zoo.Shape("qwen2", "qwen2", n_embd=128, n_head=2, n_head_kv=1, rope="neox")
        g = zoo.decoder(shape)
        for il in range(g.shape.n_layer):
            for part in ("q", "k", "v"):
                n = g.tensors[f"blk.{il}.attn_{part}.weight"].shape[0]
                g.vector(f"blk.{il}.attn_{part}.bias", n, mean=0.0)
        g.vector("output.bias", zoo.N_VOCAB, mean=0.0, std=0.5)
        return g
    if name == "gemma3":  # the client multiplies the embeddings; output head tied
        g = zoo.make("gemma2")
        g.shape = zoo.Shape("gemma3", "gemma3", rope="neox")
        del g.keys["attn_logit_softcapping"], g.keys["final_logit_softcapping"]
        for il in range(g.shape.n_layer):
            for part in ("q", "k"):
                g.vector(f"blk.{il}.attn_{part}_norm.weight", g.shape.head, mean=1.6)
        return g
    if name == "gemma":  # output head tied; the server scales what comes from outside
        g = zoo.decoder(zoo.Shape("gemma", "gemma", rope="neox"))
        del g.tensors["output.weight"]
        return g
    return zoo.make(name)


def write(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    if not path.exists():
        make(name).write(path)
    return path


def split(model: Path, folder: Path) -> Exported:
    return export(model, folder / f"{model.stem}.head.gguf", folder / f"{model.stem}.body.gguf")


@dataclass
class Running:
    """A server on a thread of this process."""

    engine: Engine
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def running(
    body: Path, *, keys: Keys | None = None, credentials: grpc.ServerCredentials | None = None, **options: Any
) -> Iterator[Running]:
    settings = SplitSettings(
        **{"body": str(body), "n_ctx": 1024, "threads": 1, "port": 0, "kv": "f16", **options}
    )
    keys = keys or Keys()
    part = read_part(read_model_file(body), BODY)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    with open_engine(settings, keys, Metrics(bool(keys))) as engine:
        begun = asyncio.run_coroutine_threadsafe(start(settings, engine, part, keys, credentials), loop)
        server, port = begun.result()
        try:
            yield Running(engine, port)
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(0.2), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextmanager
def linked(parts: Exported, head: Head, **options: Any) -> Iterator[SplitClient]:
    """A client with the head, of a server of the body: see `running`."""
    with running(parts.body, **options) as server, SplitClient(head, server.address) as client:
        yield client


def local_tokens(llm: Llama, prompt: list[int], n: int) -> list[int]:
    """The likeliest tokens after a prompt, as `Llama` alone has them, up to the one that ends the answer."""
    llm.reset()
    answer: list[int] = []
    is_end = Detokenizer(vocab(llm)).is_end
    for token in llm.generate(prompt, temp=0.0):
        if len(answer) == n or is_end(token):
            return answer
        answer.append(token)
    return answer


def random_prompts(n: int, seed: int = 1) -> list[list[int]]:
    """Of the zoo's vocabulary, 1 to 80 tokens long."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, zoo.N_VOCAB, rng.integers(1, 81)).tolist() for _ in range(n)]
