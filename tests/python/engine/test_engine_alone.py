"""`mixedkv.engine` from Python: no server, no HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import Recall, make_recall
from mixedkv.engine import Engine, Job, StoreConnector
from mixedkv.errors import ClosedError, ContextLengthError
from mixedkv.store import KVStore

RECALLS = [make_recall(i, 12) for i in range(6)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}


def open_llama(n_seq_max: int = 8, kv_unified: bool = True) -> Llama:
    return Llama(
        model_path(),
        kv="mixed",
        n_ctx=2048,
        n_seq_max=n_seq_max,
        kv_unified=kv_unified,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with open_llama() as llm:
        yield llm


@pytest.fixture
def engine(llm: Llama) -> Iterator[Engine]:
    with Engine(llm) as engine:
        yield engine
    llm.kv.clear()


def right(texts: list[str], recalls: list[Recall] = RECALLS) -> int:
    return sum(text == recall.fact.answer for text, recall in zip(texts, recalls, strict=True))


def test_many_prompts_at_once(engine: Engine) -> None:
    answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS]
    assert right([answer.text for answer in answers]) >= 5
    assert all(answer.result().reason == "stop" for answer in answers)
    again = engine.submit(RECALLS[0].prompt, **GREEDY)
    assert again.text == answers[0].text
    assert again.job.n_cached == again.job.n_prompt - 1


def test_pieces_make_the_text(engine: Engine) -> None:
    answer = engine.submit(RECALLS[1].prompt, **GREEDY)
    pieces = list(answer)
    assert len(pieces) > 1
    assert "".join(pieces) == answer.text == RECALLS[1].fact.answer


def test_asyncio(engine: Engine) -> None:
    async def streamed(recall: Recall) -> str:
        return "".join([piece async for piece in engine.submit(recall.prompt, **GREEDY)])

    async def all_of_it(recall: Recall) -> str:
        return (await engine.submit(recall.prompt, **GREEDY)).text

    async def main() -> list[str]:
        return await asyncio.gather(*map(streamed, RECALLS[:3]), *map(all_of_it, RECALLS[3:]))

    assert right(asyncio.run(main())) >= 5


def test_messages_and_tokens_are_prompts_too(engine: Engine, llm: Llama) -> None:
    said = {"role": "user", "content": RECALLS[2].prompt.removeprefix("<|user|>").partition("<|end|>")[0]}
    assert engine.submit([said], **GREEDY).text
    tokens = llm.tokenize(RECALLS[2].prompt.encode(), add_bos=False, special=True)
    assert engine.submit(tokens, **GREEDY).text == RECALLS[2].fact.answer


def test_who_stops_reading_stops_the_answer(engine: Engine) -> None:
    answer = engine.submit(RECALLS[3].prompt, max_tokens=1500, logit_bias=no_end(engine))
    for _ in answer:
        break
    with pytest.raises(CancelledError):
        answer.result(60)
    assert engine.call(lambda: answer.job.n_answer).result(60) < 1500


def no_end(engine: Engine) -> tuple[tuple[int, float], ...]:
    n_vocab = engine.llm.n_vocab()
    return tuple((token, -100.0) for token in range(n_vocab) if engine.detokenizer.is_end(token))


def test_a_task_that_is_cancelled_cancels_its_answer(engine: Engine) -> None:
    async def main() -> None:
        answer = engine.submit(RECALLS[3].prompt, max_tokens=1500, logit_bias=no_end(engine))

        async def wait() -> None:
            await answer

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert answer.job.cancelled

    asyncio.run(main())


def test_logprobs_come_with_the_end(engine: Engine) -> None:
    end = engine.submit(RECALLS[4].prompt, n_logprobs=2, **GREEDY).result()
    assert len(end.logprobs) > 3
    assert all(entry.logprob <= 0 and len(entry.top) == 2 for entry in end.logprobs)


def test_a_wait_has_its_limit(engine: Engine) -> None:
    answer = engine.submit(RECALLS[5].prompt, max_tokens=1500, logit_bias=no_end(engine))
    with pytest.raises(TimeoutError):
        answer.result(0)
    answer.cancel()
    answer.cancel()


def test_bad_prompts(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match="it must not be empty"):
        engine.submit([])
    with pytest.raises(ContextLengthError, match="larger n_ctx"):
        engine.submit([5] * 5000)
    with pytest.raises(ValueError, match="token 900000 is not one"):
        engine.submit([900_000])
    with pytest.raises(TypeError, match="heat"):
        engine.submit("x", heat=3)


def test_a_llama_that_cannot_batch_is_refused() -> None:
    with open_llama(n_seq_max=1) as llm, pytest.raises(ValueError, match="n_seq_max"):
        Engine(llm)
    with open_llama(kv_unified=False) as llm, pytest.raises(ValueError, match="kv_unified"):
        Engine(llm)


def test_closing_leaves_the_llama(llm: Llama) -> None:
    engine = Engine(llm)
    answer = engine.submit(RECALLS[0].prompt, max_tokens=1500, logit_bias=no_end(engine))
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        answer.result(60)
    with pytest.raises(ClosedError):
        engine.submit("x")
    assert not engine.alive
    llm.kv.clear()
    llm.reset()
    assert (
        llm(RECALLS[0].prompt, max_tokens=24, temperature=0)["choices"][0]["text"] == RECALLS[0].fact.answer
    )
    llm.kv.clear()


class Recorder:
    """A connector that finds nothing, on a thread of its own, and writes down what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.offloaded: list[list[int]] = []

    def attach(self, engine: Any) -> None:
        self.engine = engine
        self.calls.append("attach")

    def fetch(self, job: Job) -> bool:
        self.calls.append("fetch")
        threading.Thread(target=self.engine.ready, args=(job,)).start()
        return True

    def offload(self, job: Job) -> None:
        assert threading.current_thread().name == "mixedkv-engine"
        assert job.seq is not None
        self.offloaded.append(list(job.seq.tokens))

    def stats(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def close(self) -> None:
        assert self.engine.alive
        self.calls.append("close")


def test_a_connector_of_ones_own(llm: Llama) -> None:
    recorder = Recorder()
    with Engine(llm, connector=recorder) as engine:
        answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS[:2]]
        assert right([answer.text for answer in answers], RECALLS[:2]) == 2
        jobs = [answer.job for answer in answers]
    assert recorder.calls == ["attach", "fetch", "fetch", "close"]
    assert sorted(recorder.offloaded) == sorted(list(job.tokens) for job in jobs)
    llm.kv.clear()


def test_what_one_engine_stored_another_fetches(llm: Llama, tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        with Engine(llm, connector=StoreConnector(KVStore(tmp_path))) as engine:
            answer = engine.submit(RECALLS[0].prompt, **GREEDY)
            texts.append(answer.text)
        llm.kv.clear()
    assert texts[0] == texts[1] == RECALLS[0].fact.answer
    assert answer.job.cached_tier == "disk"
    assert answer.job.n_cached == answer.job.n_prompt - 1


def test_no_http_is_imported() -> None:
    code = "import sys, mixedkv.engine; print(sys.modules.keys() & {'fastapi', 'starlette', 'uvicorn'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
