"""Windows that change while the cache lives: wider where the ring has room, shorter while memory is short."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.kv.relief import Memory
from mixedkv.native.memory import Room, own_memory
from support.checks import TOL_FUSED, assert_same, check_books, check_rows, distances
from support.harness import Mixed, prompt
from support.patience import PATIENCE
from support.server_support import Direct

KV = Mixed(threshold=48, group=8, sinks=4)
WIDE = "mixed:threshold=4096,group=32,hot_budget=all,shrink=true"
MIB = 1 << 20
tokens = prompt(400, seed=8)


def set_window(pair, *window: int) -> None:
    for side in pair:
        side.set_window(*window)


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
        monkeypatch.setattr("mixedkv.kv.window_settings.memory_room", lambda: MIB)
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


@pytest.mark.parametrize("options", [{}, {"n_seq_max": 3, "unified": True}, {"n_seq_max": 2}], ids=str)
def test_rows_move_with_the_window(open_pair, attention: str, options: dict) -> None:
    pair = ctx, oracle = open_pair("llama-64", 1, KV.with_(attention=attention), **options)
    last = options.get("n_seq_max", 1) - 1
    for seq in (0, last):
        assert_same(ctx, oracle, tokens[:100], seq_ids=seq)
    for window in ((16, 8, 4), (0, 1, 4), (0, 1, 0), (24, 8, 2), (48, 8, 4)):
        set_window(pair, *window)
        check_books(ctx, oracle)
        for seq in (0, last):
            check_rows(ctx, oracle, seq)
            assert_same(ctx, oracle, tokens[100:113], seq_ids=seq)
        check_books(ctx, oracle)


def test_a_limit_is_a_shorter_window_that_says_so(open_pair, attention: str) -> None:
    ctx, oracle = open_pair("llama-64", 1, KV.with_(attention=attention))
    assert_same(ctx, oracle, tokens[:100])
    ctx.limit_window(16)
    oracle.set_window(16, 8, 4)
    check_books(ctx, oracle)
    assert (ctx.stats()["threshold"], ctx.stats()["threshold_now"]) == (48, 16)
    assert ctx.short_from() == -1
    assert not ctx.window_is_whole()
    assert_same(ctx, oracle, tokens[100:140])
    assert ctx.short_from() == 100
    ctx.limit_window(0)
    oracle.set_window(0, 1, 4)
    assert_same(ctx, oracle, tokens[140:160])
    check_books(ctx, oracle)
    ctx.limit_window(2**32 - 1)
    oracle.set_window(48, 8, 4)
    for i in range(6):
        assert_same(ctx, oracle, tokens[160 + 10 * i : 170 + 10 * i])
        check_books(ctx, oracle)
    check_rows(ctx, oracle)
    assert ctx.window_is_whole()
    assert ctx.short_from() == 100  # its rows are what they are
    ctx.clear()
    assert ctx.short_from() == -1
    ctx.limit_window(16)
    ctx.decode(tokens[:16])
    assert ctx.short_from() == -1  # no row is missing yet
    ctx.decode(tokens[16:18])
    assert ctx.short_from() == 16


@pytest.mark.parametrize("name", ["gemma2", "deepseek2"])
def test_a_limit_reaches_every_cache_of_a_model(open_ctx, name: str) -> None:
    limited, short = open_ctx(name, KV), open_ctx(name, KV.with_(threshold=16))
    limited.limit_window(16)
    for i in range(3):
        logits = [side.decode(tokens[40 * i : 40 * i + 40]) for side in (limited, short)]
        assert np.median(distances(*logits)) < TOL_FUSED


def test_a_state_saved_under_a_limit(open_ctx) -> None:
    ctx, other = (open_ctx("llama-64", KV) for _ in range(2))
    ctx.decode(tokens[:100])
    ctx.limit_window(16)
    ctx.decode(tokens[100:120])
    other.limit_window(16)
    other.load(ctx.save())
    for i in range(4):
        assert np.array_equal(*(side.decode(tokens[120 + i : 121 + i]) for side in (ctx, other)))
    other.limit_window(2**32 - 1)
    other.load(ctx.save())
    assert not other.window_is_whole()


def test_an_aborted_step_under_a_limit(open_ctx) -> None:
    ctx, other = (open_ctx("llama-64", KV.with_(attention="fused")) for _ in range(2))
    for side in (ctx, other):
        side.decode(tokens[:100])
        side.limit_window(16)
    ctx.abort_after(3)
    with pytest.raises(RuntimeError):
        ctx.decode(tokens[200:230])
    ctx.abort_after(None)
    assert np.array_equal(*(side.decode(tokens[100:110]) for side in (ctx, other)))


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


def memory(mib: int, stall: float = 0) -> Memory:
    return Memory([Room(900 * MIB, 1024 * MIB), Room(mib * MIB, 256 * MIB)], stall)


def test_the_window_follows_memory(llm: Llama, caplog: pytest.LogCaptureFixture) -> None:
    relief = llm.kv.relief
    assert relief is not None
    now = itertools.count(10**9)
    relief.clock = lambda: next(now)  # every evaluation looks
    caplog.set_level(logging.INFO, "mixedkv.kv")

    def steps(n: int, *seen: Memory) -> list[int]:
        windows = []
        for each in itertools.islice(itertools.cycle(seen), n):
            relief.look = lambda each=each: each
            llm.eval([5])
            windows.append(llm.kv.stats().window_now)
        return windows

    assert steps(2, memory(20)) == [4096, 4096]
    assert llm.kv.exact_tokens == llm.n_tokens == 302
    assert steps(4, memory(15)) == [2048, 1024, 512, 256]
    assert steps(3, memory(200, stall=11)) == [128, 64, 32]
    assert (llm.kv.exact_tokens, llm.n_tokens) == (305, 309)  # the fourth step let rows go
    assert llm.kv.config.window.threshold == 4096
    stats = llm.kv.stats()
    assert "window 32 of 4096, group 32" in str(stats)
    assert "given back)" in str(stats)
    assert "(15.0 MiB of 256.0 MiB left, 0% waiting): the F16 window is 2048 of 4096 tokens" in caplog.text
    assert steps(9, memory(200), memory(20))[-1] == 32  # not while it goes to and fro
    assert steps(10, memory(200)) == [32] * 3 + [64] * 5 + [128] * 2
    assert "the F16 window is 64 tokens again" in caplog.text
    for _ in range(5):
        steps(5, memory(200))
    assert llm.kv.stats().window_now == 4096
    assert llm.kv.exact_tokens == 305
    llm.reset()
    assert steps(1, memory(200)) == [4096]
    assert llm.kv.exact_tokens == 1


def test_a_step_that_brings_nothing_is_taken_back() -> None:
    kv = "mixed:threshold=8,group=8,draft=0,shrink=true"
    with Llama(model_path(), kv=kv, n_ctx=512, n_threads=1, verbose=False) as llm:
        relief = llm.kv.relief
        assert relief is not None
        now = itertools.count()
        relief.clock, relief.look = lambda: next(now), lambda: memory(1)
        for token in tokens[:20]:
            llm.eval([token])
        assert llm.kv.stats().window_now == 8
        assert llm.kv.exact_tokens == 20


def test_who_did_not_ask_keeps_the_window() -> None:
    with Llama(model_path(), kv="mixed", n_ctx=512, n_threads=1, verbose=False) as llm:
        assert llm.kv.relief is None


def test_engines_follow_memory_too() -> None:
    with Direct(kv="mixed:threshold=128,group=32,hot_budget=all,shrink=true") as direct:
        relief = direct.llm.kv.relief
        assert relief is not None
        pool = direct.engine.pool
        relief.look, relief.clock = lambda: memory(1), lambda: 1.0
        direct.answer(tokens[:20], max_tokens=1)
        assert direct.call(direct.llm.kv.stats).window_now == 64
        assert all(direct.call(lambda: [*map(pool.is_exact, pool.held())]))  # too short to miss a row
        direct.answer(tokens[:300], max_tokens=1)
        assert not all(direct.call(lambda: [*map(pool.is_exact, pool.held())]))


IN_A_GROUP = """
import itertools, json, sys
from pathlib import Path
group, limit, usage, cache, kv = Path(sys.argv[1]), *sys.argv[2:]
(group / "cgroup.procs").write_text("0")
import numpy as np
from mixedkv import Llama
from mixedkv.bundled import model_path
from mixedkv.kv.relief import Memory

