"""An engine without a thread: it steps while its caller waits, and the `Llama` is free between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mixedkv import Llama
from mixedkv.bundled.corpus import make_recall
from mixedkv.engine import Engine, StoreConnector
from mixedkv.errors import ClosedError, ContextBusyError, StoppedError
from mixedkv.store import Identity, KVStore
from support.engine.conversations import open_llama

pytestmark = pytest.mark.full

RECALL = make_recall(3, 40)
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
LONG = [5 + i % 200 for i in range(3000)]


@pytest.fixture
def engine(llm: Llama) -> Iterator[Engine]:
    with Engine(llm, threaded=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared() -> Iterator[Llama]:
    with open_llama(n_ctx=4096, n_batch=1024, n_ubatch=256) as llm:
        yield llm


# --- answers ---


def test_answers_are_those_of_an_engine_with_a_thread(engine: Engine) -> None:
    prompts = [RECALL.messages, "The mill", RECALL.text]
    for options in (OPTIONS, {"max_tokens": 12, "temperature": 0.9, "seed": 7}):
        mine = [engine.submit(prompt, **options).result() for prompt in prompts]
        with open_llama(n_ctx=4096, n_seq_max=4, kv_unified=True) as llm, Engine(llm) as other:
            theirs = [other.submit(prompt, **options).result() for prompt in prompts]
        assert [(done.text, done.reason) for done in mine] == [(done.text, done.reason) for done in theirs]


def test_an_answer_is_made_while_it_is_read(engine: Engine) -> None:
    answer = engine.submit("The mill", **OPTIONS)
    time.sleep(0.05)
    assert engine.n_steps == 0
    first = next(iter(answer))
    n_steps = engine.n_steps
    assert first
    assert 0 < n_steps < 24
    assert engine.thread_id is None


def test_two_answers_come_one_after_the_other(engine: Engine) -> None:
    """The second one's reader has the first answer finished, which is read later."""
    one, two = (engine.submit(text, **OPTIONS) for text in ("The mill", "A kite"))
    pieces = iter(one)
    begin = next(pieces)
    assert two.text == engine.submit("A kite", reuse=False, **OPTIONS).text
    assert begin + "".join(pieces) == engine.submit("The mill", reuse=False, **OPTIONS).text


def test_another_thread_may_wait_too(engine: Engine) -> None:
    found: list[str] = []
    answers = [engine.submit(f"{i} mills", **OPTIONS) for i in range(4)]
    threads = [threading.Thread(target=lambda a=a: found.append(a.text)) for a in answers[1:]]
    for thread in threads:
        thread.start()
    found.append(answers[0].text)
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(engine.submit(f"{i} mills", reuse=False, **OPTIONS).text for i in range(4))


# --- the Llama between two steps ---


def test_the_llama_has_what_the_answer_left(llm: Llama, engine: Engine) -> None:
    answer = engine.submit("The mill", **OPTIONS)
    tokens = [*engine.tokenizer.prompt("The mill"), *answer.job.tokens[answer.job.n_prompt :]]
    _ = answer.text
    tokens = list(answer.job.tokens)
    assert llm.n_tokens >= len(tokens) - 1
    assert llm.input_ids[: llm.n_tokens].tolist() == tokens[: llm.n_tokens]
    assert llm.kv.exact_tokens == llm.n_tokens
    following = engine.submit([*tokens, 7, 8], **OPTIONS)
    _ = following.text
    assert following.job.n_cached == len(tokens) - 1


def test_what_others_evaluate_in_between_is_not_gone_on_from(llm: Llama, engine: Engine) -> None:
    tokens = engine.tokenizer.prompt(RECALL.text)
    first = engine.submit(tokens, **OPTIONS).text
    llm.reset()
    llm.eval(tokens)
    again = engine.submit(tokens, **OPTIONS)
    assert again.text == first
    assert again.job.n_cached == 0


@pytest.mark.parametrize("how", ["eval", "remove", "another engine"])
def test_an_answer_whose_rows_were_taken_says_so(how: str, llm: Llama, engine: Engine) -> None:
    pieces = iter(engine.submit("The mill", **OPTIONS))
    next(pieces)
    if how == "eval":
        llm.eval([5, 6])
    elif how == "remove":
        llm.kv.remove(0)
    else:
        with Engine(llm, threaded=False) as other:
            assert other.submit("A kite", **OPTIONS).text
    with pytest.raises(ContextBusyError, match="another answer was begun"):
        list(pieces)
    assert engine.submit("The mill", **OPTIONS).text == engine.submit("The mill", reuse=False, **OPTIONS).text


def test_a_stream_of_the_llama_that_was_overtaken_says_so(llm: Llama, engine: Engine) -> None:
    stream = llm.create_completion("The mill", max_tokens=20, stream=True)
    next(stream)
    assert engine.submit("A kite", **OPTIONS).text
    with pytest.raises(ContextBusyError, match="another answer was begun"):
        list(stream)


