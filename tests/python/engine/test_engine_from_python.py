"""`mixedkv.engine` from Python: no server, no HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled.corpus import Recall, make_recall
from mixedkv.engine import Engine, StoreConnector
from mixedkv.engine.inbox import Inbox, deliver_directly
from mixedkv.engine.jobs.job import Delta, Event, Job
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ClosedError, ContextLengthError
from mixedkv.store import KVStore
from support.engine.conversations import open_llama
from support.patience import PATIENCE, wait_for

pytestmark = pytest.mark.full

RECALLS = [make_recall(i, 12) for i in range(6)]
GREEDY: dict[str, Any] = {"max_tokens": 24, "temperature": 0}


SHAPE: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 8, "kv_unified": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with open_llama(**SHAPE) as llm:
        yield llm


@pytest.fixture
def engine(llm: Llama) -> Iterator[Engine]:
    with Engine(llm) as engine:
        yield engine


def right(texts: list[str], recalls: list[Recall] = RECALLS) -> int:
    return sum(text == recall.fact.answer for text, recall in zip(texts, recalls, strict=True))


def test_many_prompts_at_once(engine: Engine) -> None:
    answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS]
    assert right([answer.text for answer in answers]) >= 5
    assert all(answer.result().reason == "stop" for answer in answers)
    # together they may have taken F16 rows from each other, and such rows are not reused
    alone = engine.submit(RECALLS[0].prompt, **GREEDY)
    assert alone.text == RECALLS[0].fact.answer
    again = engine.submit(RECALLS[0].prompt, **GREEDY)
    assert again.text == alone.text
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
    answer = engine.submit(RECALLS[3].prompt, **endless(engine))
    for _ in answer:
        break
    with pytest.raises(CancelledError):
        answer.result(PATIENCE)
    wait_for(lambda: engine.idle)


def no_end(engine: Engine) -> tuple[tuple[int, float], ...]:
    n_vocab = engine.llm.n_vocab()
    return tuple((token, -100.0) for token in range(n_vocab) if engine.detokenizer.is_end(token))


def endless(engine: Engine) -> dict[str, Any]:
    """Options of an answer that ends only when it is stopped."""
    return {"max_tokens": 1_000_000, "overflow": "slide", "logit_bias": no_end(engine)}


def test_a_task_that_is_cancelled_cancels_its_answer(engine: Engine) -> None:
    async def main() -> None:
        answer = engine.submit(RECALLS[3].prompt, **endless(engine))

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
    answer = engine.submit(RECALLS[5].prompt, **endless(engine))
    with pytest.raises(TimeoutError):
        answer.result(0)
    answer.cancel()
    answer.cancel()


def test_bad_prompts(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match="the prompt is empty"):
        engine.submit([])
    with pytest.raises(ContextLengthError, match="larger n_ctx"):
        engine.submit([5] * 5000)
    with pytest.raises(ValueError, match="token 900000 is not one"):
        engine.submit([900_000])
    bad: dict[str, Any] = {"temperature": float("nan"), "top_p": -0.5, "repeat_penalty": 0, "seed": -1}
    bad |= {"max_tokens": -1, "n_logprobs": -1, "logit_bias": {5: 1}, "speculation": "guess"}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}: use"):
            engine.submit("x", **{name: value})
    for name, value in {"max_tokens": 1.5, "top_k": "x", "stop": 5}.items():
        with pytest.raises(TypeError, match=f"{name}={value!r}: use"):
            engine.submit("x", **{name: value})
    with pytest.raises(TypeError, match="heat"):
        engine.submit("x", heat=3)


def test_a_llama_that_cannot_batch_is_refused() -> None:
    with open_llama(n_seq_max=1, kv_unified=True) as llm, pytest.raises(ValueError, match="n_seq_max"):
        Engine(llm)
    with open_llama(n_seq_max=8, kv_unified=False) as llm, pytest.raises(ValueError, match="kv_unified"):
        Engine(llm)


@pytest.mark.parametrize(("name", "value"), [("slowdown", 0.5), ("max_queue", -1), ("speculation", "guess")])
def test_settings_out_of_range_are_refused(llm: Llama, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: use"):
        Engine(llm, **{name: value})


def test_closing_leaves_the_llama(llm: Llama) -> None:
    engine = Engine(llm)
    answer = engine.submit(RECALLS[0].prompt, **endless(engine))
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        answer.result(PATIENCE)
    with pytest.raises(ClosedError):
        engine.submit("x")
    assert not engine.alive
    text = llm(RECALLS[0].prompt, max_tokens=24, temperature=0)["choices"][0]["text"]
    assert text == RECALLS[0].fact.answer


def test_an_engine_takes_a_llama_that_was_used(llm: Llama) -> None:
    """By itself, and by another engine."""
    llm(RECALLS[1].prompt, max_tokens=4)
    for recall in RECALLS[:3]:
        with Engine(llm) as engine:
            answer = engine.submit(recall.prompt, **GREEDY)
            assert (answer.text, answer.job.n_cached) == (recall.fact.answer, 0)


@pytest.mark.parametrize("end", ["llm.close()", ""])
def test_an_engine_that_nobody_closed_ends_before_its_llama(end: str) -> None:
    """llama.cpp would decode in a context that is gone."""
    code = f"""
