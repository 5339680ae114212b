"""A row says how it was computed: rows of another setting are never vouched for, on any way in."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mixedkv import KVBlock, Llama
from mixedkv.kv.row_setting import difference
from mixedkv.store import Identity, KVStore
from support.cache.row_settings import (
    ROUNDING,
    Settings,
    adapters_in,
    any_settings,
    furthest,
    opened,
    read_all,
    set_adapter,
    set_control,
)
from support.servers.remote import redis_server

pytestmark = pytest.mark.full

N = 300
MODELS = ("llama-64", "gemma3", "qwen3", "deepseek2", "phi", "qwen3moe")
Adapters = Callable[[int], str]


def tokens_of(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(N)]


def vouched(llm: Llama, block: KVBlock) -> int:
    """Load a block and return how many of its tokens are exact then."""
    again = KVBlock.from_arrays(block.describe(), block.to_arrays())
    try:
        llm.kv.load(again)
    except ValueError as error:
        if not any(word in str(error) for word in ("that this machine does not get", "swa_full")):
            raise
        return 0
    return llm.kv.exact_tokens


def cross(path: Path, adapters: Adapters | None, one: Settings, other: Settings, tokens: list[int]) -> str:
    """Move rows of one setting to another by memory and by a file: return what became of them."""
    with (
        opened(path, one, adapters) as a,
        opened(path, other, adapters) as b,
        opened(path, other, adapters) as c,
    ):
        a.eval(tokens)
        c.eval(tokens)
        n = vouched(b, a.kv.export(0, 0, N))
        same = furthest(read_all(a, N), read_all(c, N)) <= ROUNDING
        if n:
            rows = {name: each[:n] for name, each in read_all(c, N).items()}
            off = furthest({name: each[:n] for name, each in read_all(b, N).items()}, rows)
            assert off <= ROUNDING, f"{n} of {N} vouched for, off by {off:.3f}: {one} in {other}"
        with KVStore(None) as store:
            stored = store.save(b).n_tokens  # rows that came are not stored as its own
            assert stored == n
        b.kv.remove(0)
        with KVStore(None) as store:
            store.save(a)
            got = store.restore(b, tokens, exact_only=True)
        assert (got.n_tokens > 0) <= (a.kv.row_setting == c.kv.row_setting)
        if got.n_tokens:
            assert b.kv.exact(0, tokens[: got.n_tokens]) == got.n_tokens
            expected = {name: each[: got.n_tokens] for name, each in read_all(c, N).items()}
            assert furthest(read_all(b, got.n_tokens), expected) <= ROUNDING, f"{one} in {other}"
        if not n and same:
            return "same rows, not vouched for"
        return "vouched for" if n else "approximate"


def run_pairs(path: Path, adapters: Adapters | None, seed: int, n_pairs: int) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    for _ in range(n_pairs):
        one = any_settings(rng, adapters=adapters)
        # as often as not the other differs in one thing, or in nothing
        other = any_settings(rng, adapters=adapters)
        if rng.random() < 0.6:
            part = rng.choice(["kv", "options", "window", "adapter", "control", None])
            fields = {name: getattr(one, name) for name in ("kv", "options", "window", "adapter", "control")}
            other = Settings(**(fields | ({part: getattr(other, part)} if part else {})))
        try:
            counts[cross(path, adapters, one, other, tokens_of(rng.randrange(10**6)))] += 1
        except (ValueError, MemoryError, RuntimeError) as error:  # no context can be made so
            if not any(word in str(error) for word in _REFUSED):
                raise
            counts["refused"] += 1
    return counts


_REFUSED = (
    "packs",
    "flash attention",
    "must be the same",
    "budget",
    "not supported",
    "could not make a context",
    "smaller than group_size",
    "layers",
    "without F16 rows",
)


@pytest.mark.parametrize("model", MODELS)
def test_pairs(model: str, zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = zoo_path(model)
    adapters = adapters_in(tmp_path, path) if model in ("llama-64", "qwen3", "gemma3") else None
    counts = run_pairs(path, adapters, seed=MODELS.index(model), n_pairs=12)
    print(model, dict(counts))
    assert counts["vouched for"]
    assert counts["approximate"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("model", MODELS)
def test_many_pairs(model: str, seed: int, zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = zoo_path(model)
    adapters = adapters_in(tmp_path, path) if model in ("llama-64", "qwen3", "gemma3") else None
    print(model, seed, dict(run_pairs(path, adapters, seed=1000 + seed, n_pairs=40)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "qwen2.5-coder"])
def test_pairs_of_real_models(name: str, tmp_path: Path) -> None:
    from mixedkv.model.named_model import find_measured_model

    path = Path(find_measured_model(name))
    print(name, dict(run_pairs(path, adapters_in(tmp_path, path), seed=77, n_pairs=40)))


# --- what is written in two ways and computes the same rows ---

SAME = [
    ("mixed", "mixed:cold_k=q4_0,cold_v=q4_0,threshold=64,group=16,sinks=4", {}, {}),
    ("mixed", "mixed:compact", {}, {}),
    ("mixed", "mixed:attention=fused", {}, {}),
    ("mixed", "mixed:layers=0-:q4_0", {}, {}),
    ("f16", "f16", {}, {"rope_freq_base": 10000.0}),
    ("f16", "f16", {}, {"yarn_orig_ctx": 128}),
    ("f16", "f16", {}, {"kv_overrides": {"tokenizer.ggml.add_bos_token": False}}),
    ("f16", "f16", {}, {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-5}}),
    ("mixed", "mixed", {}, {"n_ctx": 2048, "n_threads": 2, "n_seq_max": 2, "kv_unified": True}),
    ("mixed:threshold=0,group=1,sinks=0", "mixed:threshold=0,group=8,sinks=0", {}, {}),
]


@pytest.mark.parametrize(("kv", "other", "options", "others"), SAME, ids=str)
def test_what_is_written_otherwise_is_shared(
    kv: str, other: str, options: dict, others: dict, zoo_path: Callable[[str], Path]
) -> None:
    path, tokens = zoo_path("llama-64"), tokens_of(1)
    with opened(path, Settings(kv, options)) as a, opened(path, Settings(other, others)) as b:
        assert a.kv.row_setting == b.kv.row_setting
        assert Identity.of(a) == Identity.of(b)
        a.eval(tokens)
        b.kv.load(a.kv.export())
        assert b.kv.exact_tokens == N


def test_a_budget_that_comes_to_the_same_types_is_shared(zoo_path: Callable[[str], Path]) -> None:
    path = zoo_path("llama-64")
    with opened(path, Settings("mixed:budget=8.5bit")) as a:
        layers = a.kv.layers
        types = ",".join(f"{y.il}:{y.type_k}/{y.type_v}" for y in layers)
        with opened(path, Settings(f"mixed:layers={types}")) as b:
            assert difference(a.kv.row_setting, b.kv.row_setting) == ""


# --- live settings ---


def test_a_window_that_is_set_to_none_is_not_one_that_never_was(zoo_path: Callable[[str], Path]) -> None:
    """Beside F16 rows the scales of cold rows are those of least error."""
    tokens, path = tokens_of(2), zoo_path("llama-64")
    without = Settings("mixed:threshold=0,group=1,sinks=0")
    with opened(path, Settings("mixed", window=(0, 1, 0))) as a, opened(path, without) as b:
        assert str(a.kv.config) == str(b.kv.config)
        assert Identity.of(a) != Identity.of(b)
        assert difference(a.kv.row_setting, b.kv.row_setting) == "scales least-error, here ggml"
        a.eval(tokens)
        with KVStore(None) as store:
            store.save(a)
            assert store.restore(b, tokens, exact_only=True).n_tokens == 0
        b.kv.load(a.kv.export())
        assert b.kv.exact_tokens == 0


def test_rows_are_exact_again_when_their_setting_is(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    path, tokens = zoo_path("llama-64"), tokens_of(3)
    with opened(path, Settings("f16")) as llm:
        llm.eval(tokens[:100])
        first = llm.kv.row_setting
        lora = adapters_in(tmp_path, path)(0)
        set_adapter(llm, lora, 0.5)
        assert "adapters=" in llm.kv.row_setting
        assert (llm.kv.exact_tokens, llm.kv.setting_of(0, 5)) == (0, first)
        llm.eval(tokens[100:200])  # behind rows that the adapter did not see
        set_control(llm, 3)
        assert "control=" in llm.kv.row_setting
        assert llm.kv.exact_tokens == 0
        set_control(llm, None)
        set_adapter(llm, lora, 0.0)
        assert llm.kv.row_setting == first
        assert llm.kv.exact_tokens == 100
        block = llm.kv.export()
        assert block.n_exact == 100


def test_text_that_sees_what_comes_is_not_text_that_does_not(zoo_path: Callable[[str], Path]) -> None:
    """Images are evaluated so, and their rows are what they should be."""
    tokens = tokens_of(11)
    with opened(zoo_path("llama-64"), Settings("f16")) as llm:
        with llm.kv.causal(False):
            llm.eval(tokens[:100])
        assert llm.kv.exact_tokens == 0
        assert llm.kv.setting_of(0, 0) == f"{llm.kv.row_setting} causal=no"


def test_an_adapter_counts_by_its_content(zoo_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = zoo_path("llama-64")
    adapters = adapters_in(tmp_path, path)
    (tmp_path / "copy.gguf").write_bytes(Path(adapters(0)).read_bytes())
    texts = []
    for options in (
        {"lora_path": adapters(0)},
        {"lora_path": str(tmp_path / "copy.gguf")},
        {"lora_path": adapters(1)},
    ):
        with opened(path, Settings("f16", options)) as llm:
            texts.append(llm.kv.row_setting)
    with opened(path, Settings("f16", adapter=(0, 1.0)), adapters) as llm:
        texts.append(llm.kv.row_setting)
    assert texts[0] == texts[1] == texts[3] != texts[2]


def test_a_store_takes_no_rows_of_another_setting(zoo_path: Callable[[str], Path]) -> None:
    path, tokens = zoo_path("llama-64"), tokens_of(4)
    with (
        opened(path, Settings("mixed:threshold=32")) as a,
        opened(path, Settings("mixed")) as b,
        KVStore(None) as store,
    ):
        a.eval(tokens)
        with pytest.raises(
            ValueError, match=r"another setting than the identity's: window 32/16/4, here 64/16/4"
        ):
            store.put(Identity.of(b), a.kv.export())


def test_what_differs_is_said(zoo_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    path, tokens = zoo_path("llama-64"), tokens_of(5)
    with (
        opened(path, Settings("mixed:attention=merged")) as a,
        opened(path, Settings("mixed:threshold=32")) as b,
    ):
        a.eval(tokens)
        with caplog.at_level(logging.INFO, "mixedkv.kv"):
            b.kv.load(a.kv.export())
        assert "attention merged, here fused" in caplog.text
        assert "window 64/16/4, here 32/16/4" in caplog.text
        assert "attention=merged" in b.kv.setting_of(0, 7)
        with KVStore(None) as store:
            reason = store.save(b).reason
            assert reason.startswith("none of the rows")
            assert "attention merged, here fused" in reason
        description = a.kv.export().describe()
        description["setting"] = ""
        b.kv.remove(0)
        b.kv.load(KVBlock.from_arrays(description, a.kv.export().to_arrays()))
        assert (b.kv.exact_tokens, b.kv.setting_of(0, 7)) == (0, "")


def test_a_model_whose_file_has_gone_shares_with_nobody(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(zoo_path("llama-64").read_bytes())
    with opened(path, Settings("f16")) as a, opened(path, Settings("f16")) as b:
        path.unlink()
        a.eval(tokens_of(6))
        block = a.kv.export()
        b.kv.load(block)
        assert b.kv.exact_tokens == 0
        a.kv.remove(0)
        a.kv.load(block)
        assert a.kv.exact_tokens == N


# --- checkpoints ---


@pytest.mark.parametrize("kv", ["mixed", "f16"])
@pytest.mark.parametrize("model", ["llama-64", "gemma3", "lfm2"])
def test_a_checkpoint_is_of_its_tokens(model: str, kv: str, zoo_path: Callable[[str], Path]) -> None:
    ours, others = tokens_of(7), tokens_of(8)
    with opened(zoo_path(model), Settings(kv)) as llm:
        llm.eval(others[:250])
        point = llm.kv.checkpoint(0)
        if point is None:
            pytest.skip("it can be cut anywhere")
        llm.reset()
        llm.kv.clear()
        llm.eval(ours)
        with pytest.raises(ValueError, match="taken behind other tokens than sequence 0 has"):
            llm.kv.resume(point, 250, 0, 0)
        llm.n_tokens = 0
        llm.eval(ours[:250])
        own = llm.kv.checkpoint(0)
        assert own is not None
        llm.eval(ours[250:])
        llm.kv.resume(own, own.first, 0, 0)
        llm.n_tokens = own.first
        assert llm.kv.exact_tokens == own.first
        llm.eval(ours[own.first : 280])
        assert llm.kv.exact_tokens == 280


def test_a_block_has_a_checkpoint_of_its_tokens(zoo_path: Callable[[str], Path]) -> None:
    with opened(zoo_path("lfm2"), Settings("f16")) as llm:
        blocks = []
        for tokens in (tokens_of(12), tokens_of(13)):
            llm.reset()
            llm.kv.clear()
            llm.eval(tokens)
            blocks.append(llm.kv.export())
        llm.kv.clear()
        with pytest.raises(ValueError, match="checkpoint was taken behind other tokens"):
            llm.kv.load(replace(blocks[0], checkpoints=blocks[1].checkpoints))
        unknown = tuple(replace(point, pasts=point.pasts[:0]) for point in blocks[0].checkpoints)
        llm.kv.load(replace(blocks[0], checkpoints=unknown))
        assert llm.kv.exact_tokens < N


def test_a_checkpoint_of_another_window_is_approximate(zoo_path: Callable[[str], Path]) -> None:
    tokens = tokens_of(9)
    with opened(zoo_path("llama-64"), Settings("mixed")) as llm:
        llm.kv.set_window(quantization_threshold=32)
        llm.eval(tokens[:200])
        point = llm.kv.checkpoint(0)
        llm.kv.set_window(quantization_threshold=64)
        llm.reset()
        llm.eval(tokens)
        assert llm.kv.exact_tokens == N
        assert point is not None
        llm.kv.resume(point, 200, 0, 0)
        llm.n_tokens = 200
        assert llm.kv.exact_tokens < 200
        n = llm.kv.exact_tokens
        llm.eval(tokens[200:250])
        assert llm.kv.exact_tokens == n


# --- another process, and a server that several share ---

_CHILD = """
import json, sys
from mixedkv.store import KVStore
from support.cache.row_settings import Settings, opened
path, place, tokens, settings = json.loads(sys.stdin.read())
where = {"remote": place} if "://" in place else {}
options = {"recheck": False, **where}
with KVStore(None if where else place, **options) as store, opened(path, Settings(**settings)) as llm:
    got = store.restore(llm, tokens, exact_only=True)
    print(json.dumps([got.n_tokens, llm.kv.exact(0, tokens[: got.n_tokens]), llm.kv.row_setting]))
