"""Chats and answers longer than their context, on an engine: what goes, what is evaluated again, and that
moved rows are nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mixedkv.bundled import model_path
from mixedkv.bundled.corpus import make_recall
from mixedkv.chunks.gate import last_logits
from mixedkv.engine import StoreConnector
from mixedkv.engine.jobs.job import Job
from mixedkv.engine.prepare import fit
from mixedkv.engine.schedule.request import Request
from mixedkv.errors import ContextLengthError
from mixedkv.llama import Llama
from mixedkv.prefix.sequences import Sequence
from mixedkv.prompts.overflow import NOWHERE, DroppedTokens, LongPrompt, budget, cut, head_of
from mixedkv.prompts.prompt_lookup import PromptLookup
from mixedkv.store import KVStore
from mixedkv.tokens import common_prefix
from support.cache.harness import prompt
from support.patience import PATIENCE, wait_for
from support.servers.served_models import GREEDY, Served
from support.servers.server import Direct, end_of

pytestmark = pytest.mark.full

WINDOWS_FOR_ALL = True  # F16 rows for every sequence, whatever they take

N_CTX = 512
SLIDE: dict[str, Any] = {"overflow": "slide"}
Message = dict[str, str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def note(i: int, n_sentences: int = 4) -> Message:
    return user(" ".join(make_recall(62_000 + i, n_sentences).journal))


def chat(n_notes: int, first: int = 0) -> list[Message]:
    return [m for i in range(n_notes) for m in (note(first + i), assistant("I have noted that."))]


def ask(direct: Direct, messages: list[Message], n: int = 24, **options: Any) -> tuple[Job, str]:
    options = {"temperature": 0, **SLIDE, **options}
    answer = direct.engine.submit(messages, max_tokens=n, **options)
    return answer.job, answer.result(PATIENCE).text


def evaluated(job: Job) -> int:
    return job.n_prompt - (job.n_cached or 0)


def held(direct: Direct) -> list[Sequence]:
    held: list[Sequence] = direct.call(lambda: list(direct.engine.pool.held()))
    return held


def resident() -> int:
    """Pages of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.fixture(scope="module", params=["mixed", pytest.param("f16", marks=pytest.mark.nightly)])
def direct(request: pytest.FixtureRequest) -> Iterator[Direct]:
    with Direct(kv=request.param, n_ctx=N_CTX, parallel=2, idle=4) as direct:
        yield direct


# --- the rule ---


class Marks:
    """Every tenth token begins a message. Counts the tokens that are looked at."""

    n_seen = 0

    def boundaries(self, tokens: Any) -> Any:
        self.n_seen += len(tokens)
        return np.flatnonzero(tokens % 10 == 0)

    message_starts = boundaries


@pytest.mark.parametrize("n", [N_CTX, 2 * N_CTX, 2 * N_CTX + 10, 50 * N_CTX])
def test_of_a_long_prompt_only_what_can_stay_is_looked_at(n: int) -> None:
    job, whole = (Job(Request(prompt=np.arange(n), max_tokens=1, **SLIDE)) for _ in range(2))
    marks: Any = Marks()
    fit(job, marks, N_CTX)
    assert marks.n_seen <= 4 * N_CTX
    everywhere = tuple(range(0, n, 10))
    long = LongPrompt(whole.prompt, 10, N_CTX, np.array(everywhere), everywhere)
    whole.leave_out(long, long.to_drop())
    assert (job.tokens, job.boundaries) == (whole.tokens, whole.boundaries)
    assert job.dropped_tokens is not None
    assert (job.dropped_tokens.begin, job.dropped_tokens.n) == (10, long.to_drop())
    assert job.dropped_tokens.is_of(whole.long.tokens if whole.long is not None else whole.prompt)


def test_what_goes_ends_where_a_message_begins() -> None:
    assert cut(600, 4, 512) == 4 + 600 - budget(512, 4)
    starts = np.array([0, 50, 200, 300, 590])
    assert cut(600, 4, 512, starts) == 300
    assert cut(600, 4, 512, np.array([0, 50, 590])) == cut(600, 4, 512, NOWHERE)  # too much would go
    assert head_of(starts, 512) == 50
    assert head_of(np.array([0, 200]), 512) == head_of(NOWHERE, 512) == 4


def test_a_gap_knows_what_is_missing() -> None:
    tokens = np.arange(100, dtype=np.int32)
    dropped = DroppedTokens(4).wider(tokens[4:20]).wider(tokens[20:30])
    assert dropped.n == 26
    assert dropped.is_of(tokens)
    assert not dropped.is_of(np.concatenate([tokens[:29], tokens[30:]]))


# --- chats ---


@pytest.mark.slow
def test_a_chat_of_twenty_contexts() -> None:
    with Direct(n_ctx=N_CTX, parallel=2, idle=4) as direct:
        endless_chat(direct)


