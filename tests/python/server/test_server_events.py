"""KV events: what a listener makes of them is what the context holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.patience import PATIENCE
from support.servers.remote import free_port
from support.servers.server import Direct, running

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed")
zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")

from mixedkv.prefix.sequences import Sequence  # noqa: E402
from mixedkv_server.kv_events import BLOCK, HeldBlocks, KVEvents  # noqa: E402

pytestmark = pytest.mark.full

_AS_VLLM: Any = {"array_like": True, "omit_defaults": True, "gc": False}


class KVCacheEvent(msgspec.Struct, tag=True, **_AS_VLLM):
    """The messages as vLLM documents them."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, **_AS_VLLM):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


@dataclass
class Listener:
    """Tokens of all blocks up to and with each, by hash: what a router indexes."""

    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def hear(self, event: Any) -> None:
        match type(event).__name__:
            case "AllBlocksCleared":
                self.blocks.clear()
            case "BlockRemoved":
                for name in event.block_hashes:
                    del self.blocks[name]
            case _:
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                before = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                for i, name in enumerate(event.block_hashes):
                    before = (*before, *event.token_ids[i * size : (i + 1) * size])
                    assert name not in self.blocks
                    self.blocks[name] = before


def held_prefixes(pool: list[Sequence]) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (seq.tenant, tuple(seq.tokens[: BLOCK * (i + 1)]))
        for seq in pool
        for i in range(len(seq.tokens) // BLOCK)
        if not seq.assembled
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_listener_knows_what_is_held(seed: int) -> None:
    rng = random.Random(seed)
    pool = [Sequence(i) for i in range(5)]
    blocks, listener = HeldBlocks(), Listener()
    for _ in range(300):
        seq = rng.choice(pool)
        what = rng.randrange(5)
        if what == 0:  # cut or dropped
            del seq.tokens[rng.choice([0, rng.randrange(len(seq.tokens) + 1)]) :]
            seq.version += 1
        elif what == 1 and not seq.tokens:  # a copy of another
            other = rng.choice(pool)
            seq.tokens, seq.tenant = other.tokens[: rng.randrange(len(other.tokens) + 1)], other.tenant
        elif what == 2 and not seq.tokens:
            seq.tenant = rng.choice(["", "anna"])
        else:
            seq.tokens.extend(rng.choice([1, 1, 1, 2]) for _ in range(rng.randrange(40)))
        seq.assembled = rng.random() < 0.05
        if rng.random() < 0.02:  # somebody begins to listen
            blocks.forget()
            listener.blocks.clear()
        for event in blocks.changes(blocks.look([seq for seq in pool if seq.tokens])):
            listener.hear(event)
        expected = held_prefixes(pool)
        assert len(listener.blocks) == len(expected)
        assert set(listener.blocks.values()) == {tokens for _, tokens in expected}


@contextmanager
def listening(endpoint: str, topic: str) -> Iterator[Any]:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE))
    subscriber.connect(endpoint)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, topic)
    try:
        yield subscriber
    finally:
        context.destroy(linger=0)


def test_a_server_tells_routers_what_it_holds() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    options = ("--kv-events", f"{endpoint}#kv@pod@model", "--n-ctx", "2048")
    decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
    with running(*options) as server:
        prompt = "The cache is told to routers, block by block, as long as it is there. " * 6
        tokens = server.post("/tokenize", {"content": prompt, "add_special": True})["tokens"]
        with listening(endpoint, "kv@pod@model") as subscriber:
            listener, numbers = Listener(), []

            def hear_until(expected: tuple[int, ...]) -> None:
                while expected not in listener.blocks.values():
                    topic, number, payload = subscriber.recv_multipart()
                    assert topic == b"kv@pod@model"
                    numbers.append(int.from_bytes(number, "big"))
                    for event in decode(payload).events:
                        listener.hear(event)

            server.post("/v1/completions", {"prompt": prompt, "max_tokens": 3})
            whole = tuple(tokens[: len(tokens) // BLOCK * BLOCK])
            hear_until(whole)
            assert numbers == sorted(set(numbers))
            with listening(endpoint, "") as late:  # is told what was before it came
                heard = Listener()
                while whole not in heard.blocks.values():
                    for event in decode(late.recv_multipart()[2]).events:
                        heard.hear(event)
        text = server.metrics()
        for line in (
            "mixedkv_num_requests_waiting 0.0",
            "mixedkv_kv_cache_running_perc 0.0",
            'mixedkv_lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1',
        ):
            assert line in text


def test_a_model_that_ends_holds_nothing_and_others_go_on() -> None:
    decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
    prompt = "One of two models is taken away, and the other stays where it is. " * 4
    with (
        Direct(n_ctx=512) as one,
        Direct(n_ctx=512) as two,
        KVEvents("tcp://127.0.0.1:*", {"one": one.engine, "two": two.engine}) as events,
        listening(events.endpoint, "") as subscriber,
    ):

        def hear(topic: bytes, kind: type) -> None:
            """Until the topic has such an event."""
            heard: list[Any] = []
            while not any(isinstance(event, kind) for event in heard):
                name, _, payload = subscriber.recv_multipart()
                heard = decode(payload).events if name == topic else []

        hear(b"two", AllBlocksCleared)  # of who begins to listen
        one.answer(prompt, 1)
        hear(b"one", BlockStored)
        one.engine.close()
        hear(b"one", AllBlocksCleared)
        two.answer(prompt, 1)
        hear(b"two", BlockStored)
