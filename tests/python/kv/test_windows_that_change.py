"""Windows that change while the cache lives: a smaller one lets rows go, a wider one fills from new tokens
alone, where the ring has room.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.native.memory import own_memory
from support.cache.checks import assert_same, check_books, check_rows
from support.cache.harness import Mixed, prompt

pytestmark = pytest.mark.full

KV = Mixed(threshold=48, group=8, sinks=4)
WIDE = "mixed:threshold=4096,group=32"
MIB = 1 << 20
tokens = prompt(400, seed=8)


def start(open_pair, attention: str = "auto", **options):
    pair = ctx, oracle = open_pair("llama-64", 1, KV.with_(attention=attention), **options)
    assert_same(ctx, oracle, tokens[:100])
    return pair


def set_window(pair, *window: int) -> None:
    for side in pair:
        side.set_window(*window)


@pytest.mark.core
def test_smaller_then_wider(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    set_window(pair, 16, 4, 2)
    check_books(ctx, oracle)
    assert ctx.stats()["threshold"] == 16
    assert ctx.stats()["threshold_capacity"] == 50  # two sinks less
    set_window(pair, 48, 8, 4)
    check_books(ctx, oracle)
    hot = ctx.rows(1, "k")[2]
    kept = KV.with_(threshold=16, group=4, sinks=2)
    assert hot.tolist() == [kept.is_hot(99, p) for p in range(100)], "rows came back that had been let go"
    for i in range(6):
        assert_same(ctx, oracle, tokens[100 + 10 * i : 110 + 10 * i])
        check_books(ctx, oracle)
    assert (
        ctx.rows(1, "k")[2].sum() == sum(KV.is_hot(159, p) for p in range(160)) - 2
    )  # two sinks are gone for good
    check_rows(ctx, oracle)


@pytest.mark.core
def test_closed_and_opened_again(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention)
    set_window(pair, 0, 1, 0)
    assert ctx.stats()["n_cells_hot"] == 0
    assert_same(ctx, oracle, tokens[100:130])
    assert ctx.stats()["n_cells_hot"] == 0
    set_window(pair, 32, 8, 4)
    assert_same(ctx, oracle, tokens[130:150])
    assert ctx.rows(1, "k")[2].tolist() == [p >= 130 for p in range(150)]
    check_books(ctx, oracle)
    check_rows(ctx, oracle)


@pytest.mark.core
def test_several_sequences(open_pair, attention: str) -> None:
    pair = ctx, oracle = start(open_pair, attention, n_seq_max=2, unified=True)
    for side in pair:
        side.cp(0, 1)
    assert_same(ctx, oracle, tokens[200:260], seq_ids=1)
    set_window(pair, 24, 8, 0)
    check_books(ctx, oracle)
    for seq in (0, 1):
        assert_same(ctx, oracle, tokens[100:120], seq_ids=seq)
        check_books(ctx, oracle)


@pytest.mark.core
@pytest.mark.parametrize(
    ("window", "word"),
    [
        ((2**31, 8, 4), "quantization_threshold"),
        ((16, 0, 4), "group_size"),
        ((16, 17, 4), "group_size"),
        ((48, 8, 2**31), "sink_tokens"),
    ],
)
def test_wrong_windows_are_refused_and_change_nothing(
    open_pair, window: tuple[int, int, int], word: str
) -> None:
    ctx, oracle = start(open_pair)
    before = ctx.stats()
    with pytest.raises(ValueError, match=word):
        ctx.set_window(*window)
    assert ctx.stats() == before
    check_books(ctx, oracle)
    assert_same(ctx, oracle, tokens[100:110])


@pytest.mark.merged_nightly
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
def test_wider_than_at_first(open_pair, attention: str, unified: bool) -> None:
    """Where sequences share the ring, one of them can have more than its part."""
    kv = KV.with_(attention=attention)
    pair = ctx, oracle = open_pair("llama-64", 1, kv, n_seq_max=4, unified=unified)
    assert_same(ctx, oracle, tokens[:100], seq_ids=1)
    most = ctx.stats()["threshold_capacity"]
    assert most > 2 * KV.threshold if unified else most == KV.threshold
    if not unified:
        return
    set_window(pair, 96, 8, 4)
    check_books(ctx, oracle)
    for i in range(4):
        assert_same(ctx, oracle, tokens[100 + 30 * i : 130 + 30 * i], seq_ids=1)
        check_books(ctx, oracle)
    check_rows(ctx, oracle, seq=1)
    assert ctx.rows(1, "k", 1)[2].sum() > 80
    assert ctx.stats()["hot_shared"]
    set_window(pair, 48, 8, 4)
    assert not ctx.stats()["hot_shared"]
    for seq in (0, 1):
        assert_same(ctx, oracle, tokens[300:340], seq_ids=seq)
        check_books(ctx, oracle)


@pytest.mark.merged_nightly
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-64", {}), ("llama-64", {"n_seq_max": 3, "unified": True}), ("gemma2", {"n_seq_max": 2})],
)
def test_wider_than_the_ring(open_pair, attention: str, options: dict, name: str) -> None:
    """Rows go along into a larger one, in every sequence, and what is evaluated next sees all of them."""
    pair = ctx, oracle = open_pair(name, 1, KV.with_(attention=attention), **options)
    last, rows = options.get("n_seq_max", 1) - 1, ctx.stats()["ring_rows"]
    for seq in (0, last):
        assert_same(ctx, oracle, tokens[:100], seq_ids=seq)
    for threshold, sinks in ((200, 4), (201, 4), (320, 6), (8, 4), (320, 4)):
        set_window(pair, threshold, 8, sinks)
        check_books(ctx, oracle)
        for i, seq in enumerate((0, last)):
            check_rows(ctx, oracle, seq)
            assert_same(ctx, oracle, tokens[100 + i : 117 + i], seq_ids=seq)
            assert_same(ctx, oracle, tokens[117:118], seq_ids=seq)
        check_books(ctx, oracle)
    stats = ctx.stats()
    assert stats["ring_rows"] > max(rows, min(320, stats["n_ctx_seq"]))


def test_a_window_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Llama(model_path(), n_ctx=4096, kv="mixed", verbose=False) as llm:
        llm.eval([*range(300)])
        before, bytes_hot = llm.kv.config, llm.kv.stats().bytes_hot
        monkeypatch.setattr("mixedkv.kv.window.memory_room", lambda: MIB)
        with pytest.raises(
            MemoryError, match=r"quantization_threshold=4000 takes .* F16 rows, and 1.* of memory are left"
        ):
            llm.kv.quantization_threshold = 4000
        assert (llm.kv.config, llm.kv.stats().bytes_hot) == (before, bytes_hot)
        monkeypatch.undo()
        llm.kv.quantization_threshold = 128
        assert llm.kv.stats().bytes_hot > bytes_hot
        llm.eval([*range(300)])
        assert llm.kv.layer(0).hot().sum() > 128 - 32


def test_a_cache_without_rows_stays_without() -> None:
    kv = "mixed:threshold=0,group=1,sinks=0"
    with (
        Llama(model_path(), n_ctx=512, kv=kv, verbose=False) as llm,
        pytest.raises(ValueError, match="made without F16 rows"),
    ):
        llm.kv.quantization_threshold = 64


@pytest.mark.merged_nightly
@pytest.mark.parametrize("options", [{}, {"n_seq_max": 3, "unified": True}, {"n_seq_max": 2}], ids=str)
def test_rows_move_with_the_window(open_pair, attention: str, options: dict) -> None:
    pair = ctx, oracle = open_pair("llama-64", 1, KV.with_(attention=attention), **options)
    last = options.get("n_seq_max", 1) - 1
    for seq in (0, last):
        assert_same(ctx, oracle, tokens[:100], seq_ids=seq)
    for window in ((48, 1, 4), (16, 8, 4), (0, 1, 4), (0, 1, 0), (24, 8, 2), (48, 8, 4)):
        set_window(pair, *window)
        check_books(ctx, oracle)
        for seq in (0, last):
            check_rows(ctx, oracle, seq)
            assert_same(ctx, oracle, tokens[100:113], seq_ids=seq)
        check_books(ctx, oracle)


# --- memory ---


@pytest.fixture
def llm() -> Iterator[Llama]:
    with Llama(model_path(), kv=WIDE, n_ctx=8192, n_threads=1, verbose=False) as llm:
        llm.eval(tokens[:300])
        yield llm


def test_memory_goes_back_and_comes_again(llm: Llama) -> None:
    before, allocated = own_memory(), llm.kv.stats().bytes_hot
    llm.kv.quantization_threshold = 256
    back = llm.kv.stats().bytes_given_back
    assert back > 0.9 * allocated
    assert llm.kv.stats().bytes_hot == allocated - back
    assert before - own_memory() > 0.7 * back
    llm.kv.quantization_threshold = 4096
    assert llm.kv.stats().bytes_given_back == 0
    llm.eval(tokens[:10])
