"""Passages that were computed elsewhere, through the engine: labelled, never shared as exact, checked."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from mixedkv.bundled.corpus import make_recall
from mixedkv.chunks.chunk_part import ChunkPart
from mixedkv.chunks.chunk_reuse import ChunkReuse
from mixedkv.engine import ChunkConnector, PromptCache
from mixedkv.engine.engine import Engine
from mixedkv.engine.jobs.job import Done, Job
from mixedkv.engine.schedule.contract import StepPlan
from mixedkv.engine.schedule.scheduler import Scheduler
from mixedkv.errors import UnsupportedModelError
from mixedkv.prompts.part import Outcome, PromptPart
from mixedkv.store import KVStore
from mixedkv_bench.harness.reuse_cases import Case, CaseMaker
from support.engine.conversations import open_llama
from support.patience import wait_for
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.full

KV = "mixed:cold=q8_0"
N = 500
N_CTX, LONG = 65536, 60_000  # an answer of so many tokens takes a minute and more


def opened(**options: Any) -> Direct:
    connector = ChunkConnector(KVStore(None), **{"repair": "query", "check": 0.0, **options})
    return Direct(kv=KV, n_ctx=N_CTX, connector=connector)


@pytest.fixture(scope="module")
def direct() -> Iterator[Direct]:
    with opened() as direct:
        yield direct


def make(direct: Direct, seed: int, donor: str = "conversation", n_prompt: int = N) -> Case:
    maker = CaseMaker(direct.tokens, direct.llm.tokenize(b""), n_prompt)
    return maker.make("documents", donor, seed)  # type: ignore[arg-type]


def store(direct: Direct, case: Case, tenant: str = "") -> None:
    for tokens in case.stored:
        direct.answer(tokens.tolist(), 0, tenant=tenant, reuse="exact")
    connector(direct).flush()
    forget(direct)


def connector(direct: Direct) -> ChunkConnector:
    found = direct.engine._connector
    assert isinstance(found, ChunkConnector)
    return found


def forget(direct: Direct) -> None:
    """Nothing is left in the context."""
    direct.call(lambda: [None for _ in iter(direct.engine.pool.evict, False)])


def ask(direct: Direct, case: Case, reuse: str | bool = "chunks", **options: Any) -> tuple[Job, Done]:
    return direct.answer(case.prompt.tolist(), 12, reuse=reuse, n_logprobs=5, **options)


def bits(answer: tuple[Job, Done]) -> list[Any]:
    job, done = answer
    return [job.tokens.tolist(), [(each.token, each.logprob) for each in done.logprobs]]


def assert_same_answer(answer: tuple[Job, Done], reference: tuple[Job, Done]) -> None:
    """The same tokens, and probabilities as near as the cuts of a prompt allow, which follow the pace."""
    (tokens, found), (wanted_tokens, expected) = bits(answer), bits(reference)
    assert tokens == wanted_tokens
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=1e-3)


def test_passages_are_reused_and_said_to_be(direct: Direct) -> None:
    case = make(direct, 1)
    store(direct, case)
    job, _ = ask(direct, case)
    assert not job.exact
    assert job.n_approximate > 0.5 * job.n_prompt
    assert (job.n_cached or 0) - job.n_cached_exact == job.n_approximate
    assert job.evaluated
    assert job.tokens[: job.n_prompt].tolist() == case.prompt.tolist()
    assert str(job.method) == "query"


def test_an_exact_request_that_follows_is_that_of_an_empty_engine(direct: Direct) -> None:
    case = make(direct, 2)
    forget(direct)
    cold = ask(direct, case, reuse=False, store=False)
    forget(direct)
    store(direct, case)
    job, _ = ask(direct, case)
    assert job.n_approximate
    for _ in range(2):  # the second one finds what the first one left
        exact, done = ask(direct, case, reuse="exact")
        assert exact.exact
        assert exact.n_approximate == 0
        assert_same_answer((exact, done), cold)
    connector(direct).flush()
    forget(direct)
    stored, done = ask(direct, case, reuse="exact")
    assert stored.cached_tier == "ram"
    assert_same_answer((stored, done), cold)


def test_rows_of_others_are_left_alone(direct: Direct) -> None:
    """Turning K of what is loaded touches nothing else, to the bit."""
    case, other = make(direct, 3), make_recall(77, 20)
    store(direct, case)
    job, _ = direct.answer(other.prompt, 1, reuse=False)
    assert job.seq is not None
    rows = direct.call(lambda: direct.llm.kv.export(job.seq.id, 0, job.n_prompt, job.prompt))
    before = {name: rows.to_arrays()[name].copy() for name in rows.to_arrays()}
    assert ask(direct, case)[0].n_approximate
    after = direct.call(lambda: direct.llm.kv.export(job.seq.id, 0, job.n_prompt, job.prompt)).to_arrays()
    for name, array in before.items():
        assert np.array_equal(array, after[name]), name


def test_approximate_rows_are_neither_stored_nor_shared(direct: Direct) -> None:
    case = make(direct, 4)
    store(direct, case)
    n = direct.engine.connector_stats()["n_entries"]
    job, _ = ask(direct, case)
    assert not job.exact
    connector(direct).flush()
    assert direct.engine.connector_stats()["n_entries"] == n
    for reuse in ("exact", "prefix"):  # the rows are still in the context
        again, _ = ask(direct, case, reuse)
        assert again.n_approximate == 0, reuse


def test_who_accepts_chunks_goes_on_from_them(direct: Direct) -> None:
    case = make(direct, 5)
    store(direct, case)
    job, _ = ask(direct, case)
    longer = [*job.tokens, *direct.tokens("And what else?")]
    again, _ = direct.answer(longer, 4, reuse="chunks")
    assert not again.exact
    assert again.n_cached == again.n_approximate >= len(job.tokens) - 1


def test_tenants_never_share_a_passage(direct: Direct) -> None:
    case = make(direct, 6)
    store(direct, case, "anna")
    for tenant in ("", "ben"):
        job, _ = ask(direct, case, tenant=tenant)
        assert (job.exact, job.n_cached, job.n_approximate) == (True, 0, 0)
    assert ask(direct, case, tenant="anna")[0].n_approximate
    assert ask(direct, case, tenant="carl")[0].n_cached == 0


def test_what_is_kept_is_exact(direct: Direct) -> None:
    case = make(direct, 7)
    store(direct, case)
    for options in ({"keep": True}, {}):
        job, _ = direct.answer(case.prompt.tolist(), 0, reuse="chunks", **options)
        assert job.exact
        forget(direct)


def test_others_get_on_meanwhile(direct: Direct) -> None:
    """A running answer has a token in every step of a prompt that is put together."""
    case = make(direct, 8, n_prompt=1500)
    store(direct, case)
    running, _ = direct.start(make_recall(5, 8).prompt, LONG, ignore_end=True, reuse=False)
    wait_for(lambda: running.n_answer > 2)
    seen: list[int] = []
    imported = Job.imported

    def watched(job: Job, part: PromptPart, n_reused: int) -> None:
        seen.append(running.n_answer)
        imported(job, part, n_reused)

    began = running.n_answer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "imported", watched)
        job, _ = ask(direct, case)
    assert job.n_approximate
    assert seen[0] - began >= len(job.prompt) // 256 + 3
    direct.engine.cancel(running)
    direct.call(lambda: None)


def test_steps_count_what_they_evaluate(direct: Direct, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads rows evaluates nothing, and the pace of the next must not come from it."""
    case = make(direct, 10)
    store(direct, case)
    counted, took = list[int](), Scheduler.took

    def watched(scheduler: Scheduler[Job], step: StepPlan[Job], seconds: float) -> None:
        counted.append(step.n_prompt)
        took(scheduler, step, seconds)

    monkeypatch.setattr(Scheduler, "took", watched)
    job, _ = ask(direct, case)
    assert job.n_approximate
    assert isinstance(job.import_report, ChunkReuse)
    n_evaluated = job.import_report.n_evaluated
    assert n_evaluated <= sum(counted) <= n_evaluated + len(counted)


