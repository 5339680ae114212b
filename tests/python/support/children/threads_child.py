"""Threads that use one `Llama`, in a process that may end: python -m support.children.threads_child SCENE."""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine.engine import Engine
from mixedkv.errors import ClosedError, ContextBusyError

TEXT = "The code of the mill is 7. The code of the barn is 12. " * 4
MESSAGES: Any = [{"role": "user", "content": "What is the code of the mill?"}]
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}

DOORS: dict[str, Callable[[Llama], object]] = {
    "eval": lambda llm: llm.eval(list(range(5, 60))),
    "generate": lambda llm: [token for token, _ in zip(llm.generate([5, 6, 7]), range(4), strict=False)],
    "completion": lambda llm: llm.create_completion(TEXT, **SHORT),
    "stream": lambda llm: list(llm.create_completion(TEXT, stream=True, **SHORT)),
    "call": lambda llm: llm(TEXT, **SHORT),
    "chat": lambda llm: llm.create_chat_completion(MESSAGES, **SHORT),
    "chat stream": lambda llm: list(llm.create_chat_completion(MESSAGES, stream=True, **SHORT)),
    "sample": lambda llm: llm.sample(temp=0.0) if llm.n_tokens else None,
    "reset": lambda llm: llm.reset(),
    "save": lambda llm: llm.load_state(llm.save_state()),
    "tokenize": lambda llm: llm.detokenize(llm.tokenize(TEXT.encode())),
    "sizes": lambda llm: (llm.n_ctx(), llm.n_vocab(), llm.n_embd(), llm.token_eos(), llm.pooling_type()),
    "handles": lambda llm: (llm.ctx, llm.model),
    "stats": lambda llm: llm.kv.stats(),
    "layers": lambda llm: (llm.kv.layers, llm.kv.can_shift, llm.kv.cut_rule),
    "rows": lambda llm: llm.kv.export(0, 0, 2) if llm.n_tokens > 2 else None,
    "remove": lambda llm: llm.kv.remove(0),
    "scores": lambda llm: (llm.eval_tokens, llm.scores.shape),
}
NATIVE_FREE = {"scores"}


def open_llama(options: argparse.Namespace, **more: Any) -> Llama:
    streamed = {"stream_layers": 2} if options.streamed else {}
    threads = {"n_threads": 1, "n_threads_batch": 1}
    return Llama(model_path(), kv=options.kv, n_ctx=512, verbose=False, **threads, **streamed, **more)


def in_threads(work: Callable[[random.Random], None], n: int) -> list[threading.Thread]:
    """Threads that work; an exception that is none of those that may come ends the process."""

    def run(seed: int) -> None:
        try:
            work(random.Random(seed))
        except ClosedError:
            pass
        except BaseException as error:
            import os
            import traceback

            traceback.print_exception(error)
            os._exit(3)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    return threads


def use(llm: Llama, rng: random.Random, n: int) -> None:
    for _ in range(n):
        with suppress(ContextBusyError, LookupError, ValueError):
            rng.choice(list(DOORS.values()))(llm)


def doors(options: argparse.Namespace) -> None:
    """All doors by four threads, then the model answers as before."""
    with open_llama(options) as llm:
        before = llm.create_completion(TEXT, **SHORT)["choices"][0]["text"]
        for thread in in_threads(lambda rng: use(llm, rng, options.rounds), 4):
            thread.join()
        llm.kv.remove(0)
        after = llm.create_completion(TEXT, **SHORT)["choices"][0]["text"]
        assert before == after, (before, after)


def closing(options: argparse.Namespace) -> None:
    """Closed while three threads use all doors; afterwards each door says so."""
    rng = random.Random(0)
    for _ in range(options.rounds):
        llm = open_llama(options)
        threads = in_threads(lambda rng, llm=llm: use(llm, rng, 1000), 3)  # type: ignore[misc]
        time.sleep(rng.random() * 0.05)
        llm.close()
        for thread in threads:
            thread.join()
        for name in DOORS.keys() - NATIVE_FREE:
            try:
                DOORS[name](llm)
            except ClosedError:
                continue
            assert llm.n_tokens < {"sample": 1, "rows": 3}[name], name  # with so few these ask nothing


def engine(options: argparse.Namespace) -> None:
    """The same under an engine: the threads ask it, and the `Llama` is closed."""
    rng = random.Random(0)
    for _ in range(options.rounds):
        llm = open_llama(options, n_seq_max=4, kv_unified=True)
        batching = Engine(llm)

        def ask(rng: random.Random, llm: Llama = llm, batching: Engine = batching) -> None:
            while True:
                if rng.random() < 0.3:
                    use(llm, rng, 1)
                batching.submit(TEXT[: rng.randrange(40, 120)], max_tokens=5).result()

        threads = in_threads(ask, 3)
        time.sleep(rng.random() * 0.1)
        llm.close()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("scene", choices=["doors", "closing", "engine"])
    parser.add_argument("--kv", default="mixed")
    parser.add_argument("--streamed", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    globals()[given.scene](given)