def endless_chat(direct: Direct) -> None:
    """Facts of the first message and of the latest ones are known to the end, and a turn evaluates what is
    new of it.
    """
    first = make_recall(62_900, 3, where=0.5)
    messages = [user(" ".join(first.journal)), assistant("I have noted that.")]
    right = {"first": 0, "recent": 0}
    n_asked, i, total, pages = 0, 0, 0, []
    while total < 20 * N_CTX:
        i += 1
        recent = make_recall(63_000 + i, 8, where=0.5)
        messages.append(user(" ".join(recent.journal)))
        job, text = ask(direct, messages)
        new = job.n_given - total
        assert evaluated(job) <= new + 8, (i, new)
        total = job.n_given
        assert job.n_prompt < N_CTX
        assert job.n_dropped == job.n_given - job.n_prompt
        assert direct.call(lambda: direct.engine.pool.used) <= N_CTX
        messages.append(assistant(text))
        if i % 6 == 0:
            pages.append(resident())
            n_asked += 1
            for name, fact in (("first", first.fact), ("recent", recent.fact)):
                messages.append(user(fact.question))
                job, text = ask(direct, messages)
                total = job.n_given
                right[name] += text == fact.answer
                messages.append(assistant(text))
    assert job.n_dropped > 18 * N_CTX
    assert n_asked >= 10
    assert min(right.values()) >= n_asked - 2, (right, n_asked)
    assert (pages[-1] - pages[len(pages) // 3]) * 4096 < 8 << 20


def test_a_turn_evaluates_what_is_new_when_the_middle_goes(direct: Direct) -> None:
    messages, sizes = chat(11), []
    while len(sizes) < 6:
        messages.append(note(40 + len(sizes)))
        job, text = ask(direct, messages)
        messages.append(assistant(text))
        sizes.append((evaluated(job), job.n_dropped, job.n_approximate, job.exact))
    assert all(n < 70 for n, *_ in sizes[1:])
    dropped = [n for _, n, *_ in sizes]
    assert dropped[0] > 0
    assert dropped == sorted(dropped)
    assert dropped[-1] > dropped[0]
    assert [approximate > 0 for _, _, approximate, _ in sizes] == [not exact for *_, exact in sizes]


def test_the_first_and_the_newest_messages_stay(direct: Direct) -> None:
    messages = [*chat(20, first=100), note(7)]
    job, _ = ask(direct, messages)
    kept = direct.llm.detokenize(job.prompt.tolist(), special=True).decode()
    assert kept.startswith(f"<|bos|><|user|>{messages[0]['content']}<|end|>")
    _, middle = kept.split(messages[0]["content"] + "<|end|>")
    assert middle.startswith("<|")
    assert middle.endswith(f"{messages[-1]['content']}<|end|><|assistant|>")
    assert budget(N_CTX, 4) - 60 < job.n_prompt <= budget(N_CTX, 4)


def test_an_answer_goes_on_beyond_the_context(direct: Direct) -> None:
    """As one that a `Llama` makes by itself, whose rows are moved at the same places."""
    tokens = direct.tokens(f"<|user|>{note(3)['content']}<|end|><|assistant|>")
    n = N_CTX + 150
    job, events = direct.start(tokens, n, ignore_end=True, n_logprobs=1, **SLIDE)
    done = end_of(events)
    assert done.reason == "length"
    assert job.n_answer == n == len(done.logprobs)
    assert job.n_given == len(tokens)
    assert job.n_dropped == len(tokens) + n - len(job.tokens)
    assert not job.exact
    chosen = [logprob.token for logprob in done.logprobs]
    options = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
    with Llama(model_path(), kv=direct.llm.kv.config, n_ctx=N_CTX, **options) as llm:
        llm.eval(tokens)
        at, agree = 0, 0
        for token in chosen[:-1]:
            agree += int(last_logits(llm).argmax()) == token
            held = [*llm.input_ids[: llm.n_tokens].tolist(), token]
            if len(held) == N_CTX:
                starts = direct.engine.tokenizer.message_starts(np.array(held, np.int32))
                at = at or head_of(starts, N_CTX)
                llm.kv.remove_and_shift(0, at, cut(N_CTX, at, N_CTX, starts))
            llm.eval([token])
        assert agree > 0.98 * len(chosen)


def test_the_turn_after_such_an_answer_goes_on_from_it(direct: Direct) -> None:
    on = {"logit_bias": ((direct.llm.token_eos(), -100.0),)}
    messages = [note(4)]
    job, text = ask(direct, messages, N_CTX + 50, **on)
    assert job.n_dropped > 0
    answered = job.all_tokens
    messages += [assistant(text), note(5)]
    again = direct.engine.tokenizer.encode(messages, long=True)[0]
    assert len(again) > N_CTX
    job, _ = ask(direct, messages)
    begin = common_prefix(job.prompt, np.asarray(answered))
    rest = job.prompt[begin : begin + 100].tolist()  # maybe behind more that was dropped
    same = any(list(answered[i : i + 100]) == rest for i in range(begin, len(answered)))
    assert same == (evaluated(job) < 80)  # the text of tokens may have other tokens
    assert job.n_prompt < N_CTX


def test_without_it_long_prompts_are_refused_and_answers_end(direct: Direct) -> None:
    with pytest.raises(ContextLengthError, match="shorten it"):
        direct.engine.submit([*chat(20), note(7)])
    with pytest.raises(ContextLengthError, match="shorten it"):
        direct.engine.submit([5] * 600, overflow="refuse")
    job, done = direct.answer(direct.tokens(note(3)["content"]), 2 * N_CTX, ignore_end=True)
    assert done.reason == "length"
    assert len(job.tokens) == N_CTX
    with pytest.raises(ValueError, match="overflow='drop': use one of refuse, slide"):
        direct.engine.submit("a", overflow="drop")  # type: ignore[arg-type]


# --- moved rows are nobody else's ---


def slid(direct: Direct, first: int) -> tuple[list[Message], Sequence]:
    """A chat whose rows were moved, and its sequence."""
    messages = chat(8, first=first)
    for i in range(10):
        messages.append(note(first + 20 + i))
        job, text = ask(direct, messages)
        messages.append(assistant(text))
        if job.n_dropped and not job.exact:
            break
    own = (seq for seq in held(direct) if seq.assembled and seq.dropped_tokens == job.dropped_tokens)
    return messages, next(own)


@pytest.mark.parametrize("reuse", ["exact", "prefix", True])
def test_nobody_else_takes_them(direct: Direct, reuse: Any) -> None:
    _, seq = slid(direct, 200)
    assert not direct.engine.call(lambda: direct.engine.pool.is_exact(seq)).result()
    tokens = [*seq.tokens, *direct.tokens("<|end|>")][: N_CTX - 40]
    job, _ = direct.answer(tokens, 4, reuse=reuse)
    assert (job.n_cached or 0) <= 64  # of the first message
    assert job.exact
    cold, _ = direct.answer(tokens, 4, reuse=False)
    assert cold.tokens == job.tokens


def test_a_chat_that_has_lost_something_else_does_not_take_them(direct: Direct) -> None:
    messages, _ = slid(direct, 300)
    other = [*messages[:2], *chat(1, first=399), *messages[4:], note(398)]
    job, _ = ask(direct, other)
    assert (job.n_cached or 0) <= 64
    job, _ = ask(direct, [*messages, note(397)], tenant="another")
    assert job.n_cached == 0


def test_rows_that_others_have_too_are_copied(direct: Direct) -> None:
    for seq in held(direct):
        direct.call(lambda seq=seq: direct.engine.pool.drop(seq))
    tokens = direct.tokens(note(9, 20)["content"])[:150]
    direct.answer(tokens, 0, keep=True)
    (kept,) = held(direct)

    def look() -> Any:
        job, done = direct.answer([*tokens, 7], 1, n_logprobs=50)
        assert job.n_cached == len(tokens)
        return job.exact, [(lp.token, lp.top["logprob"].tolist()) for lp in done.logprobs]

    before = look()
    other, _ = direct.answer([*tokens, *range(20, 70)], 0)
    seq = next(seq for seq in held(direct) if len(seq.tokens) == 200)
    values = direct.llm.kv.layer(2).v(seq.id)
    used = direct.call(lambda: direct.engine.pool.used)
    assert other.n_cached == len(tokens)
    assert direct.call(lambda: direct.engine.pool.remove_and_shift(seq, 4, 60))
    assert direct.call(lambda: direct.engine.pool.used) == used + 150 - 60
    assert seq.tokens.tolist() == [*tokens[:4], *tokens[60:], *range(20, 70)]
    moved = direct.llm.kv.layer(2).v(seq.id)  # V does not turn with the position
    assert np.array_equal(moved[4:], values[60:])
    assert kept.tokens.tolist() == tokens
    assert look() == before


def test_an_answer_beside_a_slide_is_the_same(direct: Direct) -> None:
    """To the bit: nothing but the rows of the sequence that slides is touched."""
    text = direct.tokens(make_recall(64_000, 8).prompt)

    def beside(moves: bool) -> Any:
        for seq in held(direct):
            direct.call(lambda seq=seq: direct.engine.pool.drop(seq))
        direct.answer(direct.tokens(note(9, 20)["content"])[:160], 0)
        (idle,) = held(direct)
        job, events = direct.start(text, 40, n_logprobs=30, ignore_end=True)
        if moves:
            direct.call(lambda: direct.engine.pool.remove_and_shift(idle, 4, 60))
        else:  # the same cells become free
            direct.call(lambda: direct.llm.kv.remove(idle.id, 4, 60))
        done = end_of(events)
        assert job.exact
        return [(lp.token, lp.top["logprob"].tolist()) for lp in done.logprobs]

    assert beside(moves=True) == beside(moves=False)


def test_endless_answers_beside_others(direct: Direct) -> None:
    """Two that slide again and again in one pool with short ones, which pause and evict each other."""
    recalls = [make_recall(65_000 + i, 8) for i in range(5)]
    alone = [direct.answer(direct.tokens(recall.prompt), 16, reuse=False)[1].text for recall in recalls]
    assert sum(text == recall.fact.answer for text, recall in zip(alone, recalls, strict=True)) >= 4
    prompts = [direct.tokens(f"<|user|>{note(i)['content']}<|end|><|assistant|>") for i in (80, 81)]
    long = [
        direct.start(tokens, N_CTX + 200, ignore_end=True, tenant=str(i), **SLIDE)
        for i, tokens in enumerate(prompts)
    ]
    texts = [direct.answer(direct.tokens(recall.prompt), 16, tenant="short")[1].text for recall in recalls]
    assert sum(a == b for a, b in zip(texts, alone, strict=True)) >= 4  # other batches round otherwise
    for job, events in long:
        assert end_of(events).reason == "length"
        assert job.n_answer == N_CTX + 200
        assert job.n_dropped > 0


@pytest.mark.parametrize("tenant", ["", "other"])
def test_one_without_end_holds_up_nobody(direct: Direct, tenant: str) -> None:
    """It has all the cells, and others need most of them."""
    endless, second = (
        direct.start(direct.tokens(text), 1_000_000, ignore_end=True, **SLIDE)[0]
        for text in ("The lamp", "The mill")
    )
    prompts = [prompt(N_CTX - 100, seed=i) for i in range(2)]
    jobs = [direct.start(tokens, 8, tenant=tenant, ignore_end=True) for tokens in prompts]
    for job, ends in jobs:
        assert end_of(ends).reason == "length"
        assert job.n_answer == 8
    assert endless.t_end is None is second.t_end
    before = [job.n_answer for job in (endless, second)]
    wait_for(lambda: all(job.n_answer > n for job, n in zip((endless, second), before, strict=True)))
    for job in (endless, second):
        direct.engine.cancel(job)
    wait_for(lambda: direct.engine.idle)


def test_drafts_are_looked_up_in_what_a_context_holds(direct: Direct) -> None:
    """However long the prompt is: what is dropped says little of what comes."""
    job, _ = direct.job(list(range(400)) * 10, 1, speculation="prompt-lookup", **SLIDE)
    drafter = job.answer.drafter
    assert drafter is not None
    for token in range(3):
        drafter.take(token)
    assert drafter.draft(2)[0] == [3, 4]
    lookup = drafter._sources["prompt-lookup"]
    assert isinstance(lookup, PromptLookup)
    assert len(lookup._tokens) <= N_CTX + 3


def test_nothing_of_them_is_stored() -> None:
    with Direct(n_ctx=N_CTX, parallel=2, idle=2, connector=StoreConnector(KVStore(None))) as direct:
        connector = direct.engine._connector
        assert isinstance(connector, StoreConnector)
        slid(direct, 600)
        connector.flush()
        moved = next(np.array(seq.tokens, np.int32) for seq in held(direct) if seq.assembled)
        found = connector.store.find(connector._identity(""), moved)
        assert found is None or found.n_tokens <= 64


@pytest.mark.parametrize("name", ["lfm2", "gemma2"])
def test_where_rows_cannot_be_moved_what_stays_is_evaluated(
    zoo_path: Callable[[str], Path], name: str
) -> None:
    """Recurrent layers, and sliding windows."""
    with Served(zoo_path(name), "f16", n_ctx=1024) as served:
        assert not served.llm.kv.can_shift
        tokens = prompt(1400, seed=3)
        answer = served.engine.submit(tokens, **{**GREEDY, **SLIDE})
        answer.result(PATIENCE)
        job = answer.job
        assert (job.n_cached, job.n_given, job.n_dropped) == (0, 1400, 1400 - budget(1024, 4))
        assert served.answer(job.prompt.tolist(), reuse=False)[1] == list(job.tokens[job.n_prompt :])
        answer = served.engine.submit(prompt(1000, seed=4), **{**GREEDY, **SLIDE, "max_tokens": 60})
        assert answer.result(PATIENCE).reason == "length"
        assert (answer.job.n_answer, answer.job.exact) == (60, False)