def test_a_cancelled_one_leaves_nothing(direct: Direct) -> None:
    case = make(direct, 9)
    store(direct, case)
    job, _events = direct.job(case.prompt.tolist(), 4, reuse="chunks")
    evaluate = ChunkPart.evaluate

    def cancel(self: ChunkPart, *args: Any) -> Outcome:
        direct.engine.cancel(job)
        return evaluate(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkPart, "evaluate", cancel)
        direct.engine.submit_jobs([job])
        wait_for(lambda: job.cancelled and direct.engine.idle)
    forget(direct)
    assert direct.call(lambda: direct.engine.pool.used) == 0
    assert ask(direct, case)[0].n_approximate


def test_what_cannot_be_put_together_is_evaluated(direct: Direct) -> None:
    case = make(direct, 10)
    expected = bits(ask(direct, case, reuse=False, store=False))
    store(direct, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mixedkv.chunks.assembly.Assembly._choose", lambda *a, **k: 1 / 0)
        job, _ = ask(direct, case)
    assert (job.exact, job.n_approximate, job.n_cached) == (True, 0, 0)
    assert job.tokens.tolist() == expected[0]
    forget(direct)
    assert direct.call(lambda: direct.engine.pool.used) == 0


def test_fuzzed_prompts_at_the_same_time() -> None:
    """80, of which some are cancelled: never an exact label on approximate rows."""
    with opened(chunk_size=32, boundary_window=4, max_donors=2) as direct:
        fuzz(direct, 80)


def fuzz(direct: Direct, n: int) -> None:
    random, jobs = Random(5), []
    passages = [tokens for seed in range(3) for tokens in make(direct, 20 + seed, "alone", 300).stored]
    for tokens in passages:
        direct.answer(tokens.tolist(), 0, tenant=random.choice(("", "b")))
    connector(direct).flush()
    for _ in range(n):
        pieces = random.choices(passages, k=random.randint(1, 5))
        cuts = [piece[random.randint(0, 20) : random.randint(40, 90)] for piece in pieces]
        tokens = np.concatenate([*cuts, np.array(random.choices(range(3, 900), k=random.randint(1, 20)))])
        reuse = random.choice((True, "exact", "chunks", "prefix"))
        jobs.append(direct.start(tokens.tolist(), 2, reuse=reuse, tenant=random.choice(("", "b"))))
        if random.random() < 0.1:
            direct.engine.cancel(jobs.pop()[0])
    for job, events in jobs:
        end_of(events)
        assert job.exact or job.prefix.accept in ("chunks", "prefix")
        assert job.exact or job.n_approximate
    assert sum(job.n_approximate > 0 for job, _ in jobs) > n // 10
    direct.call(lambda: None)
    forget(direct)
    assert direct.call(lambda: direct.engine.pool.used) == 0


# --- checks ---


def test_checks_switch_it_off() -> None:
    with opened(repair="none", check=1.0, max_kld=1e-9) as direct:
        for seed in range(8):
            case = make(direct, seed, "alone", 300)
            store(direct, case)
            assert ask(direct, case)[0].n_approximate
            wait_for(lambda n=seed + 1: direct.engine.connector_stats()["chunks"]["checked"] == n)
        stats = direct.engine.connector_stats()["chunks"]
        assert "nats" in stats["off"]
        assert stats["kld_mean"] > 1e-9
        assert ask(direct, case)[0].exact
        forget(direct)
        assert direct.call(lambda: direct.engine.pool.used) == 0


def test_checks_wait_until_nobody_wants_the_engine() -> None:
    with opened(check=1.0) as direct:
        case = make(direct, 1, "alone")
        store(direct, case)
        running, _ = direct.start(make_recall(5, 8).prompt, LONG, ignore_end=True, reuse=False)
        wait_for(lambda: running.n_answer > 2)
        assert ask(direct, case)[0].n_approximate
        stats = direct.engine.connector_stats()["chunks"]
        assert (stats["checked"], stats["waiting_to_be_checked"]) == (0, 1)
        direct.engine.cancel(running)
        wait_for(lambda: direct.engine.connector_stats()["chunks"]["checked"] == 1)


# --- what is refused ---


def test_settings_and_models_that_cannot() -> None:
    with Direct(kv=KV) as direct, pytest.raises(ValueError, match="ChunkConnector"):
        direct.start("a text", 1, reuse="chunks")
    with Direct(kv=KV) as direct, pytest.raises(ValueError, match="reuse='magic'"):
        direct.start("a text", 1, reuse="magic")
    for options, match in (
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"chunk_size": 99999}, "chunk_size=99999"),
        ({"check": -1.0}, "check"),
    ):
        with pytest.raises(ValueError, match=match):
            opened(**options)
    with pytest.raises(UnsupportedModelError, match="fused"):
        Direct(kv="f16", connector=ChunkConnector(KVStore(None), repair="query"))


