"""The engine on the bundled model, without HTTP."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mixedkv.bundled.corpus import make_recall
from mixedkv.constrain.constraint_text import Constraint
from mixedkv.engine.jobs.job import Delta, Failed
from mixedkv.engine.sample.sampling import Sampling
from mixedkv.engine.schedule.pacing import Pace
from mixedkv.errors import ClosedError, EngineError, QueueFullError
from support.patience import PATIENCE, wait_for
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.core


@pytest.fixture(scope="module", params=["mixed", pytest.param("f16", marks=pytest.mark.nightly)])
def direct(request: pytest.FixtureRequest) -> Iterator[Direct]:
    with Direct(kv=request.param) as direct:
        yield direct


@pytest.fixture(autouse=True)
def _nothing_is_left(direct: Direct) -> Iterator[None]:
    """After each test every sequence is idle, and without them the cache is empty."""
    yield

    def drop_all() -> tuple[int, int]:
        n_running = sum(seq.running for seq in direct.engine.pool.held())
        while direct.engine.pool.evict():
            pass
        return n_running, direct.engine.pool.used

    assert direct.call(drop_all) == (0, 0)
    assert direct.engine.n_queued == 0


def prompts(n: int, start: int = 0) -> list[Any]:
    return [make_recall(start + i, 12) for i in range(n)]


def test_answers_are_the_same_alone_and_together(direct: Direct) -> None:
    recalls = prompts(12)
    alone = [direct.answer(recall.prompt, reuse=False)[1].text for recall in recalls]
    together = [direct.start(recall.prompt, reuse=False)[1] for recall in recalls]
    assert [end_of(events).text for events in together] == alone
    assert sum(text == recall.fact.answer for text, recall in zip(alone, recalls, strict=True)) >= 10


def test_a_long_prompt_does_not_stall_the_others(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a running answer keep coming while a prompt of 1,500 tokens is evaluated."""
    observe = Pace.observe

    def steadily(pace: Pace, n_streams: int, n_prompt: int, _: float) -> None:
        observe(pace, n_streams, n_prompt, n_streams + n_prompt / 16)

    monkeypatch.setattr(Pace, "observe", steadily)  # 16 tokens of a prompt take as long as an answer's token
    running, _ = direct.job(make_recall(1, 5).prompt, 400, ignore_end=True)
    long, events = direct.job(make_recall(2, 110).prompt, 1)
    answered: list[int] = []

    def deliver(event: Any) -> None:
        answered.append(running.n_answer)
        events.put(event)

    long.deliver = deliver
    direct.engine.submit_jobs([running, long])
    end_of(events)
    assert long.n_prompt > 1000
    assert answered[0] > 20  # steps of at most a fraction of the prompt each
    direct.engine.cancel(running)
    direct.call(lambda: None)


def test_a_follow_up_evaluates_only_what_is_new(direct: Direct) -> None:
    first, _ = direct.answer(make_recall(3, 12).prompt)
    second, _ = direct.answer([*first.tokens, *direct.tokens("<|end|><|user|>And now?<|end|><|assistant|>")])
    assert second.n_cached == len(first.tokens)  # the end token was chosen, but is no part of the answer
    assert second.exact


def test_waiting_for_the_same_prompt_evaluates_it_once(direct: Direct) -> None:
    prompt = direct.tokens(make_recall(4, 12).prompt)
    jobs = [direct.job(prompt, 8)[0] for _ in range(3)]
    ends: list[queue.Queue[Any]] = []
    for job in jobs:
        ends.append(queue.Queue())
        job.deliver = ends[-1].put
    direct.engine.submit_jobs(jobs)
    assert len({end_of(events).text for events in ends}) == 1
    first, *others = (job.n_cached for job in jobs)
    assert first == 0
    assert all(len(prompt) - n <= 32 for n in others)  # what is left is not worth waiting for


def test_tenants_share_nothing(direct: Direct) -> None:
    prompt = make_recall(5, 12).prompt
    for tenant in ("anna", "ben"):
        job, _ = direct.answer(prompt, tenant=tenant)
        assert job.n_cached == 0


def test_a_stop_string_spans_tokens(direct: Direct) -> None:
    recall = next(recall for recall in prompts(20) if " is " in recall.fact.answer)
    before, _, after = recall.fact.answer.partition(" is ")
    _, end = direct.answer(recall.prompt, stop=[after[:3]])
    assert end.text == before + " is "
    assert end.reason == "stop"


def test_streamed_pieces_make_the_whole(direct: Direct) -> None:
    recall = make_recall(6, 12)
    _, events = direct.start(recall.prompt, stream=True, stop=["nowhere"])
    text = ""
    while True:
        event = events.get(timeout=PATIENCE)
        text += event.text
        if not isinstance(event, Delta):
            break
    assert text == direct.answer(recall.prompt)[1].text


