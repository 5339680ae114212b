"""What others' requests do to greedy answers. With -s it prints the figures."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mixedkv.bundled.corpus import make_recall
from support.server_support import Server, running

pytestmark = pytest.mark.bench
N_TALKS = 48
N_TURNS = 6


def talk(server: Server, number: int) -> list[str]:
    """The answers of one conversation."""
    messages: list[dict[str, str]] = []
    for turn in range(N_TURNS):
        recall = make_recall(1000 * number + turn, 8)
        messages.append({"role": "user", "content": f"{' '.join(recall.journal)} {recall.fact.question}"})
        body = {"messages": messages, "temperature": 0, "max_tokens": 16}
        answer = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer})
    return [message["content"] for message in messages[1::2]]


def talks(n_clients: int) -> list[list[str]]:
    with (
        running("--n-ctx", "32768", "--threads", "1", "--parallel", "16") as server,
        ThreadPoolExecutor(n_clients) as pool,
    ):
        return list(pool.map(lambda number: talk(server, number), range(N_TALKS)))


def test_few_answers_hang_on_company() -> None:
    """Sums in other batches are other sums in their last bits, and some answers are near ties."""
    alone = talks(1)
    assert talks(1) == alone
    differ = {n: sum(a != b for a, b in zip(alone, talks(n), strict=True)) for n in (4, 16)}
    print(differ, "of", N_TALKS)
    assert max(differ.values()) <= N_TALKS // 8