def test_an_engine_with_a_thread_has_the_llama_for_itself() -> None:
    with open_llama(n_seq_max=2, kv_unified=True) as llm, Engine(llm, threaded=False) as engine:
        assert engine.submit("The mill", **OPTIONS).text
        with Engine(llm), pytest.raises(ContextBusyError, match="an Engine uses this Llama"):
            engine.submit("The mill", **OPTIONS).result()
        assert engine.submit("The mill", **OPTIONS).text


def test_several_answers_at_a_time_need_a_thread(llm: Llama) -> None:
    with pytest.raises(ValueError, match=r"parallel=2.*threaded=True"):
        Engine(llm, threaded=False, parallel=2)


def test_a_llama_that_is_closed_closes_it() -> None:
    llm = open_llama()
    engine = Engine(llm, threaded=False)
    pieces = iter(engine.submit("The mill", **OPTIONS))
    next(pieces)
    llm.close()
    with pytest.raises(ClosedError):
        list(pieces)
    with pytest.raises(ClosedError):
        engine.submit("The mill")


def test_no_second_sequence_and_no_more_memory(llm: Llama) -> None:
    before = llm.kv.stats()
    with Engine(llm, threaded=False) as engine:
        assert engine.submit("The mill", **OPTIONS).text
        after = llm.kv.stats()
    assert llm.context_params.n_seq_max == 1
    assert (after.bytes_total, after.bytes_view) == (before.bytes_total, before.bytes_view)


# --- what ends an answer ---


def _after_two_steps(engine: Engine, function: Callable[[], object]) -> None:
    def wait() -> None:
        while engine.n_steps < before + 2:
            time.sleep(0.001)
        function()

    before = engine.n_steps
    threading.Thread(target=wait, daemon=True).start()


def test_ctrl_c_leaves_what_was_evaluated(llm: Llama, engine: Engine) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        answer = engine.submit(LONG, **OPTIONS)
        _after_two_steps(engine, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            answer.result()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        n = llm.n_tokens
        assert 0 < n < len(LONG)
        assert llm.kv.positions(0)[1] + 1 == n
        engine.stop(answer.job)
        again = engine.submit(LONG, **OPTIONS)
        text = again.text
        assert again.job.n_cached == n
        assert again.job.exact
        assert text == engine.submit(LONG, reuse=False, **OPTIONS).text
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_whose_handler_raises_nothing_ends_nothing(engine: Engine) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        answer = engine.submit(LONG, **OPTIONS)
        _after_two_steps(engine, lambda: signal.raise_signal(signal.SIGINT))
        text = answer.text
        assert came == [signal.SIGINT]
        assert text == engine.submit(LONG, reuse=False, **OPTIONS).text
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_ends_the_answer_and_leaves_its_rows(llm: Llama, engine: Engine) -> None:
    answer = engine.submit(LONG, **OPTIONS)
    _after_two_steps(engine, llm.interrupt)
    with pytest.raises(StoppedError):
        answer.result()
    n = llm.n_tokens
    assert 0 < n < len(LONG)
    again = engine.submit(LONG, **OPTIONS)
    assert again.text
    assert again.job.n_cached == n


def test_an_error_in_a_step_leaves_nothing_half_done(
    llm: Llama, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = engine.submit("The mill", **OPTIONS).text
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "evaluated", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.submit("A kite", **OPTIONS).result()
    assert llm.n_tokens == 0
    assert engine.submit("The mill", **OPTIONS).text == right


@pytest.mark.by_model
@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_a_model_with_a_state_is_interrupted(zoo_path: Callable[[str], Any], name: str) -> None:
    with Llama(zoo_path(name), n_ctx=4096, n_threads=1) as llm, Engine(llm, threaded=False) as engine:
        prompt = [5 + i % 200 for i in range(3000)]
        answer = engine.submit(prompt, max_tokens=4, temperature=0)
        llm.interrupt()
        with pytest.raises(StoppedError):
            answer.result()
        text = engine.submit(prompt, max_tokens=4, temperature=0).text
        assert text == engine.submit(prompt, max_tokens=4, temperature=0, reuse=False).text


# --- the store ---


def test_prompts_and_answers_are_stored_and_found(llm: Llama, store: KVStore) -> None:
    with Engine(llm, threaded=False, connector=StoreConnector(store, closes=False)) as engine:
        answer = engine.submit(RECALL.messages, **OPTIONS)
        pieces = iter(answer)
        next(pieces)
        assert not store.entries()  # saving does not delay the first token
        next(pieces)
        n = answer.job.n_prompt
        assert [(entry.p0, entry.p1) for entry in store.entries()] == [(0, n)]
        text = answer.text
        assert answer.job.n_stored == llm.n_tokens > n
    llm.reset()
    with Engine(llm, threaded=False, connector=StoreConnector(store)) as engine:
        again = engine.submit(RECALL.messages, **OPTIONS)
        assert again.text == text
        assert (again.job.cached_tier, again.job.n_cached, again.job.exact) == ("ram", n - 1, True)
        match = store.find(Identity.of(llm), llm.input_ids[: llm.n_tokens])
        assert match is not None
