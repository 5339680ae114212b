"""Conversations of the tests of `PromptCache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import Generation, PromptCache
from mixedkv.store import KVStore

RECALL = make_recall(seed=61_001, n_sentences=30, where=0.2)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
QUESTIONS = [make_recall(61_001, 30, where=w / 10).fact.question for w in range(9)]
Message = dict[str, Any]


def open_llama(kv: str = "mixed", **options: Any) -> Llama:
    threads = {"n_threads": 1, "n_threads_batch": 1}
    return Llama(model_path(), kv=kv, **{"n_ctx": 1024, "verbose": False, **threads, **options})


def empty(llm: Llama) -> None:
    """As in a new process: nothing is live."""
    llm._ctx.kv_cache_clear()
    llm.reset()


def user(text: str, **more: str) -> Message:
    return {"role": "user", "content": text, **more}


def journal() -> Message:
    return user(" ".join(RECALL.journal))


def converse(
    cache: PromptCache, n_turns: int, before_turn: Callable[[], None] = lambda: None
) -> tuple[list[Message], list[Generation]]:
    """The journal, then a question in each turn."""
    messages, results = [journal()], []
    for question in QUESTIONS[:n_turns]:
        before_turn()
        results.append(cache.chat(messages, **GREEDY))
        messages += [results[-1].message, user(question)]
    return messages, results


def n_tokens(llm: Llama, text: str) -> int:
    return len(llm.tokenize(text.encode(), add_bos=False, special=True))


def rendered(messages: list[Message]) -> str:
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"


def cold(llm: Llama, messages: list[Message]) -> str:
    """The answer without anything reused."""
    empty(llm)
    return PromptCache(llm, KVStore(None)).chat(messages, **GREEDY).text