def test_a_seed_makes_the_same_choices(direct: Direct) -> None:
    def draw(seed: int) -> str:
        return direct.answer(make_recall(7, 5).prompt, 20, sampling=Sampling(temperature=2.0, seed=seed))[
            1
        ].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_a_bias_bans_and_forces(direct: Direct) -> None:
    prompt = make_recall(8, 5).prompt
    free, _ = direct.answer(prompt, 1)
    likeliest = free.tokens[-1]
    banned, _ = direct.answer(prompt, 1, sampling=Sampling(temperature=0, logit_bias=((likeliest, -100.0),)))
    assert banned.tokens[-1] != likeliest
    other = banned.tokens[-1]
    forced, _ = direct.answer(prompt, 1, sampling=Sampling(temperature=0, logit_bias=((other, 100.0),)))
    assert forced.tokens[-1] == other


@pytest.mark.parametrize(
    "change", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repeat_penalty": 10.0}]
)
def test_penalties_change_the_choice_after_a_repetition(direct: Direct, change: dict[str, float]) -> None:
    """A token that a bias makes the likeliest repeats; with a penalty less often."""
    prompt = make_recall(16, 5).prompt
    likeliest = direct.answer(prompt, 1)[0].tokens[-1]
    bias = ((likeliest, 12.0),)
    free, _ = direct.answer(prompt, 30, sampling=Sampling(temperature=0, logit_bias=bias), ignore_end=True)
    held, _ = direct.answer(
        prompt, 30, sampling=Sampling(temperature=0, logit_bias=bias, **change), ignore_end=True
    )
    n_free, n_held = (list(job.tokens[job.n_prompt :]).count(likeliest) for job in (free, held))
    assert n_held < n_free


def test_what_the_prompt_says_is_a_repetition(direct: Direct) -> None:
    prompt = make_recall(16, 5).prompt
    said = direct.answer(prompt, 1)[0].tokens[0]
    bias = ((said, 12.0),)
    free, _ = direct.answer(prompt[-40:] + prompt[:8], 1, sampling=Sampling(temperature=0, logit_bias=bias))
    assert free.tokens[-1] == said
    held = Sampling(temperature=0, logit_bias=bias, repeat_penalty=10.0)
    assert direct.answer(prompt[-40:] + prompt[:8], 1, sampling=held)[0].tokens[-1] != said


def test_a_control_token_is_text_where_it_is_shown(direct: Direct) -> None:
    (user,) = direct.engine.tokenizer.shown(["<|user|>", "<|end|>", "no such token"])
    forced = Sampling(temperature=0, logit_bias=((user, 1000.0),))
    assert direct.answer("The", 2, sampling=forced)[1].text == ""
    assert direct.answer("The", 2, sampling=forced, shown=[user])[1].text == "<|user|>" * 2


def test_a_grammar_is_followed_among_others(direct: Direct) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    constraint = Constraint("json_schema", json.dumps(schema))
    sampling = Sampling(temperature=1.5, seed=3, constraint=constraint)
    jobs = [direct.start(recall.prompt, 40, sampling=sampling)[1] for recall in prompts(3)]
    other = direct.start(make_recall(9, 12).prompt)[1]
    for events in jobs:
        assert isinstance(json.loads(end_of(events).text)["a"], bool)
    assert end_of(other).text == direct.answer(make_recall(9, 12).prompt, reuse=False)[1].text


def test_a_dead_end_fails_its_own_request_only(direct: Direct) -> None:
    """A grammar that nothing completes."""
    other = direct.start(make_recall(9, 12).prompt, 200, ignore_end=True)[1]
    endless = Constraint("gbnf", 'root ::= "a" x\nx ::= x "b"')
    _, events = direct.start("x", 4, sampling=Sampling(temperature=0, constraint=endless))
    with pytest.raises(ValueError, match="grammar"):
        end_of(events)
    assert end_of(other).reason == "length"


def test_a_cancelled_job_leaves_at_the_next_step(direct: Direct) -> None:
    job, events = direct.start(make_recall(10, 5).prompt, 1800, stream=True, ignore_end=True)
    while not isinstance(events.get(timeout=PATIENCE), Delta):
        pass
    direct.engine.cancel(job)
    steps = direct.engine.n_steps
    wait_for(lambda: not direct.engine.n_running, pause=0.001)
    assert direct.engine.n_steps <= steps + 2


def test_a_cancelled_job_keeps_no_prefix(direct: Direct) -> None:
    options: dict[str, Any] = {"ignore_end": True, "overflow": "slide", "stream": True, "keep": True}
    job, events = direct.start(make_recall(10, 5).prompt, 1_000_000, **options)
    while not isinstance(events.get(timeout=PATIENCE), Delta):
        pass
    direct.engine.cancel(job)
    wait_for(lambda: not direct.engine.n_running, pause=0.001)
    assert not any(seq.keep for seq in direct.call(direct.engine.pool.held))