ballast = np.ones(256 << 20, np.uint8)  # so that a sixteenth of all is room for the files that are mapped

def used():
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / usage).read_text()) - sum(int(stat[name]) for name in cache.split(","))

with Llama(model_path(), kv=kv, n_ctx=8192, n_threads=1, verbose=False) as llm:
    now = itertools.count()
    llm.kv.relief.clock = lambda: next(now)
    llm.kv.relief.look = lambda: Memory(stall=0.0)  # that of the machine is not of this test
    seen = []
    def step(n):
        for _ in range(n):
            llm.eval([5])
            stats = llm.kv.stats()
            seen.append((stats.window_now, stats.bytes_given_back, used()))
    step(2)
    (group / limit).write_text(str(used() * 106 // 100))
    step(4)
    (group / limit).write_text(str(used() * 2))
    step(6)
print(json.dumps(seen))
"""


@pytest.fixture
def group() -> Iterator[tuple[Path, list[str]]]:
    """A control group below that of the tests, and the names of its files."""
    v1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_active_file,total_inactive_file"]
    v2 = ["memory.max", "memory.current", "active_file,inactive_file"]
    kinds = {"": (Path("/sys/fs/cgroup"), v2), "memory": (Path("/sys/fs/cgroup/memory"), v1)}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root, names = kinds.get(controllers, (None, []))
        if root is None:
            continue
        folder = root / path.lstrip("/") / f"mixedkv-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / names[0]).exists():
                yield folder, names
                return
        finally:
            folder.rmdir()
    pytest.skip("no control group for memory can be made here")


def test_in_a_control_group(group: tuple[Path, list[str]]) -> None:
    """The kernel's own numbers: the window gets shorter until there is room below the limit, and grows."""
    folder, names = group
    command = [sys.executable, "-c", IN_A_GROUP, str(folder), *names, WIDE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    windows, back, used = zip(*json.loads(done.stdout), strict=True)
    assert windows[:2] == (4096, 4096)
    assert windows[5] < 4096
    assert windows[-1] > windows[5]
    assert used[1] - used[5] > 0.5 * back[5] > 0
