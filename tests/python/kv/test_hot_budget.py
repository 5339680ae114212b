"""F16 rows that sequences share: how many there are, who gives them up, and what is said of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest

from mixedkv import Llama, _core
from mixedkv.bundled import model_path
from mixedkv.config import PRESETS, parse_kv
from mixedkv.model.footprint import footprint, model_shape
from mixedkv.model.gguf_file import read_model_file
from support.cache.checks import assert_same, tolerance, worst
from support.cache.harness import Ctx, DecodeError, InitError, Mixed, prompt, rel_rms
from support.cache.hidden import hidden
from support.cache.oracle import Oracle

pytestmark = [pytest.mark.full, pytest.mark.merged_nightly]

# Six pages of 16 behind the sinks of six sequences; a window of 32 and its margin take three of them.
KV = Mixed(threshold=32, group=8, sinks=2, draft=4, budget=112)
SIX = {"n_seq_max": 6, "unified": True, "n_ctx": 1024}
PAGE, N_PAGES = 16, 6
IDLE = 4 * 6  # steps
tokens = prompt(4000, seed=31)


def hot(ctx: Ctx, seq: int) -> list[int]:
    """Positions that the query at a sequence's end reads in F16."""
    _, positions, flags = ctx.rows(0, "k", seq)
    return positions[flags].tolist()


def window(n: int) -> list[int]:
    return [p for p in range(n) if KV.is_hot(n - 1, p)]


def recent(ctx: Ctx, seq: int) -> list[int]:
    return [p for p in hot(ctx, seq) if p >= KV.sinks]


def step(ctx: Ctx, seqs: Sequence[int], at: int = 0) -> np.ndarray:
    """One more token of each sequence."""
    positions = [ctx.pos_max(seq) + 1 for seq in seqs]
    return ctx.decode(tokens[at : at + len(seqs)], positions, [[seq] for seq in seqs])


# --- bytes ---


@pytest.mark.parametrize("n_seq", [1, 16])
@pytest.mark.parametrize("preset", PRESETS)
def test_by_default_sequences_take_a_fifth_more_than_one_at_most(preset: str, n_seq: int) -> None:
    """As the server makes it: 8192 tokens for 16 sequences, of which eight run."""
    config = parse_kv(f"mixed:{preset}")
    with Llama(
        model_path(), kv=config, n_ctx=8192, n_seq_max=n_seq, kv_unified=True, n_threads=1, verbose=False
    ) as llm:
        stats = llm.kv.stats()
    shape = model_shape(read_model_file(model_path()))
    assert stats.bytes_total <= 1.2 * footprint(shape, config, 8192).bytes
    said = footprint(shape, config, 8192, n_seq)
    assert (said.bytes, said.n_elements) == (stats.bytes_total, stats.n_elements)
    assert stats.hot_shared == (n_seq == 16)


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize(
    "kv",
    [
        "mixed",
        "mixed:threshold=0,sinks=3",
        "mixed:layers=0:q8_0/q5_0,3-4:q8_0",
        "mixed:cold=lm4,layers=2:q4_0/lm4",
    ],
)
def test_the_formula_is_what_is_allocated(kv: str, unified: bool) -> None:
    n_seq = 4 if unified else 1
    with Llama(
        model_path(), kv=kv, n_ctx=1024, n_seq_max=n_seq, kv_unified=unified, n_threads=1, verbose=False
    ) as llm:
        stats = llm.kv.stats()
    assert (
        footprint(model_shape(read_model_file(model_path())), parse_kv(kv), 1024, n_seq).bytes
        == stats.bytes_total
    )


BIG = {"threshold": 256, "group": 32, "k": "q8_0", "v": "q8_0"}


