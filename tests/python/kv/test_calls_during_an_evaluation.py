"""One thread evaluates, another one reaches for rows: it is told so, and no logit changes."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from mixedkv import Llama
from mixedkv.engine.engine import Engine
from mixedkv.errors import ContextBusyError
from support.engine.conversations import open_llama
from support.patience import PATIENCE

pytestmark = pytest.mark.full

TOKENS = [5 + i % 200 for i in range(400)]

# each leaves sequence 0 as it is
TOUCHES: dict[str, Callable[[Llama], object]] = {
    "export": lambda llm: llm.kv.export(1, 0, 40, TOKENS[:40]),
    "layer.k": lambda llm: llm.kv.layer(0).k(1),
    "copy": lambda llm: llm.kv.copy(1, 2),
    "remove": lambda llm: llm.kv.remove(2),
    "set_window": lambda llm: llm.kv.set_window(group_size=16),
    "save_state": lambda llm: llm.save_state(),
    "stats": lambda llm: llm.kv.stats(),
    "positions": lambda llm: llm.kv.positions(1),
    "used": lambda llm: llm.kv.used,
}


def last_logits(llm: Llama) -> bytes:
    return ctypes.string_at(llm._ctx.get_logits_ith(-1), 4 * llm.n_vocab())


def evaluate_beside(llm: Llama, touch: Callable[[Llama], object]) -> int:
    """Evaluate the tokens from the start, twice and until the other thread was turned away; how often it
    was.
    """
    turned_away, end = threading.Event(), time.monotonic() + PATIENCE

    def rounds() -> None:
        n = 0
        while n < 2 or (not turned_away.is_set() and time.monotonic() < end):
            llm.reset()
            llm.eval(TOKENS)
            n += 1

    n_busy, thread = 0, threading.Thread(target=rounds)
    thread.start()
    while thread.is_alive():
        try:
            touch(llm)
        except ContextBusyError:
            n_busy += 1
            turned_away.set()
    thread.join()
    return n_busy


@pytest.mark.parametrize("name", TOUCHES)
def test_rows_are_not_touched_while_another_thread_evaluates(name: str) -> None:
    with open_llama("mixed", n_seq_max=3, kv_unified=True) as llm:
        llm.eval(TOKENS[:40])
        llm.kv.copy(0, 1)
        llm.reset()
        llm.eval(TOKENS)
        alone = last_logits(llm)
        assert evaluate_beside(llm, TOUCHES[name]) > 0
        assert llm.n_tokens == len(TOKENS)
        assert last_logits(llm) == alone
        TOUCHES[name](llm)  # the thread has ended: nothing is in the way


def test_two_threads_that_evaluate_take_turns() -> None:
    with open_llama() as llm:
        llm.eval(TOKENS[:1])
        threads = [threading.Thread(target=llm.eval, args=([7] * 50,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert llm.n_tokens == 201
        turns = last_logits(llm)
        llm.reset()
        llm.eval(TOKENS[:1])
        for _ in range(4):
            llm.eval([7] * 50)
        assert last_logits(llm) == turns


def test_the_message_says_what_to_do() -> None:
    with open_llama() as llm, llm.busy.acquire():
        errors: list[Exception] = []

        def export() -> None:
            try:
                llm.kv.export()
            except ContextBusyError as error:
                errors.append(error)

        thread = threading.Thread(target=export)
        thread.start()
        thread.join()
    assert "kv.export: another thread is using this context" in str(errors[0])
    assert "Engine.call" in str(errors[0])


def test_an_engine_waits_for_who_reads_rows() -> None:
    with open_llama(n_ctx=2048, n_seq_max=2, kv_unified=True) as llm, Engine(llm) as engine:
        answer = engine.submit(TOKENS[:50], max_tokens=200, temperature=0.0)
        n_busy = 0
        for _ in range(200):
            with contextlib.suppress(LookupError):
                try:
                    llm.kv.export(0, 0, 20, TOKENS[:20])
                except ContextBusyError:
                    n_busy += 1
        assert answer.result().text
        again = engine.submit(TOKENS[:50], max_tokens=200, temperature=0.0)
        assert again.result().text == answer.result().text
