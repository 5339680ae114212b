"""Ctrl-C, and `Llama.interrupt`: what runs ends soon, and what was there before stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.engine import Engine
from mixedkv.errors import ClosedError, StoppedError
from support.engine.conversations import open_llama
from support.patience import PATIENCE

pytestmark = pytest.mark.full

LONG = [5 + i % 200 for i in range(4000)]
BUSY: dict[str, Any] = {"n_ctx": 8192, "n_batch": 4096, "n_ubatch": 512}

EVALUATE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mixedkv import Llama
from mixedkv.bundled import model_path
more = {"stream_layers": 2} if sys.argv[2] == "streamed" else {}
threads = {"n_threads": 1, "n_threads_batch": 1}
llm = Llama(model_path(), kv=sys.argv[1], n_ctx=8192, n_batch=4096, verbose=False, **threads, **more)
llm.eval(list(range(5, 50)))
try:
    print("ready", flush=True)
    while True:
        llm.n_tokens = 45
        llm.eval([5 + i % 200 for i in range(4000)])
except KeyboardInterrupt:
    print("interrupted", llm.n_tokens, flush=True)
llm.eval([5, 6, 7])
print("goes on", flush=True)
"""

LOAD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from mixedkv import Llama
from mixedkv.bundled import model_path
load = lambda: Llama(model_path(), n_ctx=256, n_threads=1, verbose={verbose}).close()
load()  # what is imported by then cannot be interrupted: Python would end by the signal though it was caught
try:
    print("ready", flush=True)
    while True:
        load()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def interrupted(process: subprocess.Popen[str], pause: float) -> str:
    """What a child writes after it was ready and got Ctrl-C, once."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(pause)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "Exception ignored" not in err
    return out


@pytest.mark.parametrize(("kv", "how"), [("mixed", "resident"), ("f16", "resident"), ("mixed", "streamed")])
def test_ctrl_c_ends_an_evaluation(kv: str, how: str) -> None:
    out = interrupted(child(EVALUATE, kv, how), 0.3)
    n, *rest = out.removeprefix("interrupted ").splitlines()
    assert int(n) in {*range(45, 4045, 512), 4045}  # micro-batches that have ended well stay
    assert rest == ["goes on"]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.nightly
def test_ctrl_c_while_a_model_is_loaded_is_not_lost(verbose: bool) -> None:
    """llama_cpp's log is a Python function: the signal's handler ran there, and what it raised was lost."""
    for i in range(6):
        assert interrupted(child(LOAD.format(verbose=verbose)), 0.1 + 0.013 * i) == "interrupted\n"


def test_another_thread_can_stop_an_evaluation() -> None:
    with open_llama(**BUSY) as llm:
        llm.eval(LONG[:50])
        errors: list[Exception] = []

        def evaluate() -> None:
            try:
                while True:
                    llm.n_tokens = 50
                    llm.eval(LONG)
            except StoppedError as error:
                errors.append(error)

        thread = threading.Thread(target=evaluate)
        thread.start()
        while thread.is_alive():
            time.sleep(0.01)
            llm.interrupt()
        assert "Llama.interrupt" in str(errors[0])
        assert llm.n_tokens in range(50, 4050, 512)  # micro-batches that have ended well stay
        llm.n_tokens = 50
        llm.interrupt()  # nothing runs: the next one is stopped
        with pytest.raises(StoppedError):
            llm.eval(LONG[:50])
        llm.interrupt()
        llm.interrupt(False)
        llm.eval(LONG[:50])
        assert llm.n_tokens == 100


def test_after_a_stop_the_next_logits_are_those_of_before() -> None:
    with open_llama(**BUSY) as llm:
        llm.eval(LONG[:300])
        llm.eval([7])
        before = llm.sample(temp=0.0)
        timer = threading.Timer(0.02, llm.interrupt)
        timer.start()
        with suppress(StoppedError):
            while True:
                llm.n_tokens = 301
                llm.eval(LONG)
        timer.join()
        assert llm.n_tokens >= 301
        llm.n_tokens = 300
        llm.eval([7])
        assert llm.sample(temp=0.0) == before


def test_recurrent_states_are_not_copied_for_short_steps(zoo_path: Callable[[str], Path]) -> None:
    """Where a graph can be stopped half-way they are, so a token is stopped before it begins."""
    with Llama(str(zoo_path("lfm2")), kv="mixed", n_ctx=1024, verbose=False) as llm:
        llm.eval(LONG[:300])
        llm.interrupt()
        with pytest.raises(StoppedError):
            llm.eval([7])
        assert llm.n_tokens == 300
        llm.eval([7])
        llm.interrupt()
        with pytest.raises(StoppedError):
            llm.eval(LONG[:100])
        assert llm.n_tokens == 301
        llm.eval([8])
        logits = np.array(llama_cpp.llama_get_logits(llm.ctx)[: llm.n_vocab()])
        llm.reset()
        for tokens in (LONG[:300], [7], [8]):
            llm.eval(tokens)
        assert np.array_equal(logits, llama_cpp.llama_get_logits(llm.ctx)[: llm.n_vocab()])


def test_filling_a_gap_can_be_stopped() -> None:
    with open_llama(**BUSY) as llm:
        llm.eval(LONG[:50])
        llm.interrupt()
        with pytest.raises(StoppedError):
            llm.kv.fill(LONG[:20], list(range(50, 70)))
        llm.eval(LONG[:50])
        assert llm.n_tokens == 100


def test_close_ends_the_evaluation_that_runs() -> None:
    llm = open_llama(**BUSY)
    errors: list[BaseException] = []

    begun = threading.Event()

    def evaluate() -> None:
        try:
            while True:
                begun.set()
                llm.n_tokens = 0
                llm.eval(LONG)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert begun.wait(PATIENCE)
    time.sleep(0.1)
    llm.close()
    thread.join()
    assert [type(error) for error in errors] == [ClosedError]


def test_a_thread_cannot_close_what_it_evaluates_with() -> None:
    with open_llama() as llm:

        def close(*_: Any) -> Any:
            llm.close()

        with llm.busy.acquire(), pytest.raises(RuntimeError, match="this thread is in a call"):
            llm.close()
        llm.eval([1, 2, 3])
        assert llm.n_tokens == 3


def test_an_interrupt_stops_one_step_of_an_engine() -> None:
    """It was never taken back: all answers failed from then on."""
    with open_llama(n_seq_max=4, kv_unified=True) as llm, Engine(llm) as engine:
        llm.interrupt()
        with pytest.raises(StoppedError, match=r"Llama\.interrupt"):
            engine.submit(LONG[:50], max_tokens=4).result()
        assert engine.submit(LONG[:50], max_tokens=4, temperature=0.0).result().reason


def test_ctrl_c_that_leaves_a_call_entered_is_what_the_caller_sees() -> None:
    llm = open_llama()
    call = llm.busy.acquire()

    def interrupted_in_a_call() -> None:
        with llm:
            call.__enter__()  # as when Ctrl-C comes in the last instructions of a call
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_in_a_call()
    call.__exit__(None, None, None)
    llm.close()
