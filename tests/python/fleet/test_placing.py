"""Which replica a prompt goes to."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mixedkv_ray.placing import Placing
from mixedkv_ray.prefix import BLOCK, Prefix, prefix_of

pytestmark = pytest.mark.full

REPLICAS = ["a", "b", "c"]


def chat(*texts: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text} for text in texts], **more}).encode()


def text(seed: int, n: int = 4 * BLOCK) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=n))


def place(placing: Placing, request: str, prefix: Prefix) -> str:
    first = placing.order(prefix, REPLICAS)[0]
    placing.sent(request, prefix, first)
    return first


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"session_id": "\\ud800", "prompt": "\\ud800"}'])
def test_any_body_goes_somewhere(body: bytes) -> None:
    """Where it is refused with a reason."""
    assert place(Placing(), "0", prefix_of(body)) in REPLICAS


def test_a_prompt_goes_where_its_beginning_lies() -> None:
    placing = Placing()
    homes = {}
    for i in range(6):
        homes[i] = place(placing, f"{i}", prefix_of(chat(text(i))))
        placing.done(f"{i}")
    assert set(homes.values()) == set(REPLICAS)  # of equals the one that was sent nothing for longest
    for i in range(6):
        longer = prefix_of(chat(text(i), "an answer", text(100 + i)))
        assert placing.order(longer, REPLICAS)[0] == homes[i]
        assert 3 * BLOCK <= placing.held(longer, homes[i]) <= 5 * BLOCK


def test_a_replica_that_comes_later_gets_its_share_and_no_more() -> None:
    """Also when the others have been at work for long."""
    placing = Placing()
    for i in range(30):
        home = placing.place(f"{i}", prefix_of(chat(text(i))), ["a", "b"])[0]
        placing.done(f"{i}")
    homes = []
    for i in range(30, 42):
        homes.append(placing.place(f"{i}", prefix_of(chat(text(i))), REPLICAS)[0])
        placing.done(f"{i}")
    assert homes[0] == "c" != home
    assert sorted(homes) == sorted(REPLICAS * 4)


def test_waiting_counts_against_it() -> None:
    prefix = prefix_of(chat(text(1)))
    for beta, goes_on in ((0.0, True), (1.0, False)):
        placing = Placing(beta)
        home = place(placing, "0", prefix)
        placing.done("0")
        for i in range(3):  # others that are long, and only this replica has
            placing.sent(f"other {i}", prefix_of(chat(text(50 + i, 40 * BLOCK))), home)
        assert (placing.order(prefix, REPLICAS)[0] == home) == goes_on
        for i in range(3):
            placing.done(f"other {i}")
        assert placing.order(prefix, REPLICAS)[0] == home


def test_what_has_been_answered_does_not_wait() -> None:
    """Who goes on has the answer; that the request is over is heard later."""
    placing = Placing()
    home = place(placing, "0", prefix_of(chat(text(1, 40 * BLOCK))))
    assert placing.order(prefix_of(chat(text(1, 40 * BLOCK), "an answer", "and?")), REPLICAS)[0] == home
    same_again = prefix_of(chat(text(1, 40 * BLOCK)))
    place(placing, "1", same_again)
    assert placing.order(prefix_of(chat(text(1, 40 * BLOCK) + "?")), REPLICAS)[0] != home  # no answer in it


def test_prompts_that_come_together_go_apart() -> None:
    """Where each went is heard when the others have been placed."""
    now = [0.0]
    placing = Placing(clock=lambda: now[0])
    prompts = {f"{i}": prefix_of(chat(text(i))) for i in range(6)}
    first = {name: placing.place(name, prefix, REPLICAS)[0] for name, prefix in prompts.items()}
    assert sorted(first.values()) == sorted(REPLICAS * 2)
    for name, prefix in prompts.items():  # is asked again, as when a replica takes no more
        assert placing.place(name, prefix, REPLICAS)[0] == first[name]
        placing.sent(name, prefix, first[name])
        placing.done(name)
    home = prefix_of(chat(text(0), "an answer", "and?"))
    placing.place("given up", prefix_of(chat(text(9, 40 * BLOCK))), [first["0"]])
    assert placing.order(home, REPLICAS)[0] != first["0"]
    now[0] = 60.0  # it was never sent
    assert placing.order(home, REPLICAS)[0] == first["0"]
    assert placing.place("", Prefix(), []) == []


def test_a_session_stays() -> None:
    placing = Placing()
    home = place(placing, "0", prefix_of(chat("short", session_id="s")))
    placing.done("0")
    for i in range(9):
        assert placing.order(prefix_of(chat(text(i), session_id="s")), REPLICAS)[0] == home
        assert placing.order(prefix_of(chat(text(i)), session="s"), REPLICAS)[0] == home
    assert placing.order(prefix_of(chat("short", session_id="s")), ["x", "y"])[0] in "xy"  # it has gone


def test_tenants_have_prefixes_of_their_own() -> None:
    body = chat(text(1), session_id="s")
    anna, ben = prefix_of(body, "Bearer anna"), prefix_of(body, "Bearer ben")
    assert not set(anna.blocks) & set(ben.blocks)
    assert anna.session != ben.session


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b"5", b'{"messages": 7}', b'{"prompt": {"a": 1}}'])
def test_what_is_no_prompt_goes_anywhere(body: bytes) -> None:
    assert prefix_of(body).blocks == ()
    assert sorted(Placing().order(prefix_of(body), REPLICAS)) == REPLICAS


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixedkv_ray.placing._MAX_BLOCKS", 10)
    placing = Placing()
    for i in range(20):
        place(placing, "r", prefix_of(chat(text(i))))
        placing.done("r")
    assert len(placing._holders) == 10
    assert placing.held(prefix_of(chat(text(19))), placing.order(prefix_of(chat(text(19))), REPLICAS)[0])
