"""Parts of the server that need no model: text, pace, sequences, settings, keys."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixedkv.config import UniformKV
from mixedkv.engine.detokenizer import TextStream
from mixedkv.engine.job import Job
from mixedkv.engine.pacing import Pace, share
from mixedkv.engine.sequences import NO_MATCH, Sequence, SequencePool
from mixedkv.errors import ClosedError, ContextLengthError, QueueFullError
from mixedkv.hot_window import HotWindow
from mixedkv.server.api_error import ApiError
from mixedkv.server.http.auth import Keys
from mixedkv.server.pending import PendingRequest
from mixedkv.server.settings import ServerSettings, load_settings
from mixedkv.server.snapshot import of_tenant
from support.server_support import key_file

# --- text ---


@given(
    st.text(alphabet="ab\u00e9\U0001f600", max_size=30),
    st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_does_not_depend_on_where_tokens_end(text: str, stops: list[str], data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=10)))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    stream, released = TextStream(stops), []
    for piece in pieces:
        released.append(stream.feed(piece))
        if stream.stopped:
            break
    released.append(stream.finish())
    # the first stop string to be complete ends the text; of those complete at the same byte, the earliest
    ends = [encoded[:i].decode(errors="ignore") for i in cuts] + [text]
    expected = text
    for prefix in ends:
        found = [prefix.find(stop) for stop in stops if stop in prefix]
        if found:
            expected = prefix[: min(found)]
            break
    assert "".join(released) == expected


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(["STOP"])
    assert [stream.feed(piece) for piece in (b"a ST", b"AR ST", b"O")] == ["a ", "STAR ", ""]
    assert stream.finish() == "STO"


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    stream = TextStream()
    assert stream.feed(b"a\xf0\x9f") == "a"
    assert stream.finish() == "\ufffd"


# --- pace ---


@pytest.mark.parametrize("token_s", [0.0001, 0.001])
def test_the_slice_of_prompts_settles_where_steps_are_as_slow_as_they_may_be(token_s: float) -> None:
    pace = Pace(n_batch=512, slowdown=2.0)
    assert pace.budget(0) == 512
    slices = []
    for _ in range(1000):
        n = pace.budget(4)
        pace.observe(4, n, 0.010 + n * token_s)
        slices.append(n)
    wanted = 0.010 / token_s
    settled = [n for n in slices[500:] if n]
    assert 0.7 * wanted < sum(settled) / len(settled) < 1.2 * wanted
    assert 0.01 < slices.count(0) / len(slices) < 0.05  # to know what a step takes without prompts


def test_prompts_always_get_on() -> None:
    pace = Pace(n_batch=512, slowdown=1.1)
    slices = []
    for _ in range(600):
        slices.append(n := pace.budget(4))
        pace.observe(4, n, 0.01 + n)
    assert sum(slices[-40:]) == 10  # one token in every fourth step


@given(st.integers(1, 600), st.lists(st.integers(1, 900), max_size=8))
def test_the_budget_is_shared_out(budget: int, remaining: list[int]) -> None:
    given_ = share(budget, remaining)
    assert sum(given_) == min(budget, sum(remaining))
    assert all(0 <= g <= r for g, r in zip(given_, remaining, strict=True))
    if remaining:
        assert given_[0] >= min(remaining[0], budget // 2)


def test_prompts_of_one_length_take_turns_and_short_ones_do_not_wait() -> None:
    assert share(100, [500, 500, 500]) == [100, 0, 0]
    assert share(100, [50, 500, 500]) == [50, 50, 0]
    assert share(100, [500, 900, 30]) == [70, 0, 30]
    assert share(100, [500, 80, 30]) == [50, 20, 30]


def test_more_streams_may_take_longer() -> None:
    """The measure is what a step takes without prompts for as many streams as there are now."""
    pace = Pace(n_batch=512, slowdown=2.0)
    for n_streams in [1] * 200 + [8] * 400:
        n = pace.budget(n_streams)
        pace.observe(n_streams, n, 0.001 * n_streams + n * 0.0001)
    assert 0.7 * 80 < sum(pace.budget(8) for _ in range(100)) / 100 < 1.2 * 80


def test_more_prompts_than_streams_get_more() -> None:
    """Whose first token does not come waits as well: three prompts beside a stream get thrice as much."""
    pace = Pace(n_batch=512, slowdown=2.0)
    slices: dict[int, list[int]] = {1: [], 3: []}
    for step in range(2000):
        n_prompts = 1 if step % 2 else 3
        slices[n_prompts].append(n := pace.budget(1, n_prompts))
        pace.observe(1, n, 0.010 + n * 0.001)
    settled = {n_prompts: np.median(given[500:]) for n_prompts, given in slices.items()}
    assert 2.5 < settled[3] / settled[1] < 3.5


# --- sequences ---


class FakeMemory:
    """Rows as sets of sequence ids, as a unified cache has them."""

    used = 0

    def __init__(self, can_cut: bool) -> None:
        self.can_cut = can_cut
        self.calls: list[tuple[object, ...]] = []

    def remove(self, seq: int, p0: int = 0) -> None:
        self.calls.append(("rm", seq, p0))

    def copy(self, source: int, target: int, p0: int = 0, p1: int = -1) -> None:
        self.calls.append(("cp", source, target, p1))


F16 = UniformKV().window


def make_pool(
    n: int = 3, window: HotWindow = F16, *, can_cut: bool = True, **options: bool
) -> tuple[SequencePool, FakeMemory]:
    memory = FakeMemory(can_cut)
    return SequencePool(memory, n, window, **options), memory


def tokens(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int32)


def run(
    pool: SequencePool, prompt: np.ndarray, tenant: str = "", release: bool = True, keep: bool = False
) -> Sequence:
    """A job on a prompt, all of it evaluated."""
    seq = pool.acquire(tenant, pool.match(tenant, prompt))
    assert seq is not None
    seq.tokens.extend(prompt[len(seq.tokens) :].tolist())
    if release:
        pool.release(seq, keep)
    return seq


def test_an_idle_sequence_is_continued() -> None:
    pool, memory = make_pool()
    first = run(pool, tokens(0, 100))
    assert pool.match("", tokens(0, 150)).n == 100
    assert run(pool, tokens(0, 150)) is first
    assert memory.calls == []


def test_a_running_sequence_is_copied() -> None:
    pool, memory = make_pool()
    first = run(pool, tokens(0, 100), release=False)
    second = run(pool, np.r_[tokens(0, 60), tokens(500, 540)], release=False)
    assert second is not first
    assert memory.calls == [("cp", first.id, second.id, 60)]


def test_the_whole_prompt_is_never_taken() -> None:
    pool, _ = make_pool()
    run(pool, tokens(0, 100))
    assert pool.match("", tokens(0, 100)).n == 99


def test_a_kept_prefix_is_copied_and_leaves_last() -> None:
    pool, _ = make_pool(3)
    kept = run(pool, tokens(0, 50), keep=True)
    other = run(pool, tokens(1000, 1050))
    assert run(pool, tokens(0, 80)) is not kept
    assert [pool.evict() for _ in range(3)] == [True] * 3
    assert not pool.evict()
    assert not kept.tokens
    assert not other.tokens


def test_eviction_takes_what_was_used_the_longest_ago() -> None:
    pool, memory = make_pool(3)
    a, b, c = (run(pool, tokens(i * 1000, i * 1000 + 50)) for i in range(3))
    run(pool, tokens(0, 60))  # uses a again
    assert [seq.id for seq in pool.idle()] == [b.id, c.id, a.id]
    d = run(pool, tokens(9000, 9050))
    assert d is b
    assert memory.calls == [("rm", b.id, 0)]


def test_a_prefix_that_is_shared_is_in_use() -> None:
    pool, _ = make_pool(3)
    shared = run(pool, tokens(0, 100))
    other = run(pool, tokens(5000, 5050))
    run(pool, np.r_[tokens(0, 60), tokens(1000, 1040)])
    assert pool.idle()[0] is other
    assert shared.tokens


def test_a_snapshot_is_copied_again_and_again() -> None:
    """In a mixed cache it is the only sequence that still has the F16 rows at that length."""
    pool, memory = make_pool(4, HotWindow(32, 16, 4))
    first = run(pool, tokens(0, 50), release=False)
    pool.snapshot(first)
    first.tokens.extend(tokens(500, 600).tolist())
    pool.release(first)
    for start in (1000, 2000, 3000):
        memory.calls.clear()
        assert run(pool, np.r_[tokens(0, 50), tokens(start, start + 60)]).id != 1
        assert memory.calls[-1][:2] == ("cp", 1)
        assert pool.held()[1].tokens.tolist() == list(range(50))


def test_nothing_is_found_of_another_tenant() -> None:
    pool, _ = make_pool()
    run(pool, tokens(0, 100), tenant="a")
    assert pool.match("b", tokens(0, 100)) == NO_MATCH
    assert pool.match("", tokens(0, 100)) == NO_MATCH


def test_all_running_is_no_place() -> None:
    pool, _ = make_pool(2)
    for i in range(2):
        run(pool, tokens(i * 1000, i * 1000 + 50), release=False)
    assert pool.acquire("", NO_MATCH) is None


def test_a_memory_that_cannot_be_cut_shares_whole_sequences_only() -> None:
    pool, _ = make_pool(can_cut=False)
    run(pool, tokens(0, 100))
    assert pool.match("", tokens(0, 90)).n == 0
    assert pool.match("", tokens(0, 101)).n == 100


def test_a_forgotten_session_leaves_nothing() -> None:
    pool, _ = make_pool()
    seq = run(pool, tokens(0, 100), tenant="a", release=False)
    pool.release(seq, keep=True, session="s")
    pool.forget("b", "s")
    assert pool.match("a", tokens(0, 100)).n == 99
    pool.forget("a", "s")
    assert pool.match("a", tokens(0, 100)).n == 0


def test_a_mixed_cache_is_cut_only_where_it_is_exact() -> None:
    window = HotWindow(32, 16, 4)
    pool, _ = make_pool(window=window)
    run(pool, tokens(0, 200))
    match = pool.match("", np.r_[tokens(0, 100), tokens(500, 600)])
    assert (match.n, match.approximate) == (0, 100)
    assert pool.match("", tokens(0, 300)).n == 200
    loose, _ = make_pool(window=window, exact_only=False)
    run(loose, tokens(0, 200))
    match = loose.match("", np.r_[tokens(0, 100), tokens(500, 600)])
    assert (match.n, match.exact) == (100, False)


# --- flights ---


class FullEngine:
    """Takes no job."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def submit_jobs(self, jobs: list[Job]) -> None:
        raise self.error("no")