import contextlib
from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.engine import Engine
from mixedkv.errors import ClosedError

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take
llm = Llama(model_path(), n_ctx=2048, n_seq_max=8, kv_unified=True, verbose=False)
engine = Engine(llm)
no_end = tuple((token, -100.0) for token in range(llm.n_vocab()) if engine.detokenizer.is_end(token))
endless = {{"max_tokens": 1_000_000, "overflow": "slide", "logit_bias": no_end}}
answers = [engine.submit("Once upon a time", **endless) for _ in range(3)]
next(iter(answers[0]))
{end}
if not engine.alive:
    with contextlib.suppress(ClosedError):
        engine.submit("x")
print(engine.alive, isinstance(getattr(answers[1]._end, "error", None), ClosedError))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == ("False True" if end else "True False")


def test_who_closes_second_waits_for_the_first(llm: Llama) -> None:
    class Slow(Recorder):
        def close(self) -> None:
            super().close()
            begun.set()
            assert go_on.wait(PATIENCE)

    begun, go_on = threading.Event(), threading.Event()
    engine = Engine(llm, connector=Slow())
    first = threading.Thread(target=engine.close)
    first.start()
    assert begun.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    engine.close()
    assert not engine._thread.is_alive()
    first.join()


def test_a_connector_that_fails_to_close_leaves_no_thread(llm: Llama) -> None:
    class Broken(Recorder):
        def close(self) -> None:
            raise OSError("the disk is gone")

    engine = Engine(llm, connector=Broken())
    with pytest.raises(OSError, match="disk is gone"):
        engine.close()
    engine.close()
    assert not engine._thread.is_alive()


def test_no_job_gets_lost_between_submit_and_close(llm: Llama) -> None:
    """A connector that has closed answers nobody."""

    class Closing(Recorder):
        closed = False

        def fetch(self, job: Job) -> bool:
            if not self.closed:
                closer.start()
                closer.join(0.2)  # it shall not get through
            return not self.closed and super().fetch(job)

        def close(self) -> None:
            super().close()
            self.closed = True

    connector = Closing()
    engine = Engine(llm, connector=connector)
    closer = threading.Thread(target=engine.close)
    answer = engine.submit(RECALLS[0].prompt, **GREEDY)
    closer.join()
    assert connector.calls[:2] == ["attach", "fetch"]
    with pytest.raises(ClosedError):
        answer.result(PATIENCE)


def test_calls_that_were_cancelled_do_not_stop_others() -> None:
    inbox = Inbox()
    first, second = inbox.call(int), inbox.call(int)
    assert first.cancel()
    inbox.fail_calls(ClosedError("the engine has stopped"))
    with pytest.raises(ClosedError):
        second.result(0)


def test_one_receiver_that_fails_leaves_the_others_alone(engine: Engine) -> None:
    answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS[:1]]
    jobs = [Job(Request(prompt=answers[0].job.prompt, max_tokens=0), deliver=fail) for _ in range(2)]
    engine.submit_jobs(jobs)
    answers += [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS[1:2]]
    assert right([answer.text for answer in answers], RECALLS[:2]) == 2
    seen: list[Job] = []
    done = Job(Request(prompt=[5, 6], max_tokens=0), deliver=lambda _: seen.append(done))
    deliver_directly([(jobs[0], Delta("x")), (done, Delta("x"))])
    assert seen == [done]


def fail(_: Event) -> None:
    raise RuntimeError("nobody takes this")


def test_a_loop_that_closes_meanwhile_takes_no_other_answer_along(engine: Engine) -> None:
    answer = engine.submit(RECALLS[0].prompt, **endless(engine))
    loop = asyncio.new_event_loop()
    with answer._changed:
        answer._sleepers.append((loop, loop.create_future()))
        loop.close()
        loop.is_closed = lambda: False  # type: ignore[method-assign]  # as if it closed right after the question
    other = engine.submit(RECALLS[1].prompt, **GREEDY)
    assert other.result(PATIENCE).text == RECALLS[1].fact.answer
    del loop.is_closed
    answer.cancel()


def test_one_stop_string_is_one(engine: Engine) -> None:
    whole = engine.submit(RECALLS[0].prompt, **GREEDY).text
    stop = whole[2:5]
    assert engine.submit(RECALLS[0].prompt, stop=stop, **GREEDY).text == whole.partition(stop)[0]
    with pytest.raises(ValueError, match="stop: an empty string"):
        engine.submit("x", stop=["a", ""])