def test_a_bug_in_one_answer_does_not_stop_the_engine(direct: Direct) -> None:
    bad, events = direct.job(make_recall(11, 5).prompt, 50)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    bad.answer.add = fail  # type: ignore[method-assign]
    other = direct.start(make_recall(12, 5).prompt)[1]
    direct.engine.submit_jobs([bad])
    with pytest.raises(ZeroDivisionError):
        end_of(events)
    assert end_of(other).text
    assert direct.engine.alive


def test_a_failed_evaluation_is_an_error_and_no_end(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct.engine._stepper._batch, "decode", lambda context, kv, expected: -3)
    _, events = direct.start(make_recall(13, 5).prompt)
    with pytest.raises(EngineError, match="-3"):
        end_of(events)
    monkeypatch.undo()
    assert direct.answer(make_recall(13, 5).prompt)[1].text == make_recall(13, 5).fact.answer


def test_what_does_not_fit_is_refused(direct: Direct) -> None:
    n_ctx = direct.engine.n_ctx
    for n, message in ((0, "the prompt is empty"), (n_ctx, f"has {n_ctx} tokens")):
        with pytest.raises(ValueError, match=message):
            direct.start([5] * n)


def test_an_answer_ends_with_the_context(direct: Direct) -> None:
    n_ctx = direct.engine.n_ctx
    job, end = direct.answer([5] * (n_ctx - 10), 100, ignore_end=True)
    assert end.reason == "length"
    assert len(job.tokens) == n_ctx


def test_pressure_evicts_idle_prefixes_first(direct: Direct) -> None:
    """Prompts of 700 tokens one after the other: three do not fit 2,048 cells, and none is refused."""
    jobs = [direct.answer([10 + i] * 700, 4)[0] for i in range(5)]
    assert len(jobs) == 5
    again, _ = direct.answer([14] * 700, 4)
    assert again.n_cached
    assert direct.answer([10] * 700, 4)[0].n_cached == 0  # the oldest has gone


def test_answers_that_outgrow_the_cache_all_end(direct: Direct) -> None:
    """Four answers that need 4 x 800 cells of 2,048: some give their rows back and go on later."""
    alone = [
        direct.answer(recall.prompt, 20, ignore_end=True, reuse=False)[1].text for recall in prompts(4, 30)
    ]
    jobs = [direct.start(recall.prompt, 500, ignore_end=True, reuse=False) for recall in prompts(4, 30)]
    ends = [end_of(events) for _, events in jobs]
    assert [end.reason for end in ends] == ["length"] * 4
    assert [job.n_answer for job, _ in jobs] == [500] * 4
    # what follows the model's own end is chaotic: other roundings make other texts
    assert [end.text[:20] for end in ends] == [text[:20] for text in alone]


def test_an_answer_that_goes_on_later_still_follows_its_schema(direct: Direct) -> None:
    items = {"type": "integer", "minimum": 100, "maximum": 999}
    schema = {"type": "array", "items": items, "minItems": 150, "maxItems": 150}
    sampling = Sampling(temperature=1, seed=5, constraint=Constraint("json_schema", json.dumps(schema)))
    preempted: list[int] = []
    direct.engine.observer.preempted = lambda: preempted.append(1)  # type: ignore[method-assign]
    try:
        jobs = [direct.job(recall.prompt, 1500, sampling=sampling) for recall in prompts(4, 30)]
        direct.engine.submit_jobs([job for job, _ in jobs])
        values = [json.loads(end_of(events).text) for _, events in jobs]
    finally:
        del direct.engine.observer.preempted
    assert preempted
    assert all(len(value) == 150 and all(100 <= n <= 999 for n in value) for value in values)


def test_a_full_queue_is_refused(direct: Direct) -> None:
    engine = direct.engine
    limit, engine.room.max_queue = engine.room.max_queue, 2
    tried = threading.Event()
    engine.call(lambda: tried.wait(PATIENCE))  # no job ends before that
    try:
        jobs = [direct.job([5 + i] * 20, 200, ignore_end=True)[0] for i in range(engine.parallel + 2)]
        engine.submit_jobs(jobs)
        with pytest.raises(QueueFullError):
            engine.submit_jobs([direct.job([5] * 20)[0] for _ in range(3)])
    finally:
        tried.set()
        engine.room.max_queue = limit
        for job in jobs:
            engine.cancel(job)
        wait_for(lambda: not (engine.n_running or engine.n_queued), pause=0.001)


def test_drain_lets_answers_finish_and_takes_no_more() -> None:
    with Direct() as own:
        _, events = own.start(make_recall(14, 5).prompt)
        assert own.engine.drain(PATIENCE)
        assert end_of(events).text == make_recall(14, 5).fact.answer
        with pytest.raises(ClosedError):
            own.start("x")


def test_close_fails_what_is_left() -> None:
    own = Direct()
    _, events = own.start(make_recall(15, 5).prompt, 1_000_000, ignore_end=True, overflow="slide")
    assert not own.engine.drain(0)
    event = events.get(timeout=PATIENCE)
    assert isinstance(event, Failed)
    assert isinstance(event.error, ClosedError)
    own.engine.close()
    own.engine.close()