@pytest.mark.parametrize(
    ("error", "status"), [(QueueFullError, 429), (ClosedError, 503), (ContextLengthError, 400)]
)
def test_a_refused_request_leaves_nothing_in_memory(error: type[Exception], status: int) -> None:
    """Not even until its time would have been over: thousands may be refused in that time."""

    async def refuse() -> None:
        job = Job([1, 2, 3], max_tokens=0, sampler=None)
        left = weakref.ref(job)
        pending = PendingRequest(FullEngine(error), [job], 600)  # type: ignore[arg-type]
        with pytest.raises(ApiError) as caught:
            pending.__enter__()
        assert caught.value.status == status
        del job, pending, caught
        gc.collect()
        assert left() is None

    asyncio.run(refuse())


# --- statistics ---


def test_a_tenants_latency_is_that_of_its_own_requests() -> None:
    recent = [
        {"tenant": tenant, "ttft_seconds": seconds, "itl_seconds": None}
        for tenant, seconds in [("ben", 9.0), *(("anna", float(i)) for i in range(1, 101)), ("anna", None)]
    ]
    now = of_tenant({"sequences": [{"tenant": "ben", "id": 1}], "recent": recent}, "anna")
    assert now["sequences"] == []
    assert now["latency"]["ttft"] == {"count": 100, "median_seconds": 50.5, "p95_seconds": 95.0}
    assert now["latency"]["itl"] == {"count": 0, "median_seconds": None, "p95_seconds": None}
    assert len(now["recent"]) == 50
    assert "tenant" not in now["recent"][0]


