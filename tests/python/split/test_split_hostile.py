"""Messages that no client of ours sends: each gets one status, and nobody else loses anything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from mixedkv_service.keys import Keys
from mixedkv_split import split_pb2 as pb
from mixedkv_split import wire
from mixedkv_split.client import SplitClient
from mixedkv_split.export import Exported
from mixedkv_split.head import Head
from support.servers import split_servers
from support.servers.split_servers import Running

pytestmark = pytest.mark.full

_PROMPT = list(range(3, 60))
_KEYS = {"anna": "anna-has-this-key-0", "bert": "bert-has-this-key-0"}
_WIDTH = 64
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def server(parts: Exported) -> Iterator[Running]:
    keys = parts.body.with_name("keys")
    keys.write_text("".join(f"{tenant}:{key}\n" for tenant, key in _KEYS.items()))
    keys.chmod(0o600)
    store = str(parts.body.with_name("store"))
    with split_servers.running(
        parts.body, keys=Keys.load(str(keys)), idle_timeout=30.0, store=store
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(head: Head, server: Running) -> Iterator[SplitClient]:
    with SplitClient(head, server.address, precision="f32", key=_KEYS["anna"]) as client:
        yield client


def _vectors(head: Head, **changes: Any) -> pb.Vectors:
    """A message that begins a session, with some fields changed."""
    data = wire.pack(head.embed([5, 6, 7]), pb.F32)
    fields: dict[str, Any] = {
        "session": b"s" * wire.SESSION_BYTES,
        "position": 0,
        "running_hash": wire.first_hash(head.pair, pb.F32),
        "precision": pb.F32,
        "n": 3,
        "data": data,
        "n_hidden": 1,
    }
    return pb.Vectors(**{**fields, **changes})


def _send(server: Running, *messages: pb.Vectors, tenant: str = "anna") -> Code:
    """The status of a stream with these messages."""
    with grpc.insecure_channel(server.address, [("grpc.max_send_message_length", -1)]) as channel:
        stub: Any = wire.Stub(channel)
        metadata = [("authorization", f"Bearer {_KEYS.get(tenant, tenant)}")]
        try:
            for _ in stub.Evaluate(iter(messages), metadata=metadata):
                pass
        except grpc.RpcError as error:
            return error.code()
        return Code.OK


def _numbers(*values: float) -> bytes:
    return np.resize(np.array(values, "<f4"), 3 * _WIDTH).tobytes()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, Code.OK),
        ({"session": b""}, Code.INVALID_ARGUMENT),
        ({"session": b"s" * 1000}, Code.INVALID_ARGUMENT),
        ({"running_hash": b""}, Code.INVALID_ARGUMENT),
        ({"running_hash": bytes(16)}, Code.INVALID_ARGUMENT),
        (
            {"running_hash": wire.first_hash("f" * 32, pb.F32)},
            Code.INVALID_ARGUMENT,
        ),  # another model's vectors
        ({"data": bytes(4 * 3 * (_WIDTH + 64))}, Code.INVALID_ARGUMENT),  # a wider one's
        ({"position": 1, "wrapped_key": b"k"}, Code.INVALID_ARGUMENT),
        ({"position": 1, "wrapped_key": bytes(80)}, Code.INVALID_ARGUMENT),
        ({"precision": 0}, Code.INVALID_ARGUMENT),
        ({"precision": 77}, Code.INVALID_ARGUMENT),
        ({"precision": pb.F16}, Code.INVALID_ARGUMENT),
        ({"n": 0, "data": b""}, Code.INVALID_ARGUMENT),
        ({"n": 2}, Code.INVALID_ARGUMENT),
        ({"n": 2**32 - 1}, Code.OUT_OF_RANGE),
        ({"n": 1000, "data": b""}, Code.INVALID_ARGUMENT),
        ({"data": b"x"}, Code.INVALID_ARGUMENT),
        ({"data": _numbers(1, float("nan"))}, Code.INVALID_ARGUMENT),
        ({"data": _numbers(float("inf"))}, Code.INVALID_ARGUMENT),
        ({"n_hidden": 4}, Code.INVALID_ARGUMENT),
        ({"n_hidden": 2**32 - 1}, Code.INVALID_ARGUMENT),
        ({"drop_begin": 4, "drop_end": 5}, Code.INVALID_ARGUMENT),
        ({"drop_begin": 1}, Code.INVALID_ARGUMENT),
        ({"position": 9, "drop_end": 9}, Code.INVALID_ARGUMENT),
        ({"position": 9, "drop_begin": 2**32 - 1, "drop_end": 2**32 - 1}, Code.INVALID_ARGUMENT),
        ({"position": 9, "drop_begin": 4, "drop_end": 8}, Code.FAILED_PRECONDITION),
        ({"position": 2**32 - 1, "drop_begin": 4, "drop_end": 8}, Code.OUT_OF_RANGE),
        ({"position": 2**32 - 1, "drop_end": 2**32 - 2}, Code.FAILED_PRECONDITION),
        ({"position": 1}, Code.FAILED_PRECONDITION),
        ({"position": 2**32 - 1}, Code.OUT_OF_RANGE),
    ],
)
def test_a_field_that_is_wrong_has_one_status(
    head: Head, server: Running, changes: dict[str, Any], code: Code
) -> None:
    session = {"session": bytes(random.Random(str(changes)).randbytes(16))}
    assert _send(server, _vectors(head, **{**session, **changes})) == code


def test_a_number_too_large_for_the_model_is_an_error_of_the_step(head: Head, server: Running) -> None:
    """Its square overflows: the hidden state is not finite or zero, and the engine goes on."""
    message = _vectors(head, data=_numbers(3e38), session=b"l" * 16)
    assert _send(server, message) in (Code.OK, Code.INTERNAL)
    assert _send(server, _vectors(head, session=b"m" * 16)) == Code.OK


def test_another_hash_or_position_asks_for_all_again(head: Head, server: Running) -> None:
    begin = _vectors(head, session=b"p" * 16)
    after = wire.next_hashes(begin.running_hash, begin.data, 3)[-1]
    right = {"session": b"p" * 16, "position": 3, "running_hash": after}
    assert _send(server, begin, _vectors(head, **right)) == Code.OK
    for wrong in ({"position": 4}, {"position": 2}, {"running_hash": begin.running_hash}):
        assert _send(server, begin, _vectors(head, **{**right, **wrong})) == Code.FAILED_PRECONDITION


def test_anothers_session_is_unknown(head: Head, server: Running) -> None:
    begin = _vectors(head, session=b"q" * 16)
    after = wire.next_hashes(begin.running_hash, begin.data, 3)[-1]
    assert _send(server, begin) == Code.OK
    replay = _vectors(head, session=b"q" * 16, position=3, running_hash=after)
    assert _send(server, replay, tenant="bert") == Code.FAILED_PRECONDITION
    assert _send(server, replay) == Code.OK


def test_a_wrong_key_is_told_at_once(head: Head, server: Running) -> None:
    for key in ("nobody-has-this-key", ""):
        assert _send(server, _vectors(head), tenant=key) == Code.UNAUTHENTICATED


def test_a_message_above_the_cap_is_refused(head: Head, server: Running) -> None:
    message = _vectors(head, data=bytes(wire.MAX_MESSAGE_BYTES + 1))
    assert _send(server, message) == Code.RESOURCE_EXHAUSTED


def _hostile(head: Head, rng: random.Random) -> pb.Vectors:
    """A message with one to three fields that are not what they should be."""
    odd: dict[str, Callable[[], Any]] = {
        "session": lambda: rng.randbytes(rng.choice([0, 1, 15, 16, 17, 4096])),
        "position": lambda: rng.choice([0, 1, 2, 3, 1000, 2**31, 2**32 - 1]),
        "running_hash": lambda: rng.randbytes(rng.choice([0, 15, 16, 17])),
        "precision": lambda: rng.choice([0, 1, 2, 3, 1000]),
        "n": lambda: rng.choice([0, 1, 2, 3, 4, 1024, 2**31, 2**32 - 1]),
        "data": lambda: rng.choice(
            [b"", rng.randbytes(3 * _WIDTH * 4), rng.randbytes(7), _numbers(1e30, -1e30)]
        ),
        "n_hidden": lambda: rng.choice([0, 3, 4, 64, 65, 2**32 - 1]),
        "drop_begin": lambda: rng.choice([0, 1, 3, 4, 2**31, 2**32 - 1]),
        "drop_end": lambda: rng.choice([0, 1, 2, 3, 999, 2**31, 2**32 - 1]),
        "wrapped_key": lambda: rng.randbytes(rng.choice([1, 79, 80, 4096])),
    }
    fields = {name: odd[name]() for name in rng.sample(sorted(odd), rng.randint(1, 3))}
    return _vectors(head, **{"session": rng.randbytes(16), **fields})


@pytest.mark.nightly
def test_500_hostile_messages_cost_nobody_anything(head: Head, server: Running, client: SplitClient) -> None:
    rng = random.Random(7)
    with client.session() as session:
        expected = list(session.generate_tokens(_PROMPT, max_tokens=40, temperature=0))
    known = (Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.OUT_OF_RANGE, Code.INTERNAL)
    seen: Counter[Code] = Counter()
    with client.session() as session:
        answer = []
        for token in session.generate_tokens(_PROMPT, max_tokens=40, temperature=0):
            answer.append(token)
            for _ in range(-(-500 // len(expected))):
                seen[_send(server, _hostile(head, rng), tenant=rng.choice(list(_KEYS)))] += 1
        assert session.n_resends == 0
    assert answer == expected
    assert sum(seen.values()) >= 500
    assert seen.keys() <= {*known}
    assert seen.keys() >= {Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.OUT_OF_RANGE}