# --- PromptCache ---


def test_warm_documents() -> None:
    texts = [" ".join(make_recall(63_000 + i, 14).journal) for i in range(3)]
    options = {"n_seq_max": 8, "kv_unified": True, "n_ctx": 4096}
    with open_llama(KV, **options) as llm, PromptCache(llm, reuse="chunks") as cache:
        with pytest.raises(ValueError, match="empty document"):
            cache.warm([*texts, ""])
        warmed = cache.warm(texts)
        assert [each.evaluated for each in warmed] == [each.prompt_tokens for each in warmed]
        prompt = f"<|user|>{texts[2]} {texts[0]}<|end|><|user|>What color is Mira's kite?<|end|><|assistant|>"
        answer = cache.generate(prompt, max_tokens=4, temperature=0)
        assert not answer.exact
        assert answer.approximate > 0.4 * answer.prompt_tokens
        assert cache.generate(prompt, max_tokens=4, temperature=0, reuse="exact").exact
        with pytest.raises(ValueError, match="context"):
            cache.warm(["The " * 9000])
        with pytest.raises(ValueError, match="empty"):
            cache.warm([])
    assert isinstance(cache.engine, Engine)


def test_what_is_evaluated_for_others_has_exact_rows(direct: Direct) -> None:
    """A prompt that is warmed is stored, and who takes it may want exact rows; a count is nobody else's."""
    for seed, is_stored in ((21, True), (22, False)):
        case = make(direct, seed)
        store(direct, case)
        job, events = direct.job(case.prompt.tolist(), 0)
        job.is_stored = is_stored
        direct.engine.submit_jobs([job])
        end_of(events)
        assert (job.n_approximate == 0) == is_stored
    answered, _ = ask(direct, make(direct, 22))
    assert answered.n_approximate > 0