# --- settings and keys ---


def test_the_command_line_comes_before_the_environment_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('n-ctx = 100\nparallel = 3\nslowdown = 3\nkv = "q8_0"\n')
    environ = {"MIXEDKV_PARALLEL": "5", "MIXEDKV_KV": "f16", "MIXEDKV_OTHER": "x"}
    settings = load_settings({"kv": "q4_0"}, str(path), environ)
    assert (settings.n_ctx, settings.parallel, settings.slowdown, settings.kv) == (100, 5, 3.0, "q4_0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", "colour"),
        ("_env_file = 1", "unknown option '_env_file'"),
        ("port = 70000", "port"),
        ('port = "x"', "port"),
        ("a = [", "serve.toml"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_option(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_settings({}, str(path), {})


def test_a_bad_value_is_one_line_that_says_where_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("n-ctx = -1\nport = 70000\n")
    environ = {"MIXEDKV_PORT": "many", "MIXEDKV_EMBEDDINGS": "maybe"}
    with pytest.raises(ValueError, match="n_ctx") as caught:
        load_settings({"kv": "q3"}, str(path), environ)
    parts = str(caught.value).split("; ")
    assert parts[0].startswith("--kv='q3': ")
    assert parts[1:] == [
        f"{path}: n_ctx=-1: use at least 0",
        "MIXEDKV_EMBEDDINGS='maybe': use a valid boolean",
        "MIXEDKV_PORT='many': use a valid integer",
    ]


def test_the_environment_has_text_for_every_kind(tmp_path: Path) -> None:
    environ = {"MIXEDKV_SLOWDOWN": "3", "MIXEDKV_EMBEDDINGS": "on", "MIXEDKV_MODEL_NAME": "7"}
    settings = load_settings({}, None, environ)
    assert (settings.slowdown, settings.embeddings, settings.model_name) == (3.0, True, "7")


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"},
        {"host": "example.org"},
        {"parallel": 200, "idle_prefixes": 200},
        {"kv": "nonsense"},
        {"reuse": "some"},
        {"request_timeout": float("nan")},
        {"store_key_file": "k"},
    ],
)
def test_settings_that_cannot_stand_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ServerSettings(**options)


