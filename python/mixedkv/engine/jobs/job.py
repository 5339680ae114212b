"""A request at work in an engine: `Progress`, which the scheduler sees, and the state of its answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from mixedkv.engine.jobs.answer_state import AnswerState, Done, Event
from mixedkv.engine.schedule.progress import Progress
from mixedkv.engine.schedule.request import Request
from mixedkv.start.sequence import Sequence

_LATEST = 64  # last tokens of the prompt, which penalties look at


class Job(Progress):
    """A request being answered: the progress of its prompt, and the state of its answer.

    Args:
        answer: None for a request that only evaluates its prompt.
        deliver: gets the events in order, the last one a `Done` or a `Failed`.

    Attributes:
        message_id: id under which the stored KV of the answer is found; "" for none.
    """

    def __init__(
        self,
        request: Request,
        answer: AnswerState | None = None,
        deliver: Callable[[Event], None] = lambda event: None,
    ) -> None:
        super().__init__(request)
        self.message_id = ""
        self.deliver = deliver
        self.answer_by(answer or AnswerState(request))

    def answer_by(self, answer: AnswerState) -> None:
        """Set the state of the answer. Only before work begins."""
        self.answer = answer
        if answer.prompt_logprobs is not None:
            self.most_in_step = answer.prompt_logprobs.most

    @property
    def n_thought(self) -> int:
        """Number of tokens of the answer that belong to thoughts. The token that ends an answer is none."""
        thought = self.answer.thought
        return min(thought.n_tokens, self.n_answer) if thought is not None else 0

    def begin(self, seq: Sequence, n_cached: int, exact: bool) -> bool:
        is_first = super().begin(seq, n_cached, exact)
        if is_first and self.answer.sampler is not None:
            latest = self.prompt[-_LATEST:]
            self.answer.sampler.accept_prompt(latest[latest >= 0].tolist())
        return is_first

    def finish(self, reason: str) -> Done:
        self.t_end = time.perf_counter()
        return self.answer.finish(reason)

    def close(self) -> None:
        super().close()
        if self.answer.sampler is not None:
            self.answer.sampler.close()
