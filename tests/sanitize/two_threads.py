"""A `Llama` that evaluates in one thread while another reaches for its rows, under the thread sanitizer:
two_threads.py guarded|unguarded N_THREADS

`unguarded` goes past the guard: the sanitizer has to find races there, or it would find none anywhere.
"""

from __future__ import annotations

import contextlib
import sys
import threading

from mixedkv import Llama, llama
from mixedkv.bundled import model_path
from mixedkv.errors import ContextBusyError

TOKENS = [5 + i % 200 for i in range(48)]


def touch(llm: Llama, guarded: bool) -> None:
    if not guarded:
        llama.llama_cpp.llama_memory_seq_pos_max(llm.kv._memory, 0)
        return
    llm.kv.layers  # noqa: B018  (any thread may ask)
    llm.kv.export(1, 0, 16, TOKENS[:16])
    llm.kv.layer(0).k(1)
    llm.kv.stats()
    llm.kv.positions(1)


def main(guarded: bool, n_threads: int) -> None:
    options = {"n_ctx": 256, "n_seq_max": 3, "kv_unified": True, "verbose": False}
    threads = {"n_threads": n_threads, "n_threads_batch": n_threads}
    with Llama(model_path(), kv="mixed:threshold=16,group=8", **options, **threads) as llm:
        llm.eval(TOKENS[:16])
        llm.kv.copy(0, 1)

        def evaluate() -> None:
            for _ in range(2):
                llm.reset()
                llm.eval(TOKENS)
                llm.eval([7])

        thread = threading.Thread(target=evaluate)
        thread.start()
        while thread.is_alive():
            with contextlib.suppress(ContextBusyError):
                touch(llm, guarded)
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1] == "guarded", int(sys.argv[2]))