"""


def in_a_child(path: Path, place: str, tokens: list[int], settings: Settings) -> tuple[int, int, str]:
    given = {"kv": settings.kv, "options": settings.options, "window": settings.window}
    text = json.dumps([str(path), place, tokens, given])
    folder = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=text, text=True, cwd=folder, stdout=subprocess.PIPE, check=True
    )
    n, exact, setting = json.loads(done.stdout.splitlines()[-1])
    return n, exact, setting


PAIRS = [
    (Settings("mixed"), Settings("mixed:cold=q4_0"), True),
    (Settings("mixed:threshold=32"), Settings("mixed"), False),
    (Settings("mixed", window=(0, 1, 0)), Settings("mixed:threshold=0,group=1,sinks=0"), False),
    (Settings("f16", {"rope_freq_base": 5000.0}), Settings("f16"), False),
]


@pytest.mark.parametrize(("one", "other", "same"), PAIRS, ids=str)
@pytest.mark.parametrize("where", ["folder", pytest.param("redis", marks=pytest.mark.needs("redis"))])
def test_another_process(
    one: Settings, other: Settings, same: bool, where: str, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    path, tokens = zoo_path("llama-64"), tokens_of(10)

    def store_and_ask(place: str, **options: str) -> tuple[int, int, str]:
        with KVStore(None if options else place, **options) as store, opened(path, one) as llm:
            llm.eval(tokens)
            assert store.save(llm).n_tokens == N
        return in_a_child(path, place, tokens, other)

    if where == "folder":
        n, exact, _ = store_and_ask(str(tmp_path / "kv"))
    else:
        with redis_server(tmp_path) as (_, port):
            url = f"redis://127.0.0.1:{port}"
            n, exact, _ = store_and_ask(url, remote=url)
    assert (n, exact) == ((N, N) if same else (0, 0))
