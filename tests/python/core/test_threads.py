"""A context's CPU threads: its own, whichever thread of the process calls."""

from __future__ import annotations

import ctypes
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from mixedkv import Llama, system
from mixedkv.bundled import model_path
from support import TESTS
from support.patience import PATIENCE

pytestmark = pytest.mark.full

PROMPT = [5 + i % 200 for i in range(300)]
N_DECODE = 40


def make(n_threads: int, n_threads_batch: int | None = None) -> Llama:
    return Llama(
        model_path(),
        n_ctx=512,
        n_threads=n_threads,
        n_threads_batch=n_threads_batch or n_threads,
        verbose=False,
    )


def decode_time(llm: Llama, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a decode step: the fastest of some, so that what else runs has little say."""
    llm.reset()
    llm.eval(PROMPT)
    times = []
    for _ in range(N_DECODE):
        begin = clock()
        llm.eval([7])
        times.append(clock() - begin)
    return min(times)


def in_thread(work: Callable[[], float]) -> float:
    result: list[float] = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.needs("two cores")
def test_another_thread_is_as_fast() -> None:
    """OpenMP's was 14 times slower there."""
    with make(2) as llm:
        # in turns, until both have had a core each for some microseconds
        here = there = math.inf
        for _ in range(20):
            here = min(here, decode_time(llm))
            there = min(there, in_thread(lambda: decode_time(llm)))
            if there < 4 * here:
                break
        assert there < 4 * here


def logits_of(llm: Llama) -> bytes:
    llm.reset()
    llm.eval(PROMPT)
    return ctypes.string_at(llm._ctx.get_logits_ith(-1), 4 * llm.n_vocab())


@pytest.mark.parametrize("n_threads_batch", [1, 2, 3])
def test_results_do_not_depend_on_the_caller(n_threads_batch: int) -> None:
    with make(2, n_threads_batch) as llm:
        results = [logits_of(llm)]
        thread = threading.Thread(target=lambda: results.append(logits_of(llm)))
        thread.start()
        thread.join()
    assert results[0] == results[1]


def test_threads_end_with_the_context() -> None:
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("threads are counted in /proc")

    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    make(2).close()
    before = count()
    for _ in range(3):
        llm = make(3, 2)
        assert count() == before + 2 + 1
        llm.close()
    assert count() == before


def test_a_number_no_pool_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="512 CPU threads"):
        make(513)


ONE_CORE = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from core.test_threads import decode_time, make
with make(1) as one, make(2) as two:
    print(*(min(decode_time(llm, time.process_time) for _ in range(3)) for llm in (one, two)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound with sched_setaffinity")
def test_two_threads_on_one_core_get_on() -> None:
    """Without a yield in ggml's barrier each of a token's barriers lasts a time slice, and takes it from the
    process: what other processes take is not counted.
    """
    done = subprocess.run(
        [sys.executable, "-c", ONE_CORE],
        capture_output=True, text=True, timeout=PATIENCE, check=True, cwd=TESTS,
    )  # fmt: skip
    one, two = map(float, done.stdout.split())
    assert two < 6 * one


def idle_cpu_time(llm: Llama) -> float:
    """CPU seconds that the process takes after a step, while nobody asks for the next one."""
    llm.reset()
    llm.eval(PROMPT[:32])
    used = 0.0
    for _ in range(10):
        llm.eval([7])
        begin = time.process_time()
        time.sleep(0.02)
        used += time.process_time() - begin
    return used


@pytest.mark.needs("two cores")
def test_threads_beyond_the_cores_do_not_wait_busily() -> None:
    """They took the cores from those that work: decoding was a fifth slower than with the stock library."""
    n_cores = system.usable_cpus()
    with make(n_cores) as as_many, make(2 * n_cores) as more:
        assert idle_cpu_time(more) < idle_cpu_time(as_many) / 2


def decode_seconds(llm: Llama, n: int) -> float:
    llm.reset()
    llm.eval(PROMPT[:32])
    begin = time.perf_counter()
    for _ in range(n):
        llm.eval([7])
    return time.perf_counter() - begin


@pytest.mark.needs("two cores")
def test_neighbours_that_only_compute_leave_two_threads_their_share() -> None:
    """Threads that yielded at barriers waited for the neighbours at each: 200 ms a step, not 2."""
    busy = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    neighbours = [subprocess.Popen(busy, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 2)]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout
            assert neighbour.stdout.readline()
        with make(1) as one, make(2) as two:
            ratios = [decode_seconds(two, 20) / decode_seconds(one, 20) for _ in range(5)]
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()
    assert statistics.median(ratios) < 20