def test_more_bytes_than_f16_are_refused_with_the_numbers(open_ctx) -> None:
    with pytest.raises(
        InitError, match=r"would take \d+ bytes, more than the \d+ of an F16 cache: raise n_ctx"
    ):
        open_ctx("llama-64", Mixed(**BIG, budget=0), n_ctx=256)
    ctx = open_ctx("llama-64", Mixed(**BIG), n_ctx=256)
    assert ctx.stats()["bytes_total"] > 2 * ctx.stats()["n_elements"]


@pytest.mark.parametrize("rows", ["150", "all"])
def test_the_formula_knows_of_a_hidden_budget(rows: str) -> None:
    with (
        hidden(hot_budget=rows),
        Llama(model_path(), kv="mixed", n_ctx=1024, n_seq_max=4, kv_unified=True, verbose=False) as llm,
    ):
        shape = model_shape(read_model_file(model_path()))
        assert footprint(shape, llm.kv.config, 1024, 4).bytes == llm.kv.stats().bytes_total


def test_who_names_a_budget_is_warned_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXEDKV_HOT_BUDGET", "all")
    kv, options = "mixed:quality", {"n_ctx": 512, "n_threads": 1, "verbose": False}
    with pytest.warns(UserWarning, match=r"takes [\d.]+ MiB here, more than the [\d.]+ MiB of kv='f16'"):
        Llama(model_path(), kv=kv, **options).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Llama(model_path(), kv=kv, **{**options, "n_ctx": 1024}).close()


@pytest.mark.parametrize(("budget", "least", "unified"), [(63, 64, True), (227, 228, False)])
def test_less_than_a_window_is_refused(open_ctx, budget: int, least: int, unified: bool) -> None:
    with pytest.raises(
        InitError, match=rf"hot_budget {budget} is less than the {least} F16 rows of one window"
    ):
        open_ctx("llama-64", KV.with_(budget=budget), **{**SIX, "unified": unified, "n_ctx": 1536})
    open_ctx("llama-64", KV.with_(budget=least), **{**SIX, "unified": unified, "n_ctx": 1536})


# --- who gives rows up ---


