"""Rows of a token range leave a cache and come back: exactly, elsewhere, or into a cache of other types."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from support.cache.harness import Ctx, Mixed, Uniform, prompt, rel_rms
from support.models import zoo

pytestmark = [pytest.mark.core, pytest.mark.by_model]

KV = Mixed(threshold=24, group=8, sinks=3)
CACHES = {
    "f16": Uniform(),
    "f16-transposed": Uniform(flash=False),
    "q8_0": Uniform(k="q8_0", v="q8_0"),
    "q4_0": Uniform(k="q4_0", v="q4_0"),
    "merged": KV.with_(attention="merged"),
    "fused": KV.with_(attention="fused"),
    "no-window": KV.with_(threshold=0, group=1, sinks=0),
    "layers": KV.with_(layers=((1, -1, "q8_0", "q5_0"),)),
    "lm4": KV.with_(k="lm4", v="lm4"),
}
tokens = prompt(400, seed=6)
# whole models: rounding of sums in another order, which later layers' quantisation can enlarge
ROUNDING = 1e-2
ROWS_ONLY = [name for name in zoo.SUPPORTED if not name.startswith("lfm2")]


def without_drafts(cache: str) -> Uniform | Mixed:
    """A block takes along what is read, a sequence also holds rows for when drafts are rejected."""
    kv = CACHES[cache]
    return kv.with_(draft=0) if isinstance(kv, Mixed) else kv


def bits(ctx: Ctx, part: list[int]) -> bytes:
    return ctx.decode(part).tobytes()


@pytest.mark.parametrize("cache", CACHES)
def test_bit_identical_to_never_having_left(open_ctx, cache: str) -> None:
    stayed, away = open_ctx("llama-64", CACHES[cache]), open_ctx("llama-64", CACHES[cache])
    stayed.decode(tokens[:70])
    away.put(stayed.export())
    for i in range(5):
        part = tokens[70 + 10 * i : 80 + 10 * i]
        assert bits(away, part) == bits(stayed, part)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("turns", [(70,), (5, 4, 61), (40, 9, 1, 30, 20, 2)], ids=str)
def test_turn_by_turn(open_ctx, cache: str, turns: tuple[int, ...]) -> None:
    """A block a turn, exported when the turn ends: put back in order they are the cache that never left."""
    stayed, away = open_ctx("llama-64", CACHES[cache]), open_ctx("llama-64", CACHES[cache])
    blocks, n = [], 0
    for turn in turns:
        stayed.decode(tokens[n : n + turn])
        blocks.append(stayed.export(0, n, n + turn))
        n += turn
    for block in blocks:
        away.put(block)
    assert away.stats() == stayed.stats()
    for part in (tokens[n : n + 1], tokens[n + 1 : n + 40]):
        assert bits(away, part) == bits(stayed, part)


@pytest.mark.parametrize("name", ROWS_ONLY)
def test_every_model(open_ctx, attention: str, name: str) -> None:
    kv = KV.with_(attention=attention)
    stayed, away = open_ctx(name, kv), open_ctx(name, kv)
    stayed.decode(tokens[:40])
    first = stayed.export()
    stayed.decode(tokens[40:70])
    away.put(first)
    away.put(stayed.export(0, 40))
    assert bits(away, tokens[70:90]) == bits(stayed, tokens[70:90])


@pytest.mark.parametrize("cache", CACHES)
def test_the_middle_taken_out_and_put_back(open_ctx, cache: str) -> None:
    stayed, away = open_ctx("llama-64", CACHES[cache]), open_ctx("llama-64", CACHES[cache])
    for ctx in (stayed, away):
        ctx.decode(tokens[:70])
    middle = away.export(0, 20, 61)
    assert away.rm(0, 20, 61)
    away.put(middle)
    assert bits(away, tokens[70:90]) == bits(stayed, tokens[70:90])


@pytest.mark.parametrize("cache", CACHES)
def test_cut_is_a_rollback(open_ctx, cache: str) -> None:
    """A block cut short is what `seq_rm` of the tail leaves: what has aged out stays cold."""
    stayed, away = (open_ctx("llama-64", without_drafts(cache)) for _ in range(2))
    stayed.decode(tokens[:70])
    away.put(stayed.export(0, 0, 33))
    assert stayed.rm(0, 33)
    assert bits(away, tokens[33:60]) == bits(stayed, tokens[33:60])


@pytest.mark.parametrize("name", ROWS_ONLY)
@pytest.mark.parametrize("cache", ["f16", "q8_0", "merged", "fused"])
def test_another_place(open_ctx, cache: str, name: str) -> None:
    """Loaded elsewhere equals `seq_add` of the same rows."""
    stayed, away = (open_ctx(name, without_drafts(cache)) for _ in range(2))
    if not stayed.can_shift():
        pytest.skip(f"{name} cannot shift")
    stayed.decode(tokens[:70])
    block = stayed.export(0, 30)
    stayed.rm(0, 0, 30)
    stayed.add(0, 30, 70, -30)
    if cache == "q8_0" and block[0]["layers"][0]["head_size_k"] % 64:
        with pytest.raises(ValueError, match="cannot shift a quantised uniform cache"):
            away.put(block, shift=-30)
        return
    away.put(block, shift=-30)
    assert rel_rms(away.decode(tokens[70:90]), stayed.decode(tokens[70:90])) < ROUNDING


def pairs() -> list[tuple[str, str, str]]:
    """Return each cache with each, on models by turns: each model meets each cache on either side."""
    names, caches = ["llama-64", "llama-96", "gemma2"], list(CACHES)
    return [
        (names[0] if name == names[1] and "lm4" in (src, dst) else name, src, dst)  # lm4 packs 64 elements
        for i, src in enumerate(caches)
        for j, dst in enumerate(caches)
        for name in [names[(i + j) % len(names)]]
    ]


@pytest.mark.parametrize(("name", "src", "dst"), pairs())
def test_each_type_to_each(open_ctx, name: str, src: str, dst: str) -> None:
    """Rows of the target, in the model's basis, are the source's within what both types round away."""
    a, b = open_ctx(name, CACHES[src]), open_ctx(name, CACHES[dst])
    a.decode(tokens[:70])
    b.put(a.export())
    # of the RMS; measured 0.0003, 0.006, 0.09, 0.08
    error = {"f16": 0.002, "q8_0": 0.02, "q4_0": 0.25, "lm4": 0.25}
    for il, which in itertools.product(zoo.SHAPES[name].kv_layers, "kv"):
        have, _, hot = b.rows(il, which, unrotate=True)
        want, _, _ = a.rows(il, which, unrotate=True)
        rms = np.sqrt(np.mean(want**2))
        assert np.sqrt(np.mean((have - want) ** 2)) < error[CACHES[dst].k] * rms
        if dst == "fused" and src != "no-window":
            assert hot[-16:].all() == (src != "q4_0")  # nothing better is known of what was stored in 4 bits


def test_hot_rows_come_from_the_best_source(open_ctx) -> None:
    f16, mixed = open_ctx("llama-64", Uniform()), open_ctx("llama-64", KV.with_(attention="fused"))
    f16.decode(tokens[:70])
    mixed.put(f16.export())
    want, _, _ = f16.rows(0, "k", unrotate=True)
    have, _, hot = mixed.rows(0, "k", unrotate=True)
    assert hot.sum() == mixed.sequences()[0]["n_hot"] > 16
    rms = np.sqrt(np.mean(want**2))
    assert np.abs(have - want)[hot].max() < 0.01 * rms
    assert np.abs(have - want)[~hot].max() > 0.05 * rms


def test_between_sequences_and_streams(open_ctx, attention: str) -> None:
    for unified in (True, False):
        kv = KV.with_(attention=attention)
        ctx = open_ctx("llama-64", kv, n_seq_max=3, unified=unified)
        ctx.decode(tokens[:70])
        ctx.put(ctx.export(), seq=2)
        one = ctx.decode(tokens[70:90], seq_ids=0)
        two = ctx.decode(tokens[70:90], seq_ids=2)
        assert rel_rms(two, one) < ROUNDING


def test_shared_cells_are_exported_from_either_sequence(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, n_seq_max=2, unified=True)
    ctx.decode(tokens[:50])
    ctx.cp(0, 1)
    ctx.decode(tokens[50:60], seq_ids=1)
    a, b = ctx.export(0), ctx.export(1, 0, 50)
    for one, two in zip(a[0]["layers"], b[0]["layers"], strict=True):
        assert np.array_equal(one["k"], two["k"])


def test_sliding_window_that_let_go(open_ctx) -> None:
    """Without swa_full old rows of these layers are gone: a cut before what is left cannot go on."""
    options = {"swa_full": False, "n_ctx": 512, "n_ubatch": 16}
    stayed, away = (open_ctx("gemma2", KV, **options) for _ in range(2))
    for i in range(0, 320, 16):
        stayed.decode(tokens[i : i + 16])
    block = stayed.export()
    assert len(block[1]["positions"]) < len(block[0]["positions"]) == 320
    away.put(block)
    part = tokens[320:340]
    assert rel_rms(away.decode(part), stayed.decode(part)) < ROUNDING
    with pytest.raises(ValueError, match="swa_full"):
        open_ctx("gemma2", KV, **options).put(stayed.export(0, 0, 100))


@pytest.mark.parametrize("kv", [Uniform(), KV], ids=["f16", "mixed"])
def test_turns_of_a_sliding_window_that_lets_go(open_ctx, kv: Uniform | Mixed) -> None:
    """Each turn brings the rows its successor reads; what nobody reads any more makes room for them."""
    options = {"swa_full": False, "n_ctx": 1024, "n_ubatch": 16}
    stayed, away = (open_ctx("gemma2", kv, **options) for _ in range(2))
    long = prompt(1000, seed=8)
    blocks = []
    for first in range(0, 900, 300):
        for i in range(first, first + 300, 15):
            stayed.decode(long[i : i + 15])
        blocks.append(stayed.export(0, first))
    for block in blocks:
        away.put(block)
    assert away.pos_max() == stayed.pos_max() == 899
    part = long[900:920]
    assert rel_rms(away.decode(part), stayed.decode(part)) < ROUNDING


@pytest.mark.parametrize("kv", [Uniform(), KV], ids=["f16", "mixed"])
def test_moved_behind_a_sliding_window(open_ctx, kv: Uniform | Mixed) -> None:
    """Rows that the window no longer sees stay out of the way of those that come."""
    ctx, source = (open_ctx("gemma2", kv, n_ctx=256) for _ in range(2))
    ctx.decode(tokens[:100])
    source.decode(tokens[:50])
    ctx.rm(0, 0, 5)
    ctx.put(source.export(), shift=100)
    assert ctx.pos_max() == 149
    for il in (0, 1):
        assert ctx.rows(il, "k", 0, 100)[1].tolist() == list(range(100, 150))
    ctx.rm(0)
    assert ctx.stats()["n_cells_used"] == 0


@pytest.mark.parametrize("cache", ["f16", "q8_0", "fused"])
def test_state_saved_after_a_move(open_ctx, cache: str) -> None:
    moved, restored = open_ctx("llama-64", CACHES[cache]), open_ctx("llama-64", CACHES[cache])
    moved.decode(tokens[:70])
    block = moved.export(0, 30)
    moved.rm(0)
    moved.put(block, shift=-30)
    assert restored.load(moved.save())
    assert bits(restored, tokens[70:80]) == bits(moved, tokens[70:80])


def test_leftovers_go_only_if_the_block_comes(open_ctx) -> None:
    ctx = open_ctx("llama-64", KV, n_ctx=256)
    for i in range(0, 240, 60):
        ctx.decode(tokens[i : i + 60])
    block = ctx.export(0, 0, 200)
    with pytest.raises(ValueError, match="ascend"):
        ctx.put([{**block[0], "positions": block[0]["positions"][::-1].copy()}], drop_from=0)
    assert ctx.pos_max() == 239
    ctx.put(block, drop_from=0)
    assert ctx.pos_max() == 199


class TestBadBlocks:
    """One clear error, and nothing changed."""

    @pytest.fixture
    def ctx(self, open_ctx) -> Ctx:
        ctx = open_ctx("llama-64", KV, n_ctx=128)
        ctx.decode(tokens[:20])
        return ctx

    @pytest.fixture
    def block(self, open_ctx):
        ctx = open_ctx("llama-64", KV)
        ctx.decode(tokens[:70])
        return ctx.export(0, 20)

    def refuse(self, ctx: Ctx, block, match: str, **options: int) -> None:
        before, rows = ctx.stats(), ctx.rows(0, "k")[0]
        with pytest.raises(ValueError, match=match):
            ctx.put(block, **options)
        assert ctx.stats() == before
        assert np.array_equal(ctx.rows(0, "k")[0], rows)

    def test_position_taken(self, ctx: Ctx, block) -> None:
        self.refuse(ctx, block, "already has position 19", shift=-1)
        self.refuse(ctx, block, "already has position 0", shift=-20)

    def test_before_the_beginning(self, ctx: Ctx, block) -> None:
        self.refuse(ctx, block, "ascend from 0", shift=-21)
        self.refuse(ctx, block, "ascend from 0", shift=2**31 - 60)

    def test_no_room(self, ctx: Ctx, block) -> None:
        for i in range(20, 230, 70):
            ctx.decode(tokens[i : i + 70])
        self.refuse(ctx, block, "no room for 50 more tokens", shift=210)

    def test_another_model(self, ctx: Ctx, open_ctx) -> None:
        other = open_ctx("llama-96", KV)
        other.decode(tokens[:10])
        self.refuse(ctx, other.export(), "the model", shift=20)

    def test_layers(self, ctx: Ctx, block) -> None:
        layers = block[0]["layers"]
        self.refuse(ctx, [{**block[0], "layers": layers[:1]}], "layers in a group")
        self.refuse(ctx, [{**block[0], "layers": [*layers[:-1], layers[0]]}], "there twice")
        self.refuse(ctx, [{**block[0], "layers": [*layers[:-1], {**layers[-1], "il": 77}]}], "layer 77")
        self.refuse(ctx, block * 2, "groups of layers")

    @pytest.mark.parametrize("field", ["k", "v", "k_hot", "v_hot"])
    def test_array_sizes(self, ctx: Ctx, block, field: str) -> None:
        layer = block[0]["layers"][0]
        for array in (layer[field][:-1], layer[field][:, :-1], layer[field].reshape(-1)):
            bad = [{**layer, field: np.ascontiguousarray(array)}, *block[0]["layers"][1:]]
            self.refuse(ctx, [{**block[0], "layers": bad}], f"array '{field}'")

    def test_order(self, ctx: Ctx, block) -> None:
        positions, hot = block[0]["positions"], block[0]["hot"]
        self.refuse(ctx, [{**block[0], "positions": positions[::-1].copy()}], "ascend")
        self.refuse(ctx, [{**block[0], "hot": hot + np.int32(len(positions))}], "hot must ascend")

    def test_missing_rows(self, ctx: Ctx) -> None:
        for p0, p1 in ((20, -1), (0, 21), (5, 5), (10, 2)):
            with pytest.raises(LookupError, match="no rows"):
                ctx.export(0, p0, p1)
        with pytest.raises(LookupError, match="out of range"):
            ctx.export(1)
        ctx.rm(0, 5, 6)
        with pytest.raises(LookupError, match="position 5 exactly once"):
            ctx.export()


def test_a_sequence_with_slots_of_another_leaves_and_comes_back(open_ctx, attention: str) -> None:
    """Its own are taken by rows that it once shared, then they are free again."""
    kv = KV.with_(attention=attention, threshold=64)
    ctx = open_ctx("llama-64", kv, n_ctx=768, n_seq_max=3, unified=True)
    ctx.decode(tokens[200:210], seq_ids=0)
    ctx.decode(tokens[:60], seq_ids=1)
    ctx.cp(1, 2)
    ctx.rm(1)
    ctx.decode(tokens[100:130], seq_ids=1)
    ctx.rm(2)
    ctx.decode(tokens[130:150], positions=30, seq_ids=1)
    groups = ctx.export(seq=1)
    for group in groups:
        assert len(set(group["slots"])) == len(group["slots"]) == 50
    away = open_ctx("llama-64", kv)
    away.put(groups)
    mine, theirs = away.decode(tokens[150:153]), ctx.decode(tokens[150:153], positions=50, seq_ids=1)
    assert rel_rms(mine, theirs) < ROUNDING