def test_a_public_address_needs_keys_or_a_word() -> None:
    assert ServerSettings(host="0.0.0.0", allow_no_keys=True).host
    assert ServerSettings(host="0.0.0.0", api_key_file="keys").host
    for host in ("127.0.0.1", "localhost", "::1"):
        assert ServerSettings(host=host).host == host


def test_keys_name_tenants(tmp_path: Path) -> None:
    keys = Keys.load(str(key_file(tmp_path, "# ours", "anna:0123456789abcdef", "", "ben:fedcba9876543210")))
    assert keys.tenant("Bearer 0123456789abcdef") == "anna"
    assert keys.tenant("bearer fedcba9876543210") == "ben"
    for header in (None, "", "Bearer", "Bearer x", "Basic 0123456789abcdef", "Bearer 0123456789abcde\xe9"):
        assert keys.tenant(header) is None
    assert Keys().tenant(None) == ""


@pytest.mark.parametrize(
    ("line", "mode"),
    [
        ("anna:0123456789abcdef", 0o644),
        ("anna", 0o600),
        ("anna:short", 0o600),
        ("a b:0123456789abcdef", 0o600),
        ("a..b:0123456789abcdef", 0o600),
        ("an\u00e9:0123456789abcdef", 0o600),
        ("anna:0123456789 abcdef", 0o600),
        ("anna:0123456789abcdef\nben:0123456789abcdef", 0o600),
        ("", 0o600),
    ],
)
def test_a_bad_key_file_is_refused(tmp_path: Path, line: str, mode: int) -> None:
    with pytest.raises(ValueError, match="keys") as caught:
        Keys.load(str(key_file(tmp_path, line, mode=mode)))
    assert "0123456789abcdef" not in str(caught.value)
