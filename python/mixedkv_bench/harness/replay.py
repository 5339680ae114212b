"""Conversations, replayed against a server by several clients at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mixedkv_bench.harness import sample_text
from mixedkv_bench.harness.chat_client import ChatAnswer, ClientSampling, Message, ask
from mixedkv_bench.harness.http_connection import connect

_OVERHEAD = 16  # tokens a chat template puts around a message, at most


@dataclass(frozen=True, slots=True)
class Conversation:
    """A user's messages, turn by turn; the first turn is the long one."""

    messages: tuple[str, ...]


@dataclass
class Replay:
    """Conversations that ran together: the seconds of all, and the answers by turn, in order of the
    conversations.
    """

    seconds: float = 0.0
    answers: list[list[ChatAnswer]] = field(default_factory=list)

    def n_tokens(self, n_asked: int) -> int:
        return sum(answer.n_tokens(n_asked) for turn in self.answers for answer in turn)


def make_conversation(seed: int, n_prompt: int, turns: int, count: Callable[[str], int]) -> Conversation:
    """Return a journal of `n_prompt` tokens, then questions about it. Another seed shares no more than a few
    words.

    Args:
        count: tokens of a text.
    """
    per_slot = 1 + turns // (2 * len(sample_text.DEPTHS))
    journal = sample_text.journal(seed, n_prompt, per_slot, count)
    sentences = deque(journal.sentences)
    while len(sentences) > 1 and count(" ".join(sentences)) > n_prompt:
        sentences.pop()
    questions = [question.fact.question for question in journal.questions]
    Random(seed).shuffle(questions)
    # never the same question twice in a row, so that no answer is only a repetition
    asked = [questions[i % len(questions)] for i in range(turns - 1)]
    return Conversation((" ".join(sentences), *asked))


def room(conversations: Sequence[Conversation], n_gen: int, count: Callable[[str], int]) -> int:
    """Return how many tokens the longest conversation has at its end."""
    return max(
        sum(count(message) + n_gen + 2 * _OVERHEAD for message in conversation.messages)
        for conversation in conversations
    )


def replay(
    url: str,
    conversations: Sequence[Conversation],
    clients: int,
    sampling: ClientSampling,
    after: Replay | None = None,
) -> Replay:
    """Replay all conversations, `clients` of them at a time; each one's turns follow each other.

    Args:
        after: its answers are those of the first turns.

    Raises:
        CannotRunError: the server failed.
    """
    return asyncio.run(_replay(url, conversations, clients, sampling, after or Replay()))


async def _replay(
    url: str, conversations: Sequence[Conversation], clients: int, sampling: ClientSampling, after: Replay
) -> Replay:
    found: dict[tuple[int, int], ChatAnswer] = {}
    waiting = deque(enumerate(conversations))

    async def work() -> None:
        while waiting:
            i, conversation = waiting.popleft()
            messages: list[Message] = []
            for turn, text in enumerate(conversation.messages):
                messages.append({"role": "user", "content": text})
                if turn < len(after.answers):
                    answer = after.answers[turn][i]
                else:
                    async with connect(url) as connection:  # servers part with those that wait for long
                        answer = await ask(connection, sampling.body(messages))
                messages.append({"role": "assistant", "content": answer.text})
                found[turn, i] = answer

    begin = time.perf_counter()
    await _all([work() for _ in range(clients)])
    seconds, turns = time.perf_counter() - begin, range(len(conversations[0].messages))
    return Replay(seconds, [[found[turn, i] for i in range(len(conversations))] for turn in turns])


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them together; the first failure ends all (asyncio.TaskGroup came with Python 3.11)."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