class Recorder:
    """A connector that finds nothing, on a thread of its own, and writes down what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.offloaded: list[list[int]] = []

    def attach(self, engine: Any) -> None:
        self.engine = engine
        self.calls.append("attach")

    def check(self, request: Request) -> None:
        """Refuse nothing."""

    def fetch(self, job: Job) -> bool:
        self.calls.append("fetch")
        threading.Thread(target=self.engine.ready, args=(job,)).start()
        return True

    def evaluated(self, job: Job, index: int) -> None:
        assert index >= 0

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


@pytest.mark.parametrize("method", ["fetch", "read", "evaluated", "offload"])
def test_a_connector_that_fails_costs_no_answer(
    llm: Llama, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    recorder = Recorder()

    def fail(*_: object) -> bool:
        raise OSError("no room for rows")

    def offer(job: Job) -> bool:
        job.prefix.offer = object()
        return False

    if method == "read":
        monkeypatch.setattr(recorder, "fetch", offer)
    monkeypatch.setattr(recorder, method, fail, raising=False)
    with Engine(llm, connector=recorder) as engine:
        answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS[:2]]
        assert right([answer.text for answer in answers], RECALLS[:2]) == 2
        assert {answer.job.store_problem for answer in answers} == {"no room for rows"}
        wait_for(lambda: engine.idle)


def test_rows_that_are_not_freed_cost_no_answer(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool fails when answers leave: each has its text all the same."""

    def fail(*_: object) -> None:
        raise RuntimeError("the context keeps its rows")

    with Engine(llm) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.pool, "release", fail)
            answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS[:3]]
            assert right([answer.text for answer in answers], RECALLS[:3]) == 3
        assert engine.submit(RECALLS[0].prompt, **GREEDY).text == RECALLS[0].fact.answer


def test_every_answer_ends_where_the_context_fails(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails, and so does taking its rows away."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the context is gone")

    with Engine(llm) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.pool, "drop", fail)
            patch.setattr(engine._stepper._speculation, "evaluated", fail)
            answers = [engine.submit(recall.prompt, **GREEDY) for recall in RECALLS[:3]]
            for answer in answers:
                with pytest.raises(RuntimeError, match="the context is gone"):
                    answer.result(PATIENCE)
        assert engine.alive


def test_an_answer_ends_with_the_error_that_was_first(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that lacks a function failed when the answer left, and the next error hid that."""

    def missing(*_: object) -> bool:
        raise AttributeError("the library has no function validity")

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "is_exact", missing)
        with pytest.raises(AttributeError, match="no function validity"):
            engine.submit(RECALLS[0].prompt, **GREEDY).result(PATIENCE)
    assert engine.submit(RECALLS[0].prompt, **GREEDY).text == RECALLS[0].fact.answer


def test_what_one_engine_stored_another_fetches(llm: Llama, tmp_path: Path) -> None:
    texts = []
    for _ in range(2):
        with Engine(llm, connector=StoreConnector(KVStore(tmp_path))) as engine:
            answer = engine.submit(RECALLS[0].prompt, **GREEDY)
            texts.append(answer.text)
    assert texts[0] == texts[1] == RECALLS[0].fact.answer
    assert answer.job.cached_tier == "disk"
    assert answer.job.n_cached == answer.job.n_prompt - 1


@pytest.mark.by_model
@pytest.mark.parametrize(("name", "kv"), [("mamba", "f16"), ("lfm2", "mixed"), ("gemma2", "mixed")])
def test_models_of_all_kinds(zoo_path: Callable[[str], Path], name: str, kv: str) -> None:
    """Where layers keep a state there are no cells to count, and only whole sequences are shared."""
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 6, "kv_unified": True, "n_threads": 1}
    tokens = [3 + i * 7 % 90 for i in range(60)]
    greedy: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "logit_bias": ((2, -100.0),)}
    with Llama(zoo_path(name), kv=kv, verbose=False, **options) as llm, Engine(llm) as engine:
        first = engine.submit(tokens, **greedy)
        assert first.result(PATIENCE).reason == "length"
        longer = engine.submit([*first.job.tokens[:-1], 5, 6], **greedy)
        assert longer.result(PATIENCE).reason == "length"
        assert longer.job.n_cached == len(first.job.tokens) - 1


def test_no_http_is_imported() -> None:
    code = "import sys, mixedkv.engine; print(sys.modules.keys() & {'fastapi', 'starlette', 'uvicorn'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_engine_is_not_closed_by_what_it_calls(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="on another thread"):
        engine.call(engine.close).result(PATIENCE)
    assert engine.alive