def test_idle_sequences_go_first_the_longest_idle_one_before_others(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in (0, 1):
        ctx.decode(tokens[:60], seq_ids=seq)
    assert [hot(ctx, seq) for seq in (0, 1)] == [window(60)] * 2
    for i in range(IDLE + 1):  # it fits: nothing goes
        step(ctx, [1], i)
    assert hot(ctx, 0) == window(60)
    assert ctx.stats()["n_evicted"] == 0
    ctx.decode(tokens[:60], seq_ids=2)
    left = recent(ctx, 0)  # of the oldest pages as many as were needed
    assert len(left) < PAGE
    assert left == list(range(60 - len(left), 60))
    assert [hot(ctx, seq) for seq in (1, 2)] == [window(60 + IDLE + 1), window(60)]
    assert hot(ctx, 0) == [0, 1, *left]  # sinks stay


def test_a_sequence_that_rests_goes_first_until_it_is_evaluated_again(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in (0, 1):
        ctx.decode(tokens[:60], seq_ids=seq)
    ctx.release_hot_rows(1)  # the one that was evaluated last
    assert hot(ctx, 1) == window(60)
    ctx.decode(tokens[:60], seq_ids=2)
    assert [hot(ctx, seq) for seq in (0, 2)] == [window(60)] * 2
    assert len(recent(ctx, 1)) < PAGE
    assert ctx.short_from(2) == -1
    ctx.rm(1)
    ctx.decode(tokens[:20], seq_ids=1)
    ctx.release_hot_rows(2)
    step(ctx, [2])  # it runs again
    ctx.decode(tokens[20:60], list(range(20, 60)), [[1]] * 40)
    assert recent(ctx, 2)[-PAGE:] == list(range(61 - PAGE, 61))


def test_a_sequence_that_wakes_keeps_its_rows_while_others_are_evaluated_before_it(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in (0, 1):
        ctx.decode(tokens[:60], seq_ids=seq)
        ctx.release_hot_rows(seq)
    ctx.hold_hot_rows(1)
    ctx.decode(tokens[:60], seq_ids=2)  # takes the pages of the one that still rests
    assert [hot(ctx, seq) for seq in (1, 2)] == [window(60)] * 2
    assert len(recent(ctx, 0)) < PAGE


def test_sequences_that_all_run_share_alike_and_keep_their_latest_rows(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in range(6):
        ctx.decode(tokens[:60], seq_ids=seq)
    for i in range(100):
        step(ctx, range(6), i)
    for seq in range(6):
        assert hot(ctx, seq) == [0, 1, *range(160 - PAGE, 160)]
    # with three fewer there is a page more for each of the others
    for seq in (3, 4, 5):
        ctx.rm(seq)
    for i in range(40):
        step(ctx, range(3), i)
    for seq in range(3):
        n = len(recent(ctx, seq))
        assert PAGE <= n <= 2 * PAGE
        assert hot(ctx, seq) == [0, 1, *range(200 - n, 200)]


def test_who_finds_nothing_goes_without_and_the_others_keep_theirs(open_ctx) -> None:
    ctx = open_ctx(
        "llama-64", KV.with_(budget=64), **{**SIX, "n_seq_max": 8}
    )  # six pages of 8: a whole window
    for seq in range(8):
        ctx.decode(tokens[:60], seq_ids=seq)
    for i in range(50):
        step(ctx, range(8), i)
    for seq in range(8):
        assert hot(ctx, seq) == [0, 1, *(range(102, 110) if seq < 6 else ())]


def test_sinks_are_never_given_up(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV.with_(budget=64), **SIX)
    random = np.random.default_rng(3)
    for _ in range(120):
        seq = int(random.integers(0, 6))
        if ctx.pos_max(seq) > 120:
            ctx.rm(seq)
        ctx.decode(tokens[: int(random.integers(1, 40))], seq_ids=seq)
        for other in range(6):
            assert hot(ctx, other)[:2] == [0, 1][: ctx.pos_max(other) + 1]


# --- what attention reads, and what is said of it ---


def follow(ctx: Ctx, oracle: Oracle) -> None:
    """The oracle's F16 copies are those that the cache holds."""
    held = {(seq, p) for seq in range(ctx.n_seq_max) for p in hot(ctx, seq)}
    for row in oracle.streams[0]:
        row.held = any((seq, row.pos) in held for seq in row.seqs)


def test_attention_reads_what_is_held_and_the_rest_cold(open_pair, attention: str) -> None:
    ctx, oracle = open_pair("llama-64", 0, KV.with_(attention=attention), **SIX)
    random = np.random.default_rng(4)
    for i in range(60):
        follow(ctx, oracle)
        act = random.random()
        seq, other = (int(x) for x in random.choice(6, 2, replace=False))
        if oracle.pos_max(seq) > 150 or act < 0.05:
            for side in (ctx, oracle):
                side.rm(seq)
        elif act < 0.1 and oracle.pos_max(seq) >= 0:
            for side in (ctx, oracle):
                side.rm(other)
                side.cp(seq, other)
        elif act < 0.4:
            assert_same(ctx, oracle, tokens[40 * i : 40 * i + int(random.integers(2, 60))], seq_ids=seq)
        else:
            running = [seq for seq in range(6) if oracle.pos_max(seq) >= 0] or [seq]
            positions = [oracle.pos_max(seq) + 1 for seq in running]
            assert_same(ctx, oracle, tokens[i : i + len(running)], positions, [[seq] for seq in running])
    assert ctx.stats()["n_evicted"] > 100


def test_what_is_not_said_to_be_short_is_what_a_sequence_alone_has(open_pair, attention: str) -> None:
    """A twin with a window for every sequence does the same, drafts that are rejected included."""
    kv = KV.with_(attention=attention)
    ctx, twin = (open_pair("llama-64", 0, k, **SIX)[0] for k in (kv, kv.with_(budget=2**32 - 1)))
    random = np.random.default_rng(5)
    told, short = 0, []
    near = 2 * tolerance(kv)  # sums in another order
    for i in range(250):
        seq = int(random.integers(0, 6)) if random.random() < 0.4 else i // 40 % 6
        if twin.pos_max(seq) > 130:
            for side in (ctx, twin):
                side.rm(seq)
        n = int(random.choice([1, 1, 1, 4, 30]))
        first = twin.pos_max(seq) + 1
        whole = ctx.window_is_whole(seq, first)
        assert whole == {w for w in window_at(first) if w < first}.issubset(held(ctx, seq))
        mine, theirs = (side.decode(tokens[i : i + n], first, seq) for side in (ctx, twin))
        at = ctx.short_from(seq)
        assert twin.short_from(seq) == -1
        if not whole:
            assert 0 <= at <= first
        for p, (a, b) in enumerate(zip(mine, theirs, strict=True), first):
            if at < 0 or p < at:
                told += 1
                assert rel_rms(a, b) < near
            else:
                short.append(rel_rms(a, b))
        if random.random() < 0.2 and n <= 4 and first > 0:
            for side in (ctx, twin):
                side.rm(seq, first)
    assert told > 100
    assert len(short) > 100
    assert max(short) > 2 * near


def window_at(q: int) -> list[int]:
    return [p for p in range(q) if KV.is_hot(q, p)]


def held(ctx: Ctx, seq: int) -> set[int]:
    """Positions whose F16 row is there for the next query, which reads a part of what the last one did."""
    return set(hot(ctx, seq))


def test_a_sequence_that_begins_anew_is_exact_again(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in range(6):
        ctx.decode(tokens[:60], seq_ids=seq)
    step(ctx, range(6))
    assert [ctx.short_from(seq) for seq in range(6)] == [60] * 6
    ctx.rm(0, 60)
    assert ctx.short_from(0) == -1
    step(ctx, [0])
    assert ctx.short_from(0) == 60
    ctx.rm(0)
    for i in range(30):
        step(ctx, [0], i)
    assert ctx.short_from(0) == (-1 if ctx.window_is_whole(0) else PAGE + KV.sinks + 1)


def test_copies_and_moves_take_what_is_known_along(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in range(6):
        ctx.decode(tokens[:60], seq_ids=seq)
    step(ctx, range(6))
    ctx.rm(1)
    ctx.cp(0, 1, 0, 50)
    assert ctx.short_from(1) == -1
    assert not ctx.window_is_whole(1)
    step(ctx, [1])
    assert ctx.short_from(1) == 50
    ctx.rm(2)
    ctx.cp(0, 2)
    assert ctx.short_from(2) == 60
    ctx.rm(0, 10, 20)
    ctx.add(0, 20, 61, -10)
    assert 0 <= ctx.short_from(0) <= 50


# --- steps that fail, states and blocks ---


@pytest.mark.parametrize("n_calls", [0, 5, 20])
@pytest.mark.parametrize("n", [1, 50])
def test_a_step_that_fails_takes_no_rows(open_ctx, attention: str, n: int, n_calls: int) -> None:
    kv = KV.with_(attention=attention)
    ctx, twin = (open_ctx("llama-64", kv, **SIX) for _ in range(2))
    for side in (ctx, twin):
        for seq in range(6):
            side.decode(tokens[:60], seq_ids=seq)
    before, saved, stats = ctx.sequences(), ctx.save(), ctx.stats()
    ctx.abort_after(n_calls)
    with pytest.raises(DecodeError):
        ctx.decode(tokens[100 : 100 + n], seq_ids=5)
    ctx.abort_after(None)
    assert (ctx.sequences(), ctx.save(), ctx.stats()) == (before, saved, stats)
    for i in range(20):
        assert np.array_equal(*(step(side, [5, 3, 0], i) for side in (ctx, twin)))


def test_a_state_brings_the_rows_back(open_ctx, attention: str) -> None:
    kv = KV.with_(attention=attention)
    ctx, other = (open_ctx("llama-64", kv, **SIX) for _ in range(2))
    for seq in range(6):
        ctx.decode(tokens[:60], seq_ids=seq)
    for i in range(25):
        step(ctx, range(5), i)
    assert other.load(ctx.save())
    for seq in range(6):
        assert hot(other, seq) == hot(ctx, seq)
        assert other.window_is_whole(seq) == ctx.window_is_whole(seq)
    for _ in range(3):  # cells lie elsewhere, and so sums are formed in another order
        assert worst(*(step(side, range(6)) for side in (ctx, other))) < tolerance(kv)
        assert [hot(other, seq) for seq in range(6)] == [hot(ctx, seq) for seq in range(6)]


@pytest.mark.parametrize("how", ["state", "block"])
def test_a_sequence_that_comes_back_takes_its_share(open_ctx, how: str) -> None:
    ctx = open_ctx("llama-64", KV, **SIX)
    for seq in range(4):
        ctx.decode(tokens[:60], seq_ids=seq)
    whole = open_ctx("llama-64", KV.with_(budget=2**32 - 1), **SIX)
    whole.decode(tokens[:60])
    if how == "state":
        assert ctx.load_seq(whole.save_seq(), 4)
    else:
        ctx.put(whole.export(), 4)
    n = len(recent(ctx, 4))
    assert hot(ctx, 4) == [0, 1, *range(60 - n, 60)]
    assert n > 0
    assert ctx.window_is_whole(4) == (hot(ctx, 4) == window(60))
    if not ctx.window_is_whole(4):
        step(ctx, [4])
        assert ctx.short_from(4) == 60
    rows, _, flags = ctx.rows(1, "k", 4, p1=60)
    want, _, at = whole.rows(1, "k")
    both = flags & at
    assert np.array_equal(rows[both], want[both])


@pytest.mark.parametrize("how", ["state", "block"])
def test_alone_it_is_back_to_the_bit(open_ctx, attention: str, how: str) -> None:
    ctx, twin = (open_ctx("llama-64", KV.with_(attention=attention), **SIX) for _ in range(2))
    for side in (ctx, twin):
        side.decode(tokens[:150], seq_ids=2)
    if how == "state":
        data = ctx.save_seq(2)
        ctx.rm(2)
        assert ctx.load_seq(data, 2)
    else:
        groups = ctx.export(2)
        ctx.rm(2)
        ctx.put(groups, 2)
    for i in range(40):
        assert np.array_equal(*(step(side, [2], i) for side in (ctx, twin)))


# --- what a `Llama` says ---


def test_exact_tokens_know_of_other_sequences() -> None:
    kv = "mixed:threshold=32,group=8,sinks=2"
    with (
        hidden(hot_budget="80"),
        Llama(
            model_path(), kv=kv, n_ctx=1024, n_seq_max=6, kv_unified=True, n_threads=1, verbose=False
        ) as llm,
    ):
        llm.eval(tokens[:60])
        assert llm.kv.exact_tokens == 60
        block = llm.kv.export()
        for seq in range(1, 6):
            llm.kv.load(block, seq)
        assert not llm.kv.holds(0, 60)
        llm.eval(tokens[60:70])
        assert llm.kv.exact_tokens == 60
        stats = llm.kv.stats()
        assert stats.sequences[0].short_from == 60
        assert stats.hot_evicted > 0
        assert "room for 80 F16 tokens" in str(stats)
        assert "window not whole at 60" in str(stats)
        llm.kv.clear()
        llm.eval(tokens[:100])
        assert llm.kv.exact_tokens == 100


def test_rows_of_a_default_budget() -> None:
    config = _core.CacheConfig(threshold=32, group_size=16, sink_tokens=4, n_draft=16)
    assert _core.count_ring_rows(config, 16, 8192, 45, 160)[0] == 520
